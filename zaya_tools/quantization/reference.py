"""Quantization in plain torch: the readable reference, and the path for CUDA and for machines without a compiler."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from zaya_tools.quantization.kernels import (
    HALF_STEP,
    LEVELS,
    code,
    divide,
    grouped,
    minmax,
    nearest,
    packed,
    ungrouped,
)
from zaya_tools.quantization.scheme import Kind, Scheme
from zaya_tools.quantization.search import search

BLOCK = 1 << 17
"""Elements worked on at a time in main memory, so that the temporaries stay in a core's cache."""

_DEVICE_BLOCK = 1 << 24  # what keeps a large GPU busy


def quantize_rows(
    weight: Tensor, scheme: Scheme, *, mse: bool, whole: Tensor | None, codes: Tensor, scales: Tensor
) -> tuple[float, float, int] | None:
    """Quantize `weight` [rows, columns] into `codes` (bytes, a row of them a row) and `scales` (of the stored dtype).

    Gives the squared error, the squared norm and the number of clipped elements; None when the weight is not finite.
    `whole` is the float32 global scale [1] of NVFP4.
    """
    rows, columns = weight.shape
    block = BLOCK if weight.device.type == "cpu" else _DEVICE_BLOCK
    step = max(1, block // columns // scheme.rows) * scheme.rows
    sums = torch.zeros(3, dtype=torch.float64, device=weight.device)
    finite = torch.ones((), dtype=torch.bool, device=weight.device)  # looked at once, at the end: that waits for a GPU
    low, high = LEVELS[scheme.kind]
    half = HALF_STEP[scheme.kind]
    if scheme.kind in (Kind.MXFP4, Kind.NVFP4):
        scales = scales.view(torch.uint8)
    for first in range(0, rows, step):
        part = weight[first : first + step]
        groups = grouped(part, scheme)
        amax = groups.abs().amax(-1)
        finite &= amax.isfinite().all()
        found = minmax(amax, scheme, whole)
        if mse:
            found = search(groups, amax, found, scheme, whole)
        scaled = divide(groups, found, scheme.kind, exact=mse)
        numbers = nearest(scaled.clone(), scheme.kind)
        written = ungrouped(code(numbers, scaled, scheme.kind), scheme, *part.shape)
        codes[first : first + step] = packed(written) if scheme.packed else written
        height, start = ceil(len(part) / scheme.rows), first // scheme.rows
        scales[start : start + height] = found.stored.view(height, -1)
        values = groups.double()
        sums[0] += (values - numbers.double() * found.value.double()[:, None]).square_().sum()
        sums[1] += values.square_().sum()
        exact = divide(groups, found, scheme.kind, exact=True)
        sums[2] += ((exact > high + half) | (exact < low - half)).sum()
    if not finite.item():
        return None
    error, norm, clipped = sums.tolist()
    return error, norm, int(clipped)
