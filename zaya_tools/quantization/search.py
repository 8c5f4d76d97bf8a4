"""Scales with the smallest squared error: a search over what a group's largest magnitude is mapped to.

The error of a candidate is summed in float32 in a fixed order, so that every machine and both paths choose alike.
The winner is used only where its exact error is smaller than that of the scale that `minmax` gives.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from zaya_tools.quantization.kernels import MX_TOP, SPAN, Scales, mx_codes, mx_scales, nearest, nv_scales
from zaya_tools.quantization.scheme import Kind, Scheme

COARSE = {
    Kind.FLOAT8: (1.0, 0.96, 0.92, 0.88, 0.84, 0.80, 0.76, 0.72, 1.04, 1.08),
    # Those written as quotients map the largest magnitude to the lowest or the highest integer: weights that were
    # quantized before come out as they were.
    Kind.INT8: (1.0, 127.5 / 128, 127.5 / 127, 0.88, 0.91, 0.94, 0.97, 1.03),
    Kind.INT4: (1.0, 7.5 / 8, 7.5 / 7, 1.035, 0.965, *(round(0.9 - 0.035 * step, 3) for step in range(12))),
}
"""Factors of the scale that `minmax` starts from; the first is that scale."""

FINE = {
    Kind.FLOAT8: (0.99, 0.98, 1.01, 1.02),
    Kind.INT8: (0.977, 0.985, 0.992, 1.008, 1.015, 1.023),
    Kind.INT4: (0.977, 0.984, 0.992, 1.008, 1.016, 1.023),
}
"""Factors of the best of those, tried afterwards."""

STEPS = {Kind.MXFP4: (0, -1, 1), Kind.NVFP4: (0, 1, 2, 3, 4, 5, 6, -1, -2)}
"""Steps from the code of the `minmax` scale, where scales are of a type with few values. A magnitude that NVFP4 maps
to 4 instead of 6 has a scale that is 4 or 5 steps up."""

SMALLEST, LARGEST = 2.0**-100, 2.0**100
"""Groups whose scale lies outside keep the `minmax` scale: the float32 sums of the search might overflow there."""

LANES, CHUNK = 16, 128
"""Sums run in 16 lanes along at most 128 elements, then fold in halves; chunks are added in float64."""


def ordered_sum(terms: Tensor) -> Tensor:
    """Sums [G] of [G, n] in float64, in the one order that the native path has too."""
    width = terms.shape[1]
    filled = pad(terms, (0, -width % (CHUNK if width > CHUNK else LANES)))
    lanes = filled.view(len(terms), -1, min(filled.shape[1], CHUNK) // LANES, LANES)
    total = lanes[:, :, 0].clone()
    for index in range(1, lanes.shape[2]):
        total += lanes[:, :, index]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    chunks = total[..., 0].double()
    result = chunks[:, 0].clone()
    for index in range(1, chunks.shape[1]):
        result += chunks[:, index]
    return result


def search(groups: Tensor, amax: Tensor, start: Scales, scheme: Scheme, whole: Tensor | None) -> Scales:
    """Scales [G] of groups [G, n] that are no worse than `start`, which `minmax` made from `amax`."""
    values = groups.float()
    best = _Best(values, start, scheme.kind)
    if scheme.kind is Kind.MXFP4:
        for step in STEPS[scheme.kind]:
            best.offer(mx_scales((mx_codes(amax.float()) + step).clamp_(0, MX_TOP[amax.dtype])))
    elif scheme.kind is Kind.NVFP4:
        assert whole is not None
        for step in STEPS[scheme.kind]:
            best.offer(nv_scales((start.stored.int() + step).clamp_(1, 126), whole))
    else:
        reach = amax.float() / amax.new_full((), SPAN[scheme.kind], dtype=torch.float32)
        for factor in COARSE[scheme.kind]:
            best.offer(_rounded(reach * factor, amax.dtype), factor)
        centre = best.factor
        for factor in FINE[scheme.kind]:
            best.offer(_rounded(reach * (centre * factor), amax.dtype))
    better = exact_error(values, best.value, scheme.kind) < exact_error(values, start.value, scheme.kind)
    wins = better & (start.value >= SMALLEST) & (start.value <= LARGEST)
    return Scales(torch.where(wins, best.stored, start.stored), torch.where(wins, best.value, start.value))


def _rounded(scale: Tensor, dtype: torch.dtype) -> Scales:
    stored = scale.to(dtype)
    return Scales(stored, stored.float())


def exact_error(values: Tensor, scale: Tensor, kind: Kind) -> Tensor:
    """Squared errors [G] of float32 groups [G, n] under float32 scales [G], in float64."""
    numbers = nearest(values / scale[:, None], kind).double()
    return ordered_sum((values.double() - numbers * scale.double()[:, None]).square_())


class _Best:
    """The best scales offered so far, group by group; the earliest among equals."""

    def __init__(self, values: Tensor, start: Scales, kind: Kind) -> None:
        self._values, self._kind = values, kind
        self._error = torch.full_like(start.value, inf, dtype=torch.float64)
        self.stored, self.value = start.stored, start.value
        self.factor = torch.ones_like(start.value)

    def offer(self, scales: Scales, factor: float = 1.0) -> None:
        """Try a scale for every group. The float32 sum is one of squares in units of the scale, and cannot overflow."""
        scaled = self._values * scales.value.reciprocal()[:, None]
        off = scaled.clone()
        error = ordered_sum(off.sub_(nearest(scaled, self._kind)).square_())
        error *= scales.value.double().square_()
        wins = error < self._error
        self._error = torch.where(wins, error, self._error)
        self.value = torch.where(wins, scales.value, self.value)
        self.stored = torch.where(wins, scales.stored, self.stored)
        self.factor = torch.where(wins, factor, self.factor)
