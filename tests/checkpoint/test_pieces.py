"""Tensors out of parts hold what torch would have put together, at every offset and in every order of reading."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.synthetic import header
from zaya_tools.checkpoint import ranges
from zaya_tools.checkpoint.pieces import assembled, first_rows, joined, with_fused_gates
from zaya_tools.checkpoint.ranges import Files, read_range
from zaya_tools.checkpoint.source import read_bytes, read_stretch
from zaya_tools.errors import LayoutError, SourceError
from zaya_tools.tensors import TensorInfo


def stored(folder: Path, name: str, tensor: Tensor, gap: int = 3) -> TensorInfo:
    """A tensor in a file of its own, after a few bytes of something else."""
    file = folder / name
    file.write_bytes(b"x" * gap + tensor.contiguous().numpy().tobytes())
    return TensorInfo(name, "I32", tuple(tensor.shape), file, gap, tensor.nbytes)


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)


def content(tensor: TensorInfo) -> Tensor:
    return torch.from_numpy(read_bytes(tensor)).view(torch.int32).reshape(tensor.shape)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_joined_is_concatenation(data: st.DataObject) -> None:
    axis, stacks = data.draw(st.sampled_from([(0, 1), (0, 2), (1, 1)]))
    ranks, rows, columns = (data.draw(st.integers(1, 5)) for _ in range(3))
    shape = (rows * stacks, columns)
    parts = [numbers(*shape) + 1000 * rank for rank in range(ranks)]
    wanted = torch.cat([torch.cat(part.chunk(stacks)) for part in parts], axis)
    if stacks == 2:
        wanted = torch.cat([part.chunk(2)[half] for half in range(2) for part in parts])
    with tempfile.TemporaryDirectory() as folder:
        tensor = joined("x", [stored(Path(folder), str(n), part) for n, part in enumerate(parts)], axis, stacks)
        assert tensor.shape == tuple(wanted.shape)
        assert torch.equal(content(tensor), wanted)
        start = data.draw(st.integers(0, tensor.nbytes))
        length = data.draw(st.integers(0, tensor.nbytes - start))
        found = read_stretch(tensor, start, length)
        assert found.tobytes() == wanted.numpy().tobytes()[start : start + length]
        few = data.draw(st.integers(1, wanted.shape[0]))
        assert torch.equal(content(first_rows(tensor, few)), wanted[:few])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_assembled_is_the_tensor_that_was_cut(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    whole = numbers(*shape)
    first, second = 0, data.draw(st.integers(0, len(shape) - 1))
    cuts = {axis: sorted(data.draw(st.sets(st.integers(1, shape[axis]), max_size=2))) for axis in {first, second}}
    bounds = {axis: sorted({0, *inner, shape[axis]}) for axis, inner in cuts.items()}
    with tempfile.TemporaryDirectory() as folder:
        parts = []
        grid = [(r, c) for r in range(len(bounds[first]) - 1) for c in range(len(bounds[second]) - 1)]
        for number, (r, c) in enumerate(grid):
            if first == second and r != c:
                continue
            slices = [slice(None)] * len(shape)
            slices[first] = slice(bounds[first][r], bounds[first][r + 1])
            slices[second] = slice(bounds[second][c], bounds[second][c + 1])
            part = whole[tuple(slices)]
            offsets = tuple(s.start or 0 for s in slices)
            info = stored(Path(folder), str(number), part)
            parts.append(((offsets, tuple(part.shape)), info.file, info.start))
        data.draw(st.randoms()).shuffle(parts)
        tensor = assembled("x", "I32", shape, parts)
        assert torch.equal(content(tensor), whole)
        if len(parts) > 1:
            for wrong in (parts[1:], [*parts, parts[0]], [parts[0], *parts[:-1]]):
                with pytest.raises(SourceError, match="hold some twice"):
                    assembled("x", "I32", shape, wrong)


def test_cuts_along_three_axes_are_refused(tmp_path: Path) -> None:
    whole = numbers(2, 2, 2)
    parts = []
    for index in np.ndindex(2, 2, 2):
        info = stored(tmp_path, str(index), whole[index].reshape(1, 1, 1))
        parts.append(((index, (1, 1, 1)), info.file, info.start))
    with pytest.raises(LayoutError, match=r"cut along axes \[0, 1, 2\]"):
        assembled("x", "I32", (2, 2, 2), parts)


@pytest.mark.parametrize("wide", [1, 2**16])
def test_wide_and_narrow_rows_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    monkeypatch.setattr(ranges, "_WIDE", wide)
    parts = [numbers(7, 5) + 1000 * rank for rank in range(3)]
    tensor = joined("x", [stored(tmp_path, str(n), part) for n, part in enumerate(parts)], 1)
    raw = torch.cat(parts, 1).numpy().tobytes()
    with Files() as files:
        for start in range(0, tensor.nbytes, 11):
            buffer = np.zeros(min(29, tensor.nbytes - start), np.uint8)
            read_range(tensor, start, buffer, files)
            assert buffer.tobytes() == raw[start : start + len(buffer)]


def test_a_reader_that_knows_nothing_of_chunks_fails(tmp_path: Path) -> None:
    tensor = joined("x", [stored(tmp_path, str(n), numbers(4, 4)) for n in range(2)], 0)
    with Files() as files, pytest.raises(SourceError, match="cannot be read at byte -"):
        ranges.read_into(files(tensor.file), np.zeros(4, np.uint8), tensor.start, "x")


@pytest.mark.parametrize("cut", [False, True])
def test_gate_and_up_stacks_become_one(tmp_path: Path, cut: bool) -> None:
    gate, up, down = numbers(4, 6, 5), numbers(4, 6, 5) + 1000, numbers(4, 5, 6) + 2000
    experts = "model.layers.0.mlp.experts."
    tensors = {}
    for name, tensor in {"w1": gate, "w3": up, "w2": down}.items():
        if cut:
            halves = [(n, stored(tmp_path, f"{name}{n}", tensor[2 * n : 2 * n + 2])) for n in range(2)]
            parts = [(((2 * n, 0, 0), info.shape), info.file, info.start) for n, info in halves]
            tensors[experts + name] = assembled(experts + name, "I32", tuple(tensor.shape), parts)
        else:
            tensors[experts + name] = stored(tmp_path, name, tensor)
    found = with_fused_gates({**tensors, "other": tensors[experts + "w2"]})
    assert found.keys() == {experts + "gate_up_proj", experts + "down_proj", "other"}
    assert torch.equal(content(found[experts + "gate_up_proj"]), torch.cat([gate, up], 1))
    assert torch.equal(content(found[experts + "down_proj"]), down)


def test_matrices_that_do_not_belong_together() -> None:
    names = [f"model.layers.0.mlp.experts.{matrix}" for matrix in ("w1", "w2", "w3")]
    tensors = {name: header(name, (2, 3, 4)) for name in names}
    with pytest.raises(LayoutError, match="is there without"):
        with_fused_gates({name: tensors[name] for name in names[:2]})
    with pytest.raises(LayoutError, match=r"but .*w3 is BF16"):
        with_fused_gates({**tensors, names[2]: header(names[2], (2, 5, 4))})


def test_other_names_stay_as_they_are() -> None:
    tensors = {"model.layers.0.mlp.w1": header("model.layers.0.mlp.w1", (2, 3, 4))}
    assert with_fused_gates(tensors) == tensors
