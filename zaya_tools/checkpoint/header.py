"""The header of a safetensors file, read and checked without trusting it, and written aligned."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from zaya_tools.dtypes import SIZES
from zaya_tools.errors import SourceError
from zaya_tools.tensors import TensorInfo

MAX_HEADER = 100_000_000  # the limit of the safetensors library
_PREFIX = 8
_MAX_RANK = 16
_MAX_NUMBER = 2**63  # what fits no file; with the rank it also bounds the products below


@dataclass(frozen=True)
class Header:
    """The tensors of one file, in file order, its size and the raw bytes of its header.

    `label` is the name in records where the file's own name is not unique in the checkpoint.
    """

    file: Path
    size: int
    raw: bytes
    tensors: tuple[TensorInfo, ...]
    label: str = ""

    @property
    def name(self) -> str:
        """The file's name in records."""
        return self.label or self.file.name


def read_header(file: Path) -> Header:
    """Read and check one file's header; SourceError for anything that a reader could trip over.

    Checked: the header's length, its JSON, every dtype and shape, that offsets agree with them, start at zero,
    leave no gap and do not overlap, and that the file has exactly the bytes that it promises.
    """
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise SourceError(f"{file.name} is not a file")
        size = status.st_size
        with file.open("rb") as stream:
            prefix = stream.read(_PREFIX)
            length = int.from_bytes(prefix, "little")
            if size < _PREFIX:
                raise SourceError(f"{file.name} is {size} bytes long: not a safetensors file", "download it again")
            if prefix == b"version ":
                raise SourceError(f"{file.name} is a Git LFS pointer, not the file itself", "run `git lfs pull`")
            if length > MAX_HEADER:
                raise SourceError(f"{file.name}: a header of {length:,} bytes is not one of a safetensors file")
            if length > size - _PREFIX:
                raise SourceError(
                    f"{file.name} promises a header of {length:,} bytes, has {size - _PREFIX:,} in all",
                    "the file is cut off: download it again",
                )
            raw = stream.read(length)
    except OSError as error:
        raise SourceError(f"{file.name} cannot be read: {error.strerror}") from error
    entries = _parse(file, raw)
    base = _PREFIX + length
    tensors = sorted(
        (_tensor(file, base, name, entry) for name, entry in entries.items()), key=lambda t: (t.start, t.nbytes)
    )
    _check_offsets(file, base, size, tensors)
    return Header(file, size, raw, tuple(tensors))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r} stands twice")
    return result


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise SourceError(f"{file.name}: the header is not valid JSON ({error})", "the file is damaged") from error
    if not isinstance(entries, dict):
        raise SourceError(f"{file.name}: the header is not a JSON object", "the file is damaged")
    entries.pop("__metadata__", None)
    return entries


def _whole(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < _MAX_NUMBER for v in values
    )


def _tensor(file: Path, base: int, name: str, entry: Any) -> TensorInfo:
    if not name.isprintable():  # terminals, file systems and other readers would each see another name
        raise SourceError(f"{file.name}: the tensor name {name!r} has unprintable characters", "the file is damaged")
    if not isinstance(entry, dict):
        raise SourceError(f"{file.name}: {name} has no dtype, shape and offsets", "the file is damaged")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise SourceError(f"{file.name}: {name} has the unknown dtype {dtype!r}")
    if not _whole(shape) or len(shape) > _MAX_RANK or not _whole(offsets) or len(offsets) != 2:
        raise SourceError(f"{file.name}: {name} has a malformed shape or offsets", "the file is damaged")
    start, end = offsets
    nbytes = prod(shape) * SIZES[dtype]
    if end - start != nbytes:
        raise SourceError(
            f"{file.name}: {name} is {dtype} {shape}, {nbytes:,} bytes, but its offsets span {end - start:,}",
            "the file is damaged",
        )
    return TensorInfo(name, dtype, tuple(shape), file, base + start, nbytes)


def _check_offsets(file: Path, base: int, size: int, tensors: Sequence[TensorInfo]) -> None:
    position = base
    for tensor in tensors:
        if tensor.start != position:
            kind = "overlaps the tensor before it" if tensor.start < position else "leaves a gap before it"
            raise SourceError(
                f"{file.name}: {tensor.name} {kind} (at byte {tensor.start:,}, expected {position:,})",
                "the file is damaged",
            )
        position += tensor.nbytes
    if position > size:
        raise SourceError(
            f"{file.name} promises {position:,} bytes, has {size:,}", "the file is cut off: download it again"
        )
    if position < size:
        raise SourceError(f"{file.name} has {size - position:,} bytes after its last tensor", "the file is damaged")


def build_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Length prefix and header for (name, dtype, shape) in file order, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, dtype, shape in tensors:
        end = position + prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw
