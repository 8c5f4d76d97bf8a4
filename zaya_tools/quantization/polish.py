"""Rounding that makes up for itself: numbers and scales are moved, one after the other, while the output gains.

A layer with weights W and inputs x whose second moments are H errs by tr((W - Q) H (W - Q)^T). With all other numbers
held, the best value for one is its present one plus the residual (W - Q) H at its place over the diagonal of H; the
nearest stored number to that is taken (coordinate descent, as in QuantEase, arXiv 2309.01885). Then each group's scale
is fitted by least squares to the numbers it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_tools.quantization.kernels import nearest
from zaya_tools.quantization.scheme import Kind, Scheme

SWEEPS = 3
DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it: what few tokens have not shown is not taken for absent."""
_WIDTH = 128


@dataclass(frozen=True)
class Rounded:
    """`numbers` [batch, rows, columns], as stored, and `scales` [batch, rows, groups], float32."""

    numbers: Tensor
    scales: Tensor

    def weight(self) -> Tensor:
        """The weight that they mean [batch, rows, columns]."""
        return self.numbers * spread(self.scales, self.numbers.shape[-1])


def spread(scales: Tensor, columns: int) -> Tensor:
    """Scales [..., groups] for every column [..., columns]."""
    return scales.repeat_interleave(columns // scales.shape[-1], -1)


def damped(hessians: Tensor, share: float = DAMPING) -> Tensor:
    """Hessians [batch, columns, columns] with a `share` of their diagonal's mean added to it; 1 where all is zero."""
    diagonal = torch.diagonal(hessians, dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    out = hessians.clone()
    torch.diagonal(out, dim1=-2, dim2=-1).add_(torch.where(mean > 0, share * mean, 1.0))
    return out


def loss(weight: Tensor, rounded: Rounded, hessians: Tensor) -> Tensor:
    """tr((W - Q) H (W - Q)^T) of every matrix of the batch [batch]."""
    gap = weight.float() - rounded.weight()
    return ((gap @ hessians) * gap).sum((-2, -1))


def polish(
    weight: Tensor, start: Rounded, hessians: Tensor, scheme: Scheme, dtype: torch.dtype, *, sweeps: int = SWEEPS
) -> Rounded:
    """Improve on `start` for weights [batch, rows, columns] and positive definite Hessians [batch, columns, columns].

    Scales move only where they are plain numbers of the type `dtype`, one for some columns of a row. The error under
    the Hessians never grows, beyond float32's rounding.
    """
    columns = weight.shape[-1]
    fits = scheme.kind in (Kind.INT4, Kind.INT8, Kind.FLOAT8) and 0 < scheme.columns <= _WIDTH
    width = scheme.columns if fits else min(_WIDTH, columns)
    numbers, scales = start.numbers.clone(), start.scales.clone()
    residual = (weight.float() - start.weight()) @ hessians
    for _ in range(sweeps):
        for first in range(0, columns, width):
            last = min(first + width, columns)
            own = spread(scales, columns)[..., first:last]
            before = numbers[..., first:last] * own
            inner = hessians[:, first:last, first:last]
            left = residual[..., first:last].clone()
            after = _descend(before, own, left, inner, scheme.kind)
            numbers[..., first:last] = nearest(after / own, scheme.kind)
            if fits:
                group = first // width
                scales[..., group] = _fitted(numbers[..., first:last], scales[..., group], left, inner, dtype)
                after = numbers[..., first:last] * scales[..., group, None]
            residual -= (after - before) @ hessians[:, first:last]
    return Rounded(numbers, scales)


def _descend(values: Tensor, scales: Tensor, left: Tensor, inner: Tensor, kind: Kind) -> Tensor:
    """Round each column [batch, rows] of `values` anew, in order; `left`, the residual, is kept up to date."""
    values = values.clone()
    for column in range(values.shape[-1]):
        at = scales[..., column]
        wanted = values[..., column] + left[..., column] / inner[:, column, column, None]
        moved = nearest(wanted / at, kind) * at - values[..., column]
        values[..., column] += moved
        left -= moved[..., None] * inner[:, column, None, :]
    return values


def _fitted(numbers: Tensor, scale: Tensor, left: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale [batch, rows] that fits a group's numbers best, as a `dtype`; the present one where that loses."""
    gain = (numbers * left).sum(-1)
    curve = ((numbers @ inner) * numbers).sum(-1)
    wanted = (scale + gain / curve.clamp_min(torch.finfo(torch.float32).tiny)).to(dtype).float()
    step = wanted - scale
    better = (step * step * curve < 2 * step * gain) & (wanted > 0) & wanted.isfinite()
    return torch.where(better, wanted, scale)
