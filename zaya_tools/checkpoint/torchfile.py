"""Files that `torch.save` wrote: a zip of a pickle and of plain, uncompressed storages.

Storages are stored as they are, so every tensor is a byte range of the file, and no weight is read to find it.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from zaya_tools.checkpoint.pickles import StoredTensor, read_pickle
from zaya_tools.dtypes import SIZES
from zaya_tools.errors import SourceError
from zaya_tools.tensors import TensorInfo

MAX_PICKLE = 512_000_000
_LOCAL_HEADER = 30
_DAMAGED = "the file is cut off or damaged: copy it again"


@dataclass(frozen=True)
class TorchFile:
    """The values that were saved, with StoredTensor for tensors, and where the storages lie in the file.

    `raw` is the pickle itself. `records` gives (offset of the local header, bytes) of every storage by its key.
    """

    file: Path
    where: str
    values: Any
    raw: bytes
    records: dict[str, tuple[int, int]]
    _starts: dict[str, int] = field(default_factory=dict, repr=False)

    def tensor(self, name: str, stored: StoredTensor) -> TensorInfo:
        """A tensor as a byte range; SourceError where it is none, or lies outside its storage."""
        if stored.dtype not in SIZES:
            raise SourceError(f"{self.where}: {name} has the dtype {stored.dtype}, which no ZAYA1 tensor has")
        if not _contiguous(stored.shape, stored.strides):
            raise SourceError(
                f"{self.where}: {name} is a view with strides {list(stored.strides)}, not a tensor of its own",
                "save it with .contiguous()",
            )
        size = SIZES[stored.dtype]
        nbytes = prod(stored.shape) * size
        record = self.records.get(stored.storage.key)
        if record is None:
            raise SourceError(f"{self.where}: the data of {name} is missing (record {stored.storage.key!r})", _DAMAGED)
        header, held = record
        if stored.offset * size + nbytes > held:
            raise SourceError(
                f"{self.where}: {name} needs {stored.offset * size + nbytes:,} bytes, its record has {held:,}", _DAMAGED
            )
        start = self._start(stored.storage.key, header) + stored.offset * size
        return TensorInfo(name, stored.dtype, stored.shape, self.file, start, nbytes)

    def _start(self, key: str, header: int) -> int:
        """The first byte of a record's data: names and padding in front of it have any length."""
        if key not in self._starts:
            with self.file.open("rb", buffering=0) as stream:
                stream.seek(header)
                raw = stream.read(_LOCAL_HEADER)
            if len(raw) < _LOCAL_HEADER or raw[:4] != b"PK\x03\x04":
                raise SourceError(f"{self.where}: record {key!r} does not begin where the zip says", _DAMAGED)
            name, extra = int.from_bytes(raw[26:28], "little"), int.from_bytes(raw[28:30], "little")
            self._starts[key] = header + _LOCAL_HEADER + name + extra
            if self._starts[key] + self.records[key][1] > self.file.stat().st_size:
                raise SourceError(f"{self.where}: record {key!r} ends after the file", _DAMAGED)
        return self._starts[key]


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if len(shape) != len(strides):
        return False
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:  # the stride of an axis with one entry is never used
            return prod(shape) == 0
        step *= size
    return True


class _Window(io.RawIOBase):
    """Bytes [start, start + length) of a file, as a file."""

    def __init__(self, stream: io.FileIO, start: int, length: int) -> None:
        self._stream, self._first, self._length, self._position = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError("a position before the first byte")
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        self._stream.seek(self._first + self._position)
        data = self._stream.read(left if size < 0 else min(size, left))
        self._position += len(data)
        return data


def read_torch_file(file: Path, where: str = "", start: int = 0, length: int | None = None) -> TorchFile:
    """Open what `torch.save` wrote to a file, or to bytes [start, start + length) of one; no weights are read.

    `where` names it in errors (default: the file's name). SourceError for anything else than a whole, uncompressed,
    little-endian zip whose pickle holds values that are known to be harmless.
    """
    where = where or file.name
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{where} is not a file")
        length = status.st_size - start if length is None else length
        if start < 0 or length < 0 or start + length > status.st_size:
            raise SourceError(f"{where} promises {start + length:,} bytes, has {status.st_size:,}", _DAMAGED)
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            _check_magic(stream.read(64), where)
            # Nothing is buffered: a chunk of a few bytes would otherwise cost a few pages.
            return _read_zip(zipfile.ZipFile(_Window(stream, start, length)), file, where, start)
    except zipfile.BadZipFile as error:
        raise SourceError(f"{where} is not a whole zip file ({error})", _DAMAGED) from error
    except (NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError) as error:
        raise SourceError(f"{where} is no zip of plain records ({error})", _DAMAGED) from error
    except OSError as error:
        raise SourceError(f"{where} cannot be read: {error.strerror or error}") from error


def _check_magic(first: bytes, where: str) -> None:
    if first.startswith(b"version https://git-lfs"):
        raise SourceError(f"{where} is a Git LFS pointer, not the file itself", "run `git lfs pull`")
    if first.startswith(b"\x80") and b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19" in first:
        raise SourceError(
            f"{where} is in torch's old format of before 1.6",
            "load it with weights_only=True and save it again: torch.save writes the present one",
        )
    if not first.startswith(b"PK"):
        raise SourceError(f"{where} is not a file of torch.save", "give the checkpoint's folder, or its .pt file")


def _read_zip(archive: zipfile.ZipFile, file: Path, where: str, start: int) -> TorchFile:
    names = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
    if len(names) != 1:
        raise SourceError(f"{where} is a zip without a data.pkl: not a file of torch.save")
    prefix = names[0].removesuffix("data.pkl")
    order = f"{prefix}byteorder"
    if order in archive.namelist() and archive.read(order) != b"little":
        raise SourceError(f"{where} was saved on a big-endian machine", "save it again on the machines that run it")
    raw = _plain(archive, names[0], where)
    records = {}
    for key, info in _storages(archive, f"{prefix}data/"):
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise SourceError(f"{where}: record {info.filename} is compressed", "torch.save never does that")
        if key in records:
            raise SourceError(f"{where}: record {info.filename} is there twice", _DAMAGED)
        records[key] = (start + info.header_offset, info.file_size)
    return TorchFile(file, where, read_pickle(raw, where), raw, records)


def _plain(archive: zipfile.ZipFile, name: str, where: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_PICKLE:
        raise SourceError(f"{where}: data.pkl is compressed, or larger than {MAX_PICKLE:,} bytes")
    return archive.read(name)


def _storages(archive: zipfile.ZipFile, prefix: str) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    for info in archive.infolist():
        if info.filename.startswith(prefix):
            yield info.filename.removeprefix(prefix), info
