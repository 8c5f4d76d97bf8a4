"""What is kept of the activations that go into one linear layer, or into the same layer of every expert."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from zaya_tools.errors import NonFiniteError

OCTAVES = (-24, 16)
STEPS = 16
BINS = (OCTAVES[1] - OCTAVES[0]) * STEPS
"""Bins of the histogram of magnitudes: 16 an octave from 2**-24 to 2**16, the outermost ones open."""
_COUNTED = 256
LARGEST = 2.0**48
"""Magnitude (2.8e14) past which no activation is taken for one.

Below it nothing here overflows float32: its square is 2**96, and the sketch adds rows times width of those, at most
2**31 (131,072 tokens at once of 16,384 channels).
"""
OVERFLOW = "the model overflows on this text: check the source with `zaya validate`"
RANK = 32
"""Directions of the sketch of an input's second moments."""


def directions(width: int) -> Tensor:
    """The fixed signs [width, RANK], float32, that second moments are multiplied by: the same on every machine."""
    words = np.random.PCG64(width).random_raw(-(-width * RANK // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[: width * RANK]
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1).view(width, RANK)


@dataclass(frozen=True)
class Moments:
    """Figures of `parts` layers of `width` inputs: of each expert, or of the one layer that there is.

    `tokens` int64 [parts]; `amax` float32 [parts], the largest magnitude; per input channel [parts, width] float32:
    `channel_amax`, `second_moment` (mean of squares) and `mean_abs`; `histogram` int64 [parts, BINS] counts magnitudes
    of some of the tokens; `sketch` float32 [parts, width, RANK] is the mean of x x^T times `directions`, from which the
    strongest part of x x^T can be had back. All are zero for a layer that no token reached.
    """

    tokens: Tensor
    amax: Tensor
    channel_amax: Tensor
    second_moment: Tensor
    mean_abs: Tensor
    histogram: Tensor
    sketch: Tensor

    def percentile(self, part: int, percent: float) -> float:
        """The magnitude that `percent` of a layer's inputs stay below, to a bin's width (4 %); 0 without tokens."""
        counts = self.histogram[part].double().cumsum(0)
        if not counts[-1]:
            return 0.0
        place = int(torch.searchsorted(counts, counts[-1] * percent / 100).clamp(max=BINS - 1))
        largest = float(self.amax[part])
        return largest if place == BINS - 1 else min(2.0 ** (OCTAVES[0] + (place + 1) / STEPS), largest)


class Gathering:
    """Moments while tokens come in. Sums are float64, so that their order hardly matters."""

    def __init__(self, name: str, parts: int, width: int, device: torch.device) -> None:
        self.name, self.parts = name, parts
        self._tokens = [0] * parts
        self._amax = torch.zeros(parts, width, device=device)
        self._squares = torch.zeros(parts, width, dtype=torch.float64, device=device)
        self._sums = torch.zeros(parts, width, dtype=torch.float64, device=device)
        self._histogram = torch.zeros(parts, BINS, dtype=torch.int64, device=device)
        self._directions = directions(width).to(device)
        self._sketch = torch.zeros(parts, width, RANK, dtype=torch.float64, device=device)

    def add(self, part: int, rows: Tensor) -> None:
        """Take activations [rows, width] of any floating dtype.

        NonFiniteError where one is NaN, infinite or so large that figures of it could not be kept.
        """
        values = rows.detach().float()
        size = values.abs()
        largest = size.amax(0)
        top = float(largest.max())  # NaN where one is
        if not top <= LARGEST:
            which = f", expert {part}" if self.parts > 1 else ""
            what = f"reach {top:.2g}" if isfinite(top) else "are NaN or infinite"
            raise NonFiniteError(f"{self.name}{which}: activations {what}", OVERFLOW)
        self._tokens[part] += len(rows)
        torch.maximum(self._amax[part], largest, out=self._amax[part])
        self._sums[part] += size.sum(0)
        # Evenly spaced rows are plenty for percentiles, and counting is the slowest part by far.
        some = size[:: max(1, len(size) // _COUNTED)]
        bins = some.clamp(2.0 ** OCTAVES[0], 2.0 ** OCTAVES[1]).log2_().sub_(OCTAVES[0]).mul_(STEPS).long()
        self._histogram[part] += torch.bincount(bins.flatten().clamp_(max=BINS - 1), minlength=BINS)
        self._squares[part] += size.square_().sum(0)
        self._sketch[part] += values.T @ (values @ self._directions)

    def moments(self) -> Moments:
        """The figures so far, on the CPU."""
        count = torch.tensor(self._tokens, dtype=torch.int64)
        each = count.clamp_min(1)[:, None].double()
        return Moments(
            tokens=count,
            amax=self._amax.amax(1).cpu(),
            channel_amax=self._amax.cpu(),
            second_moment=(self._squares.cpu() / each).float(),
            mean_abs=(self._sums.cpu() / each).float(),
            histogram=self._histogram.cpu(),
            sketch=(self._sketch.cpu() / each[:, :, None]).float(),
        )
