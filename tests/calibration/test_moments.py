from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zaya_tools.calibration.moments import Gathering
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
