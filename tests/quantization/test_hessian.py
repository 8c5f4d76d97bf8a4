from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zaya_tools.calibration.moments import RANK, Gathering, directions
from zaya_tools.errors import NonFiniteError
from zaya_tools.quantization.hessian import PRIOR, Hessians, sketched

CPU = torch.device("cpu")


def gathered(rows: list[Tensor], width: int) -> Gathering:
    made = Gathering("x", len(rows), width, CPU)
    for part, own in enumerate(rows):
        if len(own):
            made.add(part, own)
    return made


def low_rank(tokens: int, width: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, rank, generator=generator) @ torch.randn(rank, width, generator=generator)


@settings(max_examples=20, deadline=None)
@given(width=st.integers(4, 90), rank=st.integers(1, RANK // 2), seed=st.integers(0, 99))
def test_inputs_of_few_directions_come_back_exactly(width: int, rank: int, seed: int) -> None:
    rows = low_rank(200, width, rank, seed)
    found = sketched(gathered([rows], width).moments(), shared=True)[0]
    wanted = rows.T @ rows / len(rows)
    assert (found - wanted).norm() < 2e-3 * wanted.norm()


@settings(max_examples=20, deadline=None)
@given(width=st.integers(2, 120), parts=st.integers(1, 3), shared=st.booleans(), seed=st.integers(0, 99))
def test_any_inputs_give_a_matrix_that_inputs_could_have(width: int, parts: int, shared: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, width, generator=generator) * 10 for n in (40, 0, 3)[:parts]]
    found = sketched(gathered(rows, width).moments(), shared=shared)
    assert found.shape == (parts, width, width)
    for matrix in found.double():
        torch.testing.assert_close(matrix, matrix.T, rtol=1e-4, atol=1e-4)
        assert torch.linalg.eigvalsh(matrix).min() > -1e-3 * matrix.diagonal().mean()


def test_the_diagonal_is_that_of_the_inputs() -> None:
    rows = torch.randn(500, 100, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 101)
    found = sketched(gathered([rows], 100).moments(), shared=True)[0]
    torch.testing.assert_close(found.diagonal(), rows.square().mean(0), rtol=1e-3, atol=0)


def test_a_sketch_knows_more_than_the_diagonal() -> None:
    rows = low_rank(4000, 96, 96, 0) * torch.logspace(0, -2, 96)
    mix = torch.randn(96, 96, generator=torch.Generator().manual_seed(1)) / 96**0.5
    rows = rows @ mix
    wanted = rows.T @ rows / len(rows)
    found = sketched(gathered([rows], 96).moments(), shared=True)[0]
    assert (found - wanted).norm() < 0.2 * (torch.diag(wanted.diagonal()) - wanted).norm()


def test_an_expert_without_tokens_leans_on_the_others_where_inputs_are_alike() -> None:
    rows = torch.randn(300, 16, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 17)
    found = sketched(gathered([rows, rows[:0]], 16).moments(), shared=True)
    torch.testing.assert_close(found[1].diagonal(), rows.square().mean(0), rtol=1e-3, atol=0)
    apart = sketched(gathered([rows, rows[:0]], 16).moments(), shared=False)
    torch.testing.assert_close(apart[1], torch.eye(16), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_sums_lean_as_sketches_do(shared: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(count, 24, generator=generator) * (1 + part) for part, count in enumerate((400, 30, 0))]
    sums = Hessians("x", 3, 24, CPU)
    for part, own in enumerate(rows):
        if len(own):
            sums.add(part, own)
    found = sums.means(shared=shared)
    wanted = sketched(gathered(rows, 24).moments(), shared=shared)
    torch.testing.assert_close(
        found.diagonal(dim1=-2, dim2=-1), wanted.diagonal(dim1=-2, dim2=-1), rtol=1e-3, atol=1e-4
    )
    own = rows[1].T @ rows[1] / 30
    weight = 30 / (30 + PRIOR * 24)
    common = sum(r.T @ r for r in rows) / 430 if shared else torch.diag(own.diagonal())
    torch.testing.assert_close(found[1], weight * own + (1 - weight) * common, rtol=1e-4, atol=1e-4)


def test_numbers_that_are_none_are_named() -> None:
    sums = Hessians("block 2, input of down_proj", 4, 3, CPU)
    with pytest.raises(NonFiniteError, match="block 2, input of down_proj, expert 1"):
        sums.add(1, torch.tensor([[1.0, float("inf"), 0.0]]))


def test_directions_are_the_same_everywhere() -> None:
    assert directions(3).flatten()[:12].tolist() == [-1, -1, -1, 1, 1, 1, 1, 1, -1, 1, -1, -1]
    assert directions(2048).abs().eq(1).all()
    assert directions(2048).mean().abs() < 0.02
