"""Means with error bars over text, whose tokens are not independent: blocks of neighbours are resampled together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 128
"""Neighbouring tokens that are resampled together: errors of a text are correlated over about a line."""
RESAMPLES = 1000

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value and the standard error of its block bootstrap (Kuensch 1989); 0 where there is a single block."""

    value: float
    error: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"value": self.value, "error": self.error}


def mean(values: Values, of: Callable[[Values], Values] = lambda x: x) -> Estimate:
    """`of` the mean of values [tokens], with its error; `of` maps an array of means elementwise (exp, say).

    The resampling is seeded: equal values give equal errors.
    """
    if not len(values):
        return Estimate(float("nan"), float("nan"))
    blocks = max(1, len(values) // BLOCK)
    parts = np.array_split(values, blocks)
    sums, counts = np.array([part.sum() for part in parts]), np.array([float(len(part)) for part in parts])
    with np.errstate(over="ignore", invalid="ignore"):  # a broken model's figures may be infinite, or no numbers
        center = float(of(np.array([values.mean()]))[0])
        if blocks == 1 or not np.isfinite(center):
            return Estimate(center, 0.0 if np.isfinite(center) else float("nan"))
        return Estimate(center, _spread(sums, counts, of))


def _spread(sums: Values, counts: Values, of: Callable[[Values], Values]) -> float:
    blocks = len(sums)
    generator = np.random.default_rng(0)
    # One after the other: together, the draws would be a thousand times the blocks.
    draws = (generator.integers(0, blocks, blocks) for _ in range(RESAMPLES))
    means = np.array([sums[drawn].sum() / counts[drawn].sum() for drawn in draws])
    return float(of(means).std(ddof=1))
