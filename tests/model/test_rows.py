"""Matrices that stay on disk against the same in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zaya_tools.checkpoint.header import read_header
from zaya_tools.model.rows import StoredRows


@pytest.fixture
def both(tmp_path: Path) -> tuple[torch.Tensor, StoredRows]:
    matrix = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"before": torch.zeros(3, dtype=torch.bfloat16), "matrix": matrix}, tmp_path / "m.safetensors")
    (info,) = [t for t in read_header(tmp_path / "m.safetensors").tensors if t.name == "matrix"]
    return matrix, StoredRows(info, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("rows", [slice(0, 50), slice(7, 20), slice(40, 90), slice(5, 5), slice(None)])
def test_slices_are_the_rows(both: tuple[torch.Tensor, StoredRows], rows: slice) -> None:
    matrix, stored = both
    assert torch.equal(stored[rows], matrix[rows])
    assert len(stored) == len(matrix)


def test_rows_are_looked_up_as_an_embedding_does(both: tuple[torch.Tensor, StoredRows]) -> None:
    matrix, stored = both
    ids = torch.tensor([[3, 49, 3], [0, 7, 7]])
    assert torch.equal(stored.lookup(ids), torch.nn.functional.embedding(ids, matrix))


def test_the_file_is_closed_with_the_matrix(tmp_path: Path) -> None:
    save_file({"matrix": torch.zeros(2, 2)}, tmp_path / "m.safetensors")
    (info,) = read_header(tmp_path / "m.safetensors").tensors
    stored = StoredRows(info, torch.float32, torch.device("cpu"))
    opened = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists() and entry.samefile(info.file)]
    assert len(opened) == 1
    del stored
    assert not opened[0].exists()
