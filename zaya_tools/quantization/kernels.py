"""The arithmetic of every scheme in plain torch: groups, scales, rounding, codes.

Everything here works on groups [G, n]: G sets of n numbers with a scale each. `kernels.c` does the same arithmetic
bit by bit; a change here needs one there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

from zaya_tools.quantization.scheme import Kind, Scheme

FLOAT8 = torch.float8_e4m3fn

SPAN = {Kind.FLOAT8: 448.0, Kind.INT8: 127.5, Kind.INT4: 7.5, Kind.NVFP4: 6.0}
"""The largest magnitude of a group divided by this is its scale: half the range of the stored numbers."""

LEVELS = {
    Kind.FLOAT8: (-448.0, 448.0),
    Kind.INT8: (-128.0, 127.0),
    Kind.INT4: (-8.0, 7.0),
    Kind.MXFP4: (-6.0, 6.0),
    Kind.NVFP4: (-6.0, 6.0),
}
"""The lowest and the highest stored number."""

HALF_STEP = {Kind.FLOAT8: 16.0, Kind.INT8: 0.5, Kind.INT4: 0.5, Kind.MXFP4: 1.0, Kind.NVFP4: 1.0}
"""Half the distance of the highest number to the next lower one: what rounding may cost there."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit floats, by their code."""

MX_TOP = {torch.bfloat16: 252, torch.float16: 140, torch.float32: 252}
"""The highest E8M0 code by the weight's dtype: six times the scale stays finite."""

_EXPONENT = 0x7F800000
_LAYOUT = {  # bits of the mantissa, bias of the exponent, integer of the same width
    torch.bfloat16: (7, 127, torch.int16),
    torch.float16: (10, 15, torch.int16),
    torch.float32: (23, 127, torch.int32),
}
_F8_ZERO = 0x20  # 0.125: what compressed-tensors stores for a group scale of NVFP4 that is zero


@dataclass(frozen=True)
class Scales:
    """Scales of G groups: as `stored` (8-bit types as bytes), and the float32 numbers that a weight is divided by."""

    stored: Tensor
    value: Tensor


def grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """Groups [G, n] of a block of rows [r, c], in the order of their scales; blocks are filled up with zeros."""
    if scheme.rows > 1:
        rows, columns = weight.shape
        whole = pad(weight, (0, -columns % scheme.columns, 0, -rows % scheme.rows))
        tiles = whole.view(-1, scheme.rows, whole.shape[1] // scheme.columns, scheme.columns)
        return tiles.transpose(1, 2).reshape(-1, scheme.rows * scheme.columns)
    return weight.reshape(-1, scheme.columns) if scheme.columns else weight


def ungrouped(groups: Tensor, scheme: Scheme, rows: int, columns: int) -> Tensor:
    """The inverse of `grouped`: [rows, columns]."""
    if scheme.rows > 1:
        tiles = groups.view(ceil(rows / scheme.rows), -1, scheme.rows, scheme.columns).transpose(1, 2)
        return tiles.reshape(tiles.shape[0] * scheme.rows, -1)[:rows, :columns]
    return groups.reshape(rows, columns)


def minmax(amax: Tensor, scheme: Scheme, whole: Tensor | None) -> Scales:
    """Scales [G] from the largest magnitudes `amax` [G] of the weight's dtype, as compressed-tensors makes them.

    `whole` is the float32 global scale [1] of NVFP4.
    """
    if scheme.kind is Kind.MXFP4:
        return mx_scales(mx_codes(amax))
    # Divisors are tensors: CUDA would multiply by the reciprocal of a plain number.
    quotient = (amax.float() / amax.new_full((), SPAN[scheme.kind], dtype=torch.float32)).to(amax.dtype)
    if whole is not None:
        codes = (whole * quotient.float()).clamp(max=448.0).to(FLOAT8).view(torch.uint8)
        return nv_scales(torch.where(codes == 0, _F8_ZERO, codes), whole)
    quotient[quotient == 0] = torch.finfo(amax.dtype).eps
    return Scales(quotient, quotient.float())


def mx_codes(amax: Tensor) -> Tensor:
    """E8M0 codes: the exponent of the magnitude, rounded up from 1.75 on, less the 2 of the largest E2M1 number.

    The library works in the weight's dtype. Where float16 has no exponent (below -14), it gives the scale 1. Where it
    rounds up to infinity and gives the code of NaN, this stops at the largest exponent of the dtype.
    """
    mantissa, bias, integer = _LAYOUT[amax.dtype]
    exponent = (amax.view(integer).int() + (1 << (mantissa - 2))) >> mantissa
    codes = (exponent - bias + 127 - 2).clamp(0, MX_TOP[amax.dtype])
    lost = 127 if amax.dtype is torch.float16 else 0
    return torch.where(exponent == 0, lost, codes)


def mx_scales(codes: Tensor) -> Scales:
    """Powers of two from E8M0 codes [G], int32: code 0 is 2**-127, which float32 holds as a subnormal."""
    return Scales(codes.to(torch.uint8), torch.where(codes == 0, 0x400000, codes << 23).view(torch.float32))


def nv_scales(codes: Tensor, whole: Tensor) -> Scales:
    """e4m3 scales from their codes [G]; a weight is divided by that over the global scale, in float32."""
    stored = codes.to(torch.uint8)
    return Scales(stored, stored.view(FLOAT8).float() / whole)


def nearest(scaled: Tensor, kind: Kind) -> Tensor:
    """The stored numbers nearest to `scaled` (float32, overwritten), ties to even."""
    scaled.clamp_(*LEVELS[kind])
    if kind in (Kind.INT8, Kind.INT4):
        return scaled.round_()
    mantissa, lowest = (3, -6) if kind is Kind.FLOAT8 else (1, 0)
    # Adding a power of two whose unit in the last place is the wanted step rounds to that step.
    anchor = (scaled.view(torch.int32) & _EXPONENT).clamp_(min=(lowest + 127) << 23)
    anchor = anchor.add_((23 - mantissa) << 23).view(torch.float32)
    rounded = scaled.abs().add_(anchor).sub_(anchor)
    return rounded.copysign_(scaled)


def divide(groups: Tensor, scales: Scales, kind: Kind, *, exact: bool) -> Tensor:
    """Weights over their scales, float32 [G, n]; unless `exact`, rounded to the weight's dtype like the library."""
    quotient = groups.float() / scales.value[:, None]
    if exact or kind is Kind.NVFP4 or groups.dtype is torch.float32:
        return quotient
    return quotient.to(groups.dtype).float()


def code(numbers: Tensor, scaled: Tensor, kind: Kind) -> Tensor:
    """Stored numbers [G, n] as they are written, one byte each, not packed yet; `scaled` tells -0 from 0."""
    if kind is Kind.FLOAT8:
        return numbers.to(FLOAT8).view(torch.uint8)
    if kind is Kind.INT8:
        return numbers.to(torch.int8).view(torch.uint8)
    if kind is Kind.INT4:
        return (numbers + 8).to(torch.uint8)
    magnitude = numbers.abs()
    index = (magnitude * 2).to(torch.uint8)  # 0 1 2 3 4 6 8 12
    index -= (magnitude >= 3).to(torch.uint8) + (magnitude >= 4).to(torch.uint8) + 3 * (magnitude >= 6).to(torch.uint8)
    return index | ((scaled < 0).to(torch.uint8) << 3)


def packed(codes: Tensor) -> Tensor:
    """Pairs of 4-bit codes in bytes [rows, columns / 2], the first one low; the last of an odd row is filled up."""
    if codes.shape[1] % 2:
        codes = pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)
