"""Element types as safetensors names them, and exact conversions between the floating ones in numpy.

numpy has no bfloat16: its values are handled as the upper half of a float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zaya_tools.errors import LayoutError

SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element."""

FLOATS = ("F32", "BF16", "F16")
"""Full-precision types that a trained weight may have."""

NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Names as torch and the command line spell them."""

Bytes = npt.NDArray[np.uint8]


def nonfinite(data: Bytes, dtype: str) -> npt.NDArray[np.bool_] | None:
    """Mask of the elements that are NaN or infinite, None when all are finite (or the type has no such values).

    The common case costs two maxima over integers: a float's bits order like its magnitude, so positive
    infinities and NaNs are the largest signed values and negative ones the largest unsigned values.
    """
    if data.size == 0:
        return None
    if dtype == "F8_E8M0":  # powers of two without a sign: one pattern is NaN
        bad: npt.NDArray[np.bool_] = data == 0xFF
        return bad if bad.any() else None
    if dtype not in _INFINITY:
        return None
    width, infinity = _INFINITY[dtype]
    signed, unsigned = data.view(f"i{width}"), data.view(f"u{width}")
    sign = 1 << (8 * width - 1)
    if int(signed.max()) < infinity and int(unsigned.max()) < sign + infinity:
        return None
    mask: npt.NDArray[np.bool_] = (unsigned & unsigned.dtype.type(sign - 1)) >= infinity
    return mask if mask.any() else None


# Bytes of an element, and the bits from which on it is infinite or NaN. e4m3 has no infinity, only 0x7f as NaN.
_INFINITY = {
    "BF16": (2, 0x7F80),
    "F16": (2, 0x7C00),
    "F32": (4, 0x7F800000),
    "F64": (8, 0x7FF0000000000000),
    "F8_E4M3": (1, 0x7F),
    "F8_E5M2": (1, 0x7C),
}


def to_float32(data: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Elements of a BF16, F16 or F32 byte array as float32, exactly."""
    if dtype == "F32":
        return data.view(np.float32)
    if dtype == "F16":
        return data.view(np.float16).astype(np.float32)
    if dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    raise LayoutError(f"{dtype} cannot be converted to another floating type")


def from_float32(values: npt.NDArray[np.float32], dtype: str) -> Bytes:
    """float32 values as the bytes of `dtype`, rounded to nearest even; overflow gives infinity, NaN stays NaN."""
    if dtype == "F32":
        return values.view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).view(np.uint8)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        # The sum would carry a NaN over into infinity or zero.
        rounded[np.isnan(values)] = 0x7FC0
        return rounded.astype(np.uint16).view(np.uint8)
    raise LayoutError(f"float32 cannot be converted to {dtype}")


def holds(wider: str, narrower: str) -> bool:
    """Whether every value of the floating type `narrower` is exact in `wider`."""
    return wider in (narrower, "F32")
