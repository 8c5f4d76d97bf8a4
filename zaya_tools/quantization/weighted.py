"""Scales that serve a layer's inputs: squared errors count as much as the channel that they meet is strong.

With inputs x the error of a row w is the mean of ((w - q) x)**2; of the second moments of x this keeps the diagonal,
sum_j h_j (w_j - q_j)**2. For a given scale rounding to the nearest number stays best, so only the scale is searched:
over what the largest magnitude is mapped to, then by least squares on the numbers that this gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zaya_tools.quantization.kernels import (
    HALF_STEP,
    LEVELS,
    SPAN,
    Scales,
    code,
    divide,
    grouped,
    minmax,
    mx_codes,
    mx_scales,
    nearest,
    nv_scales,
    packed,
    ungrouped,
)
from zaya_tools.quantization.quantize import Facts, Quantized
from zaya_tools.quantization.scheme import Kind, Scheme

FACTORS = (1.06, 0.96, 0.9, 0.84, 0.78, 0.72, 0.65, 0.57, 0.48)
"""Of the scale that the largest magnitude gives. Few: least squares, and later the polishing, find what is between."""
_REFINED = 3
_STEPS = {Kind.MXFP4: range(-1, 2), Kind.NVFP4: range(-8, 9)}
_BLOCK = 1 << 22


def weighted_scales(
    weight: Tensor, scheme: Scheme, importance: Tensor, dtype: torch.dtype, whole: Tensor | None = None
) -> Scales:
    """Scales [G] of `weight` [rows, columns] with the smallest error weighted by `importance` [columns], not negative.

    Of the candidates one is what `minmax` gives, so that no group is worse off. Plain scales are numbers of `dtype`;
    `whole` is NVFP4's global scale.
    """
    high = scheme.rows or len(weight)
    step = max(1, _BLOCK // weight.shape[1] // high) * high
    parts = [
        _search(weight[first : first + step], scheme, importance, dtype, whole) for first in range(0, len(weight), step)
    ]
    return Scales(torch.cat([p.stored for p in parts]), torch.cat([p.value for p in parts]))


def _search(weight: Tensor, scheme: Scheme, importance: Tensor, dtype: torch.dtype, whole: Tensor | None) -> Scales:
    groups = _grouped(weight, scheme)
    amax = groups.abs().amax(-1).to(dtype)
    values = groups.float()
    heavy = _grouped(importance.float().expand(weight.shape), scheme)
    # Only ratios matter; a mean of 1 keeps the sums in range. Channels that were never on still count a little.
    mean = heavy.mean(-1, keepdim=True)
    heavy = torch.where(mean > 0, heavy / mean.clamp_min(torch.finfo(torch.float32).tiny), 1.0) + 1e-4
    best = _Best(values, heavy, scheme.kind, minmax(amax, scheme, whole))
    if scheme.kind in _STEPS:
        for step in _STEPS[scheme.kind]:
            if scheme.kind is Kind.MXFP4:
                best.offer(mx_scales((mx_codes(amax) + step).clamp_(0, 254)))
            else:
                assert whole is not None
                best.offer(nv_scales((best.start.stored.int() + step).clamp_(1, 126), whole))
        return best.found
    reach = amax.float() / SPAN[scheme.kind]
    for factor in FACTORS:
        best.offer(_rounded(reach * factor, amax.dtype))
    if scheme.kind in (Kind.INT4, Kind.INT8):
        for _ in range(_REFINED):
            best.offer(_rounded(best.fitted(), amax.dtype))
    return best.found


def _rounded(scale: Tensor, dtype: torch.dtype) -> Scales:
    stored = scale.to(dtype)
    stored[stored == 0] = torch.finfo(dtype).eps
    return Scales(stored, stored.float())


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """Groups [G, n] of a matrix; one of everything for a scheme with one scale."""
    return grouped(weight, scheme) if scheme.rows else weight.reshape(1, -1)


class _Best:
    """The best scale of each group so far."""

    def __init__(self, values: Tensor, heavy: Tensor, kind: Kind, start: Scales) -> None:
        self._values, self._heavy, self._kind = values, heavy, kind
        self.start = start
        self._stored, self._value = start.stored.clone(), start.value.clone()
        self._error = self._measure(start)

    def _numbers(self, value: Tensor) -> Tensor:
        return nearest(self._values / value[:, None], self._kind)

    def _measure(self, scales: Scales) -> Tensor:
        gap = self._values - self._numbers(scales.value) * scales.value[:, None]
        return (gap.square_() * self._heavy).sum(-1)

    def offer(self, scales: Scales) -> None:
        """Take the scales of those groups for which they are better."""
        error = self._measure(scales)
        wins = (error < self._error) & (scales.value > 0) & scales.value.isfinite()
        self._error = torch.where(wins, error, self._error)
        self._stored = torch.where(wins, scales.stored, self._stored)
        self._value = torch.where(wins, scales.value, self._value)

    def fitted(self) -> Tensor:
        """The scales that fit the best ones' numbers by least squares; the best ones where that is not positive."""
        numbers = self._numbers(self._value)
        heavy = numbers * self._heavy
        scale = (heavy * self._values).sum(-1) / (heavy * numbers).sum(-1).clamp_min(1e-30)
        return torch.where(scale > 0, scale, self._value)

    @property
    def found(self) -> Scales:
        """The winners."""
        return Scales(self._stored, self._value)


def encode(
    weight: Tensor, scheme: Scheme, scales: Scales, whole: Tensor | None = None, *, original: Tensor | None = None
) -> Quantized:
    """Store `weight` [rows, columns] with these scales, each number rounded to the nearest.

    The facts compare with `original`, the weight as trained, where `weight` has been moved away from it.
    """
    rows, columns = weight.shape
    groups = _grouped(weight, scheme)
    scaled = divide(groups, scales, scheme.kind, exact=True)
    numbers = nearest(scaled.clone(), scheme.kind)
    codes = code(numbers, scaled, scheme.kind)
    written = ungrouped(codes, scheme, rows, columns) if scheme.rows else codes.view(rows, columns)
    tensors = {}
    if scheme.packed:
        tensors["weight_packed"] = packed(written).contiguous()
        if scheme.kind is Kind.INT4:
            tensors["weight_packed"] = tensors["weight_packed"].view(torch.int32)
    else:
        tensors["weight"] = written.contiguous().view(_VALUES[scheme.kind])
    stored = scales.stored.reshape((-1, scheme.groups(columns)) if scheme.rows else (1,)).contiguous()
    tensors["weight_scale"] = stored.view(torch.float8_e4m3fn) if scheme.kind is Kind.NVFP4 else stored
    if whole is not None:
        tensors["weight_global_scale"] = whole.clone()
    return Quantized(tensors, _facts(groups, numbers, scales, scheme, original), finite=bool(weight.isfinite().all()))


_VALUES: dict[Kind, torch.dtype] = {Kind.FLOAT8: torch.float8_e4m3fn, Kind.INT8: torch.int8}


def _facts(groups: Tensor, numbers: Tensor, scales: Scales, scheme: Scheme, original: Tensor | None) -> Facts:
    trained = _grouped(original, scheme) if original is not None else groups
    values = trained.double()
    error = (values - numbers.double() * scales.value.double()[:, None]).square_().sum()
    low, high = LEVELS[scheme.kind]
    exact, half = divide(trained, scales, scheme.kind, exact=True), HALF_STEP[scheme.kind]
    clipped = ((exact > high + half) | (exact < low - half)).sum()
    return Facts(float(error), float(values.square_().sum()), int(clipped), values.numel())
