"""The finest cut of the table: every parameter, expert matrices one by one with gate and up apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from zaya_tools.architecture import Architecture
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.parameters import Parameter, Role, parameters


@dataclass(frozen=True)
class Unit:
    """Elements [start, start + rows * columns) of a parameter, seen as a matrix; vectors are one row.

    `name` is the native name of the tensor, as where experts are stored one by one. `half` is gate, up or down.
    """

    parameter: Parameter
    name: str
    rows: int
    columns: int
    start: int
    expert: int | None = None
    half: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def names(self) -> frozenset[str]:
        """The names that a manifest may have for what it is part of: its own, and that of a stack of experts."""
        return frozenset((self.name, self.parameter.name))

    @property
    def module(self) -> str:
        """The runtime module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def label(self) -> str:
        """Where it is, in words."""
        if self.expert is not None:
            return f"block {self.parameter.block}, expert {self.expert}, {self.half}"
        return self.name


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) under which a tensor that is not a stack of experts is read: first axis and the rest."""
    return (1, prod(shape)) if len(shape) < 2 else (shape[0], prod(shape[1:]))


def units(parameter: Parameter, architecture: Architecture) -> Iterator[Unit]:
    """The units of one parameter, in order."""
    start = 0
    for part in NATIVE_PER_EXPERT.parts(parameter, architecture):
        half = None
        if parameter.role is Role.EXPERT:
            half = part.name.removesuffix(".weight").rpartition(".")[2].removesuffix("_proj")
        rows, columns = as_matrix(part.shape)
        yield Unit(parameter, part.name, rows, columns, start, part.expert, half)
        start += rows * columns


@lru_cache(maxsize=4)
def all_units(architecture: Architecture) -> tuple[Unit, ...]:
    """The units of the whole table, in its order."""
    return tuple(unit for parameter in parameters(architecture) for unit in units(parameter, architecture))
