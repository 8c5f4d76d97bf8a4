from __future__ import annotations

import math

import numpy as np
import pytest

from zaya_tools.evaluation.statistics import BLOCK, RESAMPLES, Estimate, mean


def noise(count: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(3.0, 2.0, count)


@pytest.mark.parametrize("seed", range(5))
def test_the_error_of_independent_values_is_that_of_their_mean(seed: int) -> None:
    values = noise(50_000, seed)
    found = mean(values)
    assert found.value == pytest.approx(values.mean(), rel=1e-12)
    # 390 blocks and 1000 resamples know a deviation to about 5 percent.
    assert found.error == pytest.approx(values.std() / math.sqrt(len(values)), rel=0.2)


def test_the_error_of_correlated_values_is_larger() -> None:
    runs = np.repeat(noise(2000), 32)  # 32 tokens that are all alike
    independent = runs.std() / math.sqrt(len(runs))
    error = mean(runs).error
    assert error == pytest.approx(independent * math.sqrt(32), rel=0.25)
    # The same values in another order are no longer correlated.
    shuffled = np.random.default_rng(1).permutation(runs)
    assert mean(shuffled).error == pytest.approx(independent, rel=0.2)


def test_equal_values_have_equal_errors() -> None:
    values = noise(5000)
    assert mean(values) == mean(values.copy())
    assert mean(values) != mean(noise(5000, 1))
    assert mean(np.full(5000, 0.1)).error == pytest.approx(0, abs=1e-15)


def test_a_function_of_the_mean_has_the_error_of_its_slope() -> None:
    values = noise(20_000)
    plain, exponential = mean(values), mean(values, np.exp)
    assert exponential.value == pytest.approx(math.exp(values.mean()))
    assert exponential.error == pytest.approx(plain.error * exponential.value, rel=0.1)


def test_a_paired_difference_is_known_better_than_either() -> None:
    hard = noise(20_000)
    model = hard + 0.01 * noise(20_000, 1)
    assert mean(model - hard, np.exp).error < 0.05 * mean(model, np.exp).error


@pytest.mark.parametrize("count", [1, 2, BLOCK, 2 * BLOCK - 1])
def test_a_single_block_says_nothing_about_its_error(count: int) -> None:
    values = noise(count)
    assert mean(values) == Estimate(values.mean(), 0.0)
    assert mean(noise(2 * BLOCK)).error > 0


def test_no_values_have_no_mean() -> None:
    assert math.isnan(mean(np.empty(0)).value)
    assert math.isnan(mean(np.empty(0)).error)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e4])
def test_broken_figures_are_neither_warned_about_nor_made_whole(bad: float) -> None:
    values = noise(1000)
    values[17] = bad * 1000
    found = mean(values, np.exp)
    assert not math.isfinite(found.value)
    assert math.isnan(found.error)
    assert math.isfinite(mean(noise(1000), np.exp).error)


def test_resamples_are_drawn_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text has a hundred thousand blocks: a thousand draws of them together would not fit."""
    import tracemalloc

    values = noise(500_000)
    tracemalloc.start()
    try:
        mean(values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * RESAMPLES * len(values) // BLOCK
