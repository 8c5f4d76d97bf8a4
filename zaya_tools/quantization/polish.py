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
_NEAR = 16
"""Columns among which each one's change is seen at once; the rest see them together, by a matrix product."""


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
    # Columns are gone through one by one: here they are what lies together, [batch, columns, rows].
    numbers, scales = start.numbers.mT.contiguous(), start.scales.mT.contiguous()
    gap = start.weight()
    residual = hessians @ torch.sub(weight, gap, out=gap).mT
    del gap
    each = columns // scales.shape[1]
    for sweep in range(sweeps):
        for first in range(0, columns, width):
            last = min(first + width, columns)
            own = scales[:, first // each : -(-last // each)].repeat_interleave(min(each, last - first), 1)
            before = numbers[:, first:last] * own
            inner = hessians[:, first:last, first:last]
            after = _descend(before, own, residual[:, first:last], inner, scheme.kind)
            found = nearest(after / own, scheme.kind)
            numbers[:, first:last] = found
            if fits:
                left = residual[:, first:last] - inner @ (after - before)
                scale = _fitted(found, scales[:, first // width], left, inner, dtype)
                scales[:, first // width] = scale
                after = found * scale[:, None]
            # After the last sweep nobody asks what is left in the columns behind.
            ahead = 0 if sweep + 1 < sweeps else last
            residual[:, ahead:].baddbmm_(hessians[:, ahead:, first:last], before.sub_(after))
    return Rounded(numbers.mT.contiguous(), scales.mT.contiguous())


def _descend(values: Tensor, scales: Tensor, residual: Tensor, inner: Tensor, kind: Kind) -> Tensor:
    """Round the columns [batch, columns, rows] of `values` anew, in order, each seeing what became of those before."""
    values, left = values.clone(), residual.clone()
    steps = torch.diagonal(inner, dim1=-2, dim2=-1)[..., None]
    width = values.shape[1]
    for first in range(0, width, _NEAR):
        last = min(first + _NEAR, width)
        start = values[:, first:last].clone()
        for column in range(first, last):
            at = scales[:, column]
            moved = left[:, column] / steps[:, column]
            moved += values[:, column]
            moved = nearest(moved.div_(at), kind).mul_(at).sub_(values[:, column])
            values[:, column] += moved
            if column + 1 < last:
                left[:, column + 1 : last] -= inner[:, column + 1 : last, column, None] * moved[:, None]
        if last < width:
            left[:, last:] -= inner[:, last:, first:last] @ (values[:, first:last] - start)
    return values


def _fitted(numbers: Tensor, scale: Tensor, left: Tensor, inner: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale [batch, rows] that fits a group's numbers [batch, columns, rows] best, as a `dtype`.

    The present one stays where that loses.
    """
    gain = (numbers * left).sum(1)
    curve = ((inner @ numbers) * numbers).sum(1)
    wanted = (scale + gain / curve.clamp_min(torch.finfo(torch.float32).tiny)).to(dtype).float()
    step = wanted - scale
    better = (step * step * curve < 2 * step * gain) & (wanted > 0) & wanted.isfinite()
    return torch.where(better, wanted, scale)
