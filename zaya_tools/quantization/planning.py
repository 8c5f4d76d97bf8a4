"""Which tensors a quantized checkpoint has, and of which source bytes each is made. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from zaya_tools.checkpoint.plan import Group, Output, Piece, Regroup
from zaya_tools.dtypes import FLOATS
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.base import Part
from zaya_tools.parameters import Parameter
from zaya_tools.quantization.resolve import Decision
from zaya_tools.quantization.scheme import Observer, Scheme, Stored


@dataclass(frozen=True)
class Matrix:
    """A weight [rows, columns] that is quantized by rows; a stack of experts is one tall matrix.

    `pieces` are its values in full precision, of the safetensors `dtype`. `shared` are the pieces of everything that
    has one global scale with it, itself included; empty where the scheme has none.
    """

    name: str
    rows: int
    columns: int
    dtype: str
    scheme: Scheme
    observer: Observer
    pieces: tuple[Piece, ...]
    shared: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class QuantizedOutput(Output):
    """One of the tensors that store a matrix, `suffix` by compressed-tensors' name."""

    matrix: Matrix
    suffix: str

    @property
    def bulk(self) -> bool:
        """Whether this tensor has the values, the others being scales and the like."""
        return self.suffix in ("weight", "weight_packed")

    @property
    def read_bytes(self) -> int:
        """Bytes of the source that are read for it: a matrix is read once, for its values."""
        return super().read_bytes if self.bulk else 0


def regrouping(decisions: Mapping[str, Decision], stacked: bool) -> Regroup:
    """How a plan's outputs are quantized; `stacked` keeps the experts of a block in one tensor.

    The function raises LayoutError for a matrix whose dtype or shape its scheme cannot take.
    """

    def regroup(parameter: Parameter, parts: Sequence[Part], outputs: Sequence[Output]) -> Iterable[Group]:
        decision = decisions.get(parameter.name)
        if decision is None or decision.scheme is None or decision.observer is None:
            return [(output,) for output in outputs]
        _check_stack(decision.scheme, parts[0], stacked)
        return [
            _quantized(
                part, output, decision.scheme, decision.observer, _sharing(decision.scheme, part, parts, outputs)
            )
            for part, output in zip(parts, outputs, strict=True)
        ]

    return regroup


def _sharing(scheme: Scheme, part: Part, parts: Sequence[Part], outputs: Sequence[Output]) -> tuple[Piece, ...]:
    """Pieces of all parts with one global scale: what a kernel fuses, which is the gate and up of an expert."""
    if not scheme.shared:
        return ()
    return tuple(
        piece
        for other, output in zip(parts, outputs, strict=True)
        if other is part or (part.expert is not None and other.expert == part.expert)
        for piece in output.pieces
    )


def _check_stack(scheme: Scheme, part: Part, stacked: bool) -> None:
    if not (stacked and len(part.shape) > 2):
        return
    if any(len(stored.shape) != 2 for stored in scheme.stored(part.shape[-2], part.shape[-1], "BF16")):
        raise LayoutError(
            f"{part.name}: {scheme.name} has tensors that belong to one expert alone, which a stack has no place for",
            "leave out --expert-layout stacked",
        )
    if part.shape[-2] % scheme.rows:
        raise LayoutError(
            f"{part.name}: {part.shape[-2]} rows an expert are not whole blocks of {scheme.rows}",
            "leave out --expert-layout stacked",
        )


def _quantized(part: Part, output: Output, scheme: Scheme, observer: Observer, shared: tuple[Piece, ...]) -> Group:
    if output.source_dtype not in FLOATS:
        raise LayoutError(f"{output.name} is {output.source_dtype}, which is quantized already")
    rows, columns = prod(part.shape[:-1]), part.shape[-1]
    matrix = Matrix(part.name, rows, columns, output.source_dtype, scheme, observer, output.pieces, shared)
    operation = f"quantize to {scheme.name} by {observer}"
    stacked = len(part.shape) > 2
    return tuple(
        QuantizedOutput(
            name=part.name if (stacked and index == 0) or stored.suffix == "weight" else part.companion(stored.suffix),
            dtype=stored.dtype,
            shape=_stack(stored, part.shape[0]) if stacked else stored.shape,
            source_dtype=output.source_dtype,
            pieces=output.pieces,
            operation=operation,
            role=output.role,
            matrix=matrix,
            suffix=stored.suffix,
        )
        for index, stored in enumerate(scheme.stored(rows, columns, output.source_dtype))
    )


def _stack(stored: Stored, copies: int) -> tuple[int, ...]:
    return (copies, stored.shape[0] // copies, *stored.shape[1:])
