"""A tensor on disk, known by its header alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path


@dataclass(frozen=True)
class TensorInfo:
    """Bytes [start, start + nbytes) of `file`, row-major, of safetensors type `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)
