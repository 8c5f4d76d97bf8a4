"""Stored tensors back to numbers: exactly what they mean, in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zaya_tools.quantization.kernels import E2M1, grouped, mx_scales, ungrouped
from zaya_tools.quantization.scheme import Kind, Scheme


def dequantize(tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> Tensor:
    """The numbers [rows, columns] that `tensors`, by suffix as in `Scheme.stored`, stand for: stored number * scale.

    Float32. One float32 product each: exact, but for float32 scales and for the quotient of NVFP4's two scales, which
    are rounded as kernels round them.
    """
    rows, columns = shape
    scale = tensors["weight_scale"]
    if scheme.kind is Kind.MXFP4:
        factors = mx_scales(scale.int()).value
    elif scheme.kind is Kind.NVFP4:
        factors = scale.float() / tensors["weight_global_scale"]
    else:
        factors = scale.float()
    numbers = _numbers(tensors, scheme.kind)[:rows, :columns]
    return ungrouped(grouped(numbers, scheme) * factors.reshape(-1, 1), scheme, rows, columns)


def _numbers(tensors: Mapping[str, Tensor], kind: Kind) -> Tensor:
    if kind in (Kind.FLOAT8, Kind.INT8):
        return tensors["weight"].float()
    pairs = tensors["weight_packed"].contiguous().view(torch.uint8)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
    if kind is Kind.INT4:
        return codes.float() - 8
    levels = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
    return torch.cat((levels, -levels))[codes.int()]
