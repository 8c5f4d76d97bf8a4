"""A tensor on disk, known by its header alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

NOWHERE = -(2**60)
"""`start` of a tensor that lies in chunks: a reader that does not know of them fails instead of reading rubbish."""


@dataclass(frozen=True)
class Chunk:
    """Part of a tensor that is seen as a matrix of bytes: columns [column, column + width) of `rows` rows from `row`.

    The part lies row-major in `file` from byte `start` on.
    """

    file: Path
    start: int
    row: int
    rows: int
    column: int
    width: int


@dataclass(frozen=True)
class TensorInfo:
    """Bytes [start, start + nbytes) of `file`, row-major, of safetensors type `dtype`.

    A tensor that ranks or files share out between them has `chunks` instead, which cover a matrix of bytes with
    rows of `pitch` bytes; `start` is NOWHERE then, and `file` is one of several.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int
    chunks: tuple[Chunk, ...] = ()
    pitch: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)
