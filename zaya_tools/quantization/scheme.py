"""Schemes: how the numbers of a linear layer's weight are stored, and how its activations are seen. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Literal

from zaya_tools.dtypes import FLOATS

Observer = Literal["minmax", "mse", "imatrix", "gptq", "awq", "smooth"]
MINMAX: Observer = "minmax"
MSE: Observer = "mse"
IMATRIX: Observer = "imatrix"
GPTQ: Observer = "gptq"
AWQ: Observer = "awq"
SMOOTH: Observer = "smooth"
OBSERVERS = (MINMAX, MSE)
"""How a scale is found: from the largest magnitude, or by searching for the clipping of least squared error."""
INFORMED = (IMATRIX, GPTQ, AWQ, SMOOTH)
"""By what the error does to a layer's output, as a calibration's statistics know it (imatrix) or the inputs themselves
(gptq), after moving magnitudes between layers to where they cost weights (awq) or activations (smooth) least."""


class Kind(StrEnum):
    """The number format of the stored weights."""

    FLOAT8 = "float8"
    INT8 = "int8"
    INT4 = "int4"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


class Activations(StrEnum):
    """What the kernel does to the activations before it multiplies."""

    NONE = "none"
    TOKEN = "token"
    GROUP = "group"
    TENSOR = "tensor"
    LOCAL = "tensor_group"

    @property
    def calibrated(self) -> bool:
        """Whether a number stored beside the weight, known from data alone, goes into it."""
        return self in (Activations.TENSOR, Activations.LOCAL)


@dataclass(frozen=True)
class Stored:
    """One tensor that a scheme stores for a matrix: compressed-tensors' local name, safetensors dtype, shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """How a matrix [rows, columns] is stored.

    A scale belongs to `rows` x `columns` neighbouring elements; `columns` 0 is the whole row, `rows` 0 the whole matrix
    and what a kernel fuses with it. `format` is the name of
    compressed-tensors' compressor. `shared` says that matrices which a kernel fuses (an expert's gate and up) need
    one global scale.
    """

    name: str
    kind: Kind
    format: str
    bits: int
    rows: int = 1
    columns: int = 0
    activations: Activations = Activations.NONE
    shared: bool = False

    @property
    def packed(self) -> bool:
        """Whether several values share a stored element."""
        return self.bits < 8

    def groups(self, columns: int) -> int:
        """Scales along a row of `columns` elements."""
        return ceil(columns / self.columns) if self.columns else 1

    def stored(self, rows: int, columns: int, dtype: str) -> tuple[Stored, ...]:
        """What is stored for a matrix of the full-precision `dtype`, the bulk of it first.

        Scales have the dtype of the weight they belong to (as compressed-tensors makes them), except where the format
        has a type of its own.
        """
        return (*self._weights(rows, columns, dtype), *self._inputs(dtype))

    def _inputs(self, dtype: str) -> tuple[Stored, ...]:
        if self.activations is Activations.TENSOR:
            return (Stored("input_scale", dtype if dtype in FLOATS else "BF16", (1,)),)
        return (Stored("input_global_scale", "F32", (1,)),) if self.activations is Activations.LOCAL else ()

    def _weights(self, rows: int, columns: int, dtype: str) -> tuple[Stored, ...]:
        grid = (ceil(rows / self.rows), self.groups(columns)) if self.rows else (1,)
        scale = dtype if dtype in FLOATS else "BF16"
        if self.kind is Kind.FLOAT8:
            return Stored("weight", "F8_E4M3", (rows, columns)), Stored("weight_scale", scale, grid)
        if self.kind is Kind.INT8:
            return Stored("weight", "I8", (rows, columns)), Stored("weight_scale", scale, grid)
        if self.kind is Kind.INT4:
            return (
                Stored("weight_packed", "I32", (rows, ceil(columns / 8))),
                Stored("weight_scale", scale, grid),
                Stored("weight_shape", "I64", (2,)),
            )
        if self.kind is Kind.MXFP4:
            return Stored("weight_packed", "U8", (rows, columns // 2)), Stored("weight_scale", "U8", grid)
        return (
            Stored("weight_packed", "U8", (rows, columns // 2)),
            Stored("weight_scale", "F8_E4M3", grid),
            Stored("weight_global_scale", "F32", (1,)),
        )


_FP8, _INT8, _PACK = "float-quantized", "int-quantized", "pack-quantized"

SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8", Kind.FLOAT8, _FP8, 8, activations=Activations.TOKEN),
        Scheme("fp8-block", Kind.FLOAT8, _FP8, 8, rows=128, columns=128, activations=Activations.GROUP),
        Scheme("int8", Kind.INT8, _INT8, 8, activations=Activations.TOKEN),
        Scheme("int4", Kind.INT4, _PACK, 4, columns=128),
        Scheme("int4-g32", Kind.INT4, _PACK, 4, columns=32),
        Scheme("mxfp4", Kind.MXFP4, "mxfp4-pack-quantized", 4, columns=32),
        Scheme("nvfp4a16", Kind.NVFP4, "nvfp4-pack-quantized", 4, columns=16, shared=True),
    )
}
"""Every scheme that takes nothing but the weights, by name."""

CALIBRATED = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp8-static", Kind.FLOAT8, _FP8, 8, rows=0, activations=Activations.TENSOR),
        Scheme("nvfp4", Kind.NVFP4, "nvfp4-pack-quantized", 4, columns=16, activations=Activations.LOCAL, shared=True),
    )
}
"""Schemes with scales of the inputs, which calibration finds, by name."""


def mismatch(scheme: Scheme, observer: Observer) -> str | None:
    """Why an observer cannot find the scales of a scheme, None where it can."""
    if observer in INFORMED and scheme.rows > 1:
        return f"one scale for {scheme.rows}x{scheme.columns} weights is not what inputs can tell"
    if observer == GPTQ and scheme.kind in (Kind.MXFP4, Kind.NVFP4):
        return "GPTQ rounds to int4, int8 and fp8"
    if observer in (AWQ, SMOOTH) and scheme.rows != 1:
        return "magnitudes are moved for the sake of scales along rows"
    return None
