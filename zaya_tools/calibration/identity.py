"""What tells one trained model from another, whatever layout or precision it is stored in."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from zaya_tools.checkpoint.ranges import Files, read_range
from zaya_tools.dtypes import FLOATS, SIZES, from_float32, to_float32
from zaya_tools.layouts.match import Match
from zaya_tools.parameters import PROTECTED, Parameter, Role, parameters

_WHOLE = 8192
"""Elements up to which a parameter is read in full."""
_STRETCH = 1024
"""Elements of a row that are read of a larger one."""
_TOKENS = (17, 257)
"""Rows that are read of embedding and head, which trainers pad to lengths of their own."""


def identity(found: Match) -> str:
    """A digest of the model's values: small parameters in full, of every matrix of every expert stretches of two rows.

    It is the same in every layout. Matrices that may be quantized count as rounded to bfloat16, so that a conversion
    to bfloat16 or float32 changes nothing; the others never lose a bit.
    """
    digest = blake3()
    clamp = found.architecture.clamp_temp
    with Files() as files:
        for parameter in parameters(found.architecture):
            digest.update(parameter.name.encode())
            for start, count in _stretches(parameter):
                values = _read(found, parameter, start, count, files)
                if values is None:  # quantized
                    continue
                if parameter.role is Role.TEMPERATURE:
                    if clamp:  # as native layouts have it
                        values = np.exp(np.clip(values, np.float32(1e-7), np.float32(2.0)), dtype=np.float32)
                elif parameter.role in PROTECTED:
                    digest.update(values.tobytes())
                    continue
                digest.update(from_float32(values, "BF16").tobytes())
    return digest.hexdigest()[:32]


def _stretches(parameter: Parameter) -> Iterator[tuple[int, int]]:
    """(first element, how many) of what is read of a parameter, in terms of its own shape."""
    if parameter.role in (Role.EMBEDDING, Role.HEAD):
        width = prod(parameter.shape[1:])
        yield from ((row * width, min(width, _STRETCH)) for row in _TOKENS if row < parameter.shape[0])
        return
    matrices = parameter.shape[0] if parameter.role is Role.EXPERT else 1
    size = parameter.numel // matrices
    if len(parameter.shape) == 1 or (parameter.role in PROTECTED and size <= _WHOLE):
        yield 0, parameter.numel
        return
    rows, *rest = parameter.shape[1:] if parameter.role is Role.EXPERT else parameter.shape
    width = prod(rest)
    for matrix in range(matrices):
        # A third and two thirds down: of gate and up, one row each.
        for row in (rows // 3, 2 * rows // 3):
            yield matrix * size + row * width, min(width, _STRETCH)


def _read(found: Match, parameter: Parameter, start: int, count: int, files: Files) -> npt.NDArray[np.float32] | None:
    """Elements [start, start + count) of a parameter, put together of its parts; None where one is quantized."""
    pieces, before = [], 0
    for bound in found.bound[parameter.name]:
        size = prod(bound.part.shape)
        low, high = max(start, before), min(start + count, before + size)
        if low < high:
            if bound.quantized or bound.tensor is None or bound.tensor.dtype not in FLOATS:
                return None
            each = SIZES[bound.tensor.dtype]
            data = np.empty((high - low) * each, np.uint8)
            read_range(bound.tensor, (low - before) * each, data, files)
            pieces.append(to_float32(data, bound.tensor.dtype))
        before += size
    return np.concatenate(pieces)
