from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zaya_tools.calibration.moments import LARGEST, RANK, Gathering, Moments
from zaya_tools.errors import NonFiniteError

CPU = torch.device("cpu")


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    width=st.integers(1, 7),
    seed=st.integers(0, 99),
)
def test_however_tokens_come_in_the_figures_are_those_of_all_of_them(counts: list[int], width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(count, width, generator=generator) for count in counts]
    gathering = Gathering("x", 2, width, CPU)
    for piece in rows:
        gathering.add(1, piece)
    found, everything = gathering.moments(), torch.cat(rows).double()
    assert found.tokens.tolist() == [0, len(everything)]
    torch.testing.assert_close(found.second_moment[1], everything.square().mean(0).float())
    torch.testing.assert_close(found.mean_abs[1], everything.abs().mean(0).float())
    assert torch.equal(found.channel_amax[1], everything.abs().amax(0).float())
    assert found.amax[1] == everything.abs().max().float()
    for kind in (found.second_moment, found.mean_abs, found.channel_amax, found.histogram):
        assert not kind[0].any()


@pytest.mark.parametrize("percent", [50, 90, 99, 99.9])
def test_percentiles_are_numpys_to_a_bins_width(percent: float) -> None:
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    gathering = Gathering("x", 1, 64, CPU)
    gathering.add(0, rows)
    expected = float(np.percentile(rows.abs().numpy(), percent))
    assert gathering.moments().percentile(0, percent) == pytest.approx(expected, rel=2 ** (1 / 16) - 1 + 0.01)


def test_the_highest_percentile_is_the_largest_magnitude() -> None:
    gathering = Gathering("x", 1, 3, CPU)
    gathering.add(0, torch.tensor([[1.0, -70_000.0, 0.0]]))
    assert gathering.moments().percentile(0, 100) == 70_000


def test_no_tokens_no_percentile() -> None:
    assert Gathering("x", 1, 3, CPU).moments().percentile(0, 99) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_named_by_expert(bad: float) -> None:
    gathering = Gathering("block 3, input of down_proj", 8, 2, CPU)
    with pytest.raises(NonFiniteError, match="block 3, input of down_proj, expert 5"):
        gathering.add(5, torch.tensor([[0.0, 1.0], [bad, 1.0]]))


@given(
    exponent=st.floats(-60, 38.4), rows=st.integers(1, 64), width=st.integers(1, 64), negative=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_figures_are_finite_or_the_run_stops(
    exponent: float, rows: int, width: int, negative: bool, dtype: torch.dtype
) -> None:
    """Whatever the magnitude, no figure of it overflows: what is too large is told by block and expert."""
    size = min(10.0**exponent, torch.finfo(dtype).max) * (-1 if negative else 1)
    gathering = Gathering("block 3, input of down_proj", 8, width, CPU)
    rows_of_it = torch.full((rows, width), size, dtype=dtype)
    if abs(float(rows_of_it[0, 0])) > LARGEST:
        with pytest.raises(NonFiniteError, match="block 3, input of down_proj, expert 5: activations reach"):
            gathering.add(5, rows_of_it)
    else:
        gathering.add(5, rows_of_it)
        check_finite(gathering.moments())


def check_finite(moments: Moments) -> None:
    for kind in (moments.amax, moments.channel_amax, moments.second_moment, moments.mean_abs, moments.sketch):
        assert bool(torch.isfinite(kind).all())


def test_the_largest_that_is_taken_overflows_nothing_in_the_longest_runs() -> None:
    """As many rows and channels as any model has, by exact arithmetic on powers of two."""
    rows, width = 131_072, 16_384
    assert LARGEST**2 * rows * width < torch.finfo(torch.float32).max
    gathering = Gathering("x", 1, 4096, CPU)
    for _ in range(3):
        gathering.add(0, torch.full((2048, 4096), LARGEST))
    found = gathering.moments()
    check_finite(found)
    assert float(found.second_moment[0, 0]) == LARGEST**2
    assert found.sketch.shape == (1, 4096, RANK)
