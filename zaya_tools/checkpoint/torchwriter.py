"""Writes a model as one file of `torch.save`: a zip of a pickle and plain storages, streamed in one pass.

Every storage's bytes go from the source to the file a block at a time; its checksum follows it, as zip allows, and
stands again in the directory at the end.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3

from zaya_tools.checkpoint.plan import COPY, Output, Piece, Shard
from zaya_tools.checkpoint.pump import Segment, ShardDigest, convert_elements, report_nonfinite
from zaya_tools.checkpoint.ranges import Files, read_range
from zaya_tools.checkpoint.source import BLOCK
from zaya_tools.dtypes import SIZES, nonfinite

_ARCHIVE = "model_optim_rng"
_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF
_STREAMED, _UTF8, _VERSION, _DATE = 0x08, 0x800, 45, 0x21  # sizes and checksum follow the data; 1 January 1980


@dataclass(frozen=True)
class Constant:
    """A small tensor that no source holds: its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class TorchShard(Shard):
    """A file of `torch.save`: {"args": Namespace, "iteration": 0, "model": {name: tensor}, ...}."""

    constants: tuple[Constant, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def header(self) -> bytes:
        """The pickle: everything but the numbers."""
        return _pickled(self)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the file."""
        records = _records(self)
        return records[-1].end + sum(len(record.entry(0)) for record in records) + len(_directory_end(1, 0, 0))


@dataclass(frozen=True)
class _Record:
    """A file of the zip: `begin` is its header's first byte, `start` its data's, `end` the byte after its checksum."""

    name: bytes
    begin: int
    size: int
    content: bytes | Output

    @property
    def _large(self) -> bool:
        return self.size >= _LIMIT

    @property
    def header(self) -> bytes:
        extra = struct.pack("<HHQQ", 1, 16, 0, 0) if self._large else b""
        bare = self.begin + 30 + len(self.name) + len(extra) + 4
        padding = -bare % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        sizes = (_LIMIT, _LIMIT) if self._large else (0, 0)
        head = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", _VERSION, _STREAMED | _UTF8, 0, 0, _DATE, 0, *sizes,
                           len(self.name), len(extra))  # fmt: skip
        return head + self.name + extra

    def footer(self, crc: int) -> bytes:
        return struct.pack("<4sIQQ" if self._large else "<4sIII", b"PK\x07\x08", crc, self.size, self.size)

    @property
    def end(self) -> int:
        return self.begin + len(self.header) + self.size + len(self.footer(0))

    def entry(self, crc: int) -> bytes:
        """The record's line in the directory."""
        wide = [self.size, self.size] if self._large else []
        wide += [self.begin] if self.begin >= _LIMIT else []
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, begin = min(self.size, _LIMIT), min(self.begin, _LIMIT)
        head = struct.pack("<4sHHHHHHIII", b"PK\x01\x02", _VERSION, _VERSION, _STREAMED | _UTF8, 0, 0, _DATE, crc,
                           size, size)  # fmt: skip
        head += struct.pack("<HHHHHII", len(self.name), len(extra), 0, 0, 0, 0, begin)
        return head + self.name + extra


def _directory_end(count: int, size: int, start: int) -> bytes:
    wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    number = min(count, 0xFFFF)
    last = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, number, number, min(size, _LIMIT), min(start, _LIMIT), 0)
    return wide + locator + last


def _records(shard: TorchShard) -> list[_Record]:
    contents: list[tuple[str, bytes | Output]] = [("data.pkl", shard.header), ("byteorder", b"little")]
    storages: tuple[bytes | Output, ...] = (*shard.outputs, *(constant.data for constant in shard.constants))
    contents += [(f"data/{number}", storage) for number, storage in enumerate(storages)]
    contents.append(("version", b"3\n"))
    records: list[_Record] = []
    for name, content in contents:
        size = content.nbytes if isinstance(content, Output) else len(content)
        begin = records[-1].end if records else 0
        records.append(_Record(f"{_ARCHIVE}/{name}".encode(), begin, size, content))
    return records


def _pickled(shard: TorchShard) -> bytes:
    from argparse import Namespace

    import torch
    from torch._utils import _rebuild_tensor_v2

    storages = {
        "F32": torch.FloatStorage, "F16": torch.HalfStorage, "BF16": torch.BFloat16Storage, "I64": torch.LongStorage,
    }  # fmt: skip

    class Storage:
        def __init__(self, key: int, dtype: str, numel: int) -> None:
            self.pid = ("storage", storages[dtype], str(key), "cpu", numel)

    class Tensor:
        def __init__(self, key: int, dtype: str, shape: tuple[int, ...]) -> None:
            strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
            self.parts: tuple[Any, ...] = (Storage(key, dtype, prod(shape)), 0, shape, strides, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return obj.pid if isinstance(obj, Storage) else None

        def reducer_override(self, obj: Any) -> Any:
            return (_rebuild_tensor_v2, obj.parts) if isinstance(obj, Tensor) else NotImplemented

    held: tuple[Output | Constant, ...] = (*shard.outputs, *shard.constants)
    state = {
        "args": Namespace(**shard.arguments),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "model": OrderedDict((e.name, Tensor(n, e.dtype, e.shape)) for n, e in enumerate(held)),
    }
    out = io.BytesIO()
    Pickler(out, protocol=2).dump(state)
    return out.getvalue()


class _Sink:
    """A file being written, with its digest."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.digest, self.position = stream, blake3(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self.digest.update(data)
        self.position += len(data)


def write_torch_shard(shard: TorchShard, file: Path, advance: Callable[[int], None]) -> ShardDigest:
    """Write the file and return its digest; the bytes are on disk when this returns.

    `advance` is called with the source bytes done. Raises NonFiniteError for a NaN or an infinity, OSError from the
    file system.
    """
    segments: list[Segment] = []
    entries = []
    with file.open("wb") as stream, Files() as files:
        sink = _Sink(stream)
        for record in _records(shard):
            sink.write(record.header)
            crc = 0
            for data in _data(record.content, files, segments, advance):
                crc = zlib.crc32(data, crc)
                sink.write(data)
            sink.write(record.footer(crc))
            entries.append(record.entry(crc))
        start, directory = sink.position, b"".join(entries)
        sink.write(directory)
        sink.write(_directory_end(len(entries), len(directory), start))
        stream.flush()
        os.fsync(stream.fileno())
    return ShardDigest(sink.digest.hexdigest(), sink.position, tuple(segments))


def _data(
    content: bytes | Output, files: Files, segments: list[Segment], advance: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    if isinstance(content, bytes):
        yield content
        return
    for piece in content.pieces:
        yield from _piece(content, piece, files, segments, advance)


def _piece(
    output: Output, piece: Piece, files: Files, segments: list[Segment], advance: Callable[[int], None]
) -> Iterator[memoryview]:
    digest = blake3()
    for done in range(0, piece.nbytes, BLOCK):
        data = np.empty(min(BLOCK, piece.nbytes - done), np.uint8)
        read_range(piece.tensor, piece.offset + done, data, files)
        if nonfinite(data, piece.tensor.dtype) is not None:
            report_nonfinite(piece.tensor)
        digest.update(data.data)
        kept = output.operation == COPY
        yield (data if kept else convert_elements(output, piece.tensor, piece.offset + done, data)).data
        advance(data.nbytes)
    segments.append(Segment(piece.tensor.name, piece.offset, piece.nbytes, digest.hexdigest()))


def constant(name: str, dtype: str, shape: tuple[int, ...], value: int) -> Constant:
    """A tensor of zeros or ones of a floating type or int64."""
    one = {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\x00\x3c", "I64": (1).to_bytes(8, "little")}
    return Constant(name, dtype, shape, (one[dtype] if value else bytes(SIZES[dtype])) * prod(shape))
