"""Moves a shard's bytes: read, scan, convert, write in several threads, and hash in order.

Memory is `workers` fixed buffers, whatever the size of the model. The heavy calls (pread, pwrite, hashing, numpy
reductions) release the interpreter's lock, so threads use all cores even for a single shard.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from zaya_tools.checkpoint.plan import BAKE, COPY, Output, Piece, Shard
from zaya_tools.checkpoint.source import read_into
from zaya_tools.dtypes import SIZES, Bytes, from_float32, nonfinite, to_float32
from zaya_tools.errors import NonFiniteError
from zaya_tools.tensors import TensorInfo

CHUNK = 4 * 2**20
"""Bytes of source that a worker holds at a time: large enough for full disk speed, small enough for the cache."""


@dataclass(frozen=True)
class Segment:
    """The digest of one stretch of a source tensor, as read."""

    tensor: str
    offset: int
    nbytes: int
    blake3: str


@dataclass(frozen=True)
class ShardDigest:
    """What a finished shard is: the digest of the whole file, and of every stretch of source that went into it."""

    blake3: str
    nbytes: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class _Chunk:
    output: Output
    piece: Piece
    offset: int  # in the piece, bytes
    nbytes: int
    destination: int  # in the shard file, bytes
    last: bool  # of its piece


def _chunks(shard: Shard) -> Iterator[_Chunk]:
    position = len(shard.header)
    for output in shard.outputs:
        ratio = SIZES[output.dtype] / SIZES[output.source_dtype]
        for piece in output.pieces:
            for offset in range(0, piece.nbytes, CHUNK):
                nbytes = min(CHUNK, piece.nbytes - offset)
                yield _Chunk(output, piece, offset, nbytes, position, offset + nbytes == piece.nbytes)
                position += int(nbytes * ratio)


class _Failed(Exception):
    """Another worker failed; its exception is the one to report."""


class _Order:
    """Lets threads through one at a time, in the order of their tickets."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._failed = False

    def wait(self, ticket: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._turn == ticket or self._failed)
            if self._failed:
                raise _Failed

    def done(self) -> None:
        with self._condition:
            self._turn += 1
            self._condition.notify_all()

    def fail(self) -> None:
        with self._condition:
            self._failed = True
            self._condition.notify_all()

    @property
    def failed(self) -> bool:
        return self._failed


class _Descriptors:
    """Source files, opened once."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __call__(self, file: Path) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(file.open("rb", buffering=0)).fileno()
            return self._open[file]


def write_shard(shard: Shard, file: Path, workers: int, advance: Callable[[int], None]) -> ShardDigest:
    """Write one shard to `file` and return its digest; the bytes are on disk when this returns.

    `advance` is called with the source bytes done, from any thread. Raises NonFiniteError before a NaN or an
    infinity is converted or published, OSError from the file system.
    """
    digest = blake3(shard.header)
    segments: list[Segment] = []
    order = _Order()
    take = threading.Lock()
    tickets = enumerate(_chunks(shard))
    running = [blake3()]  # the digest of the current source stretch

    with ExitStack() as stack:
        descriptors = _Descriptors(stack)
        target = stack.enter_context(file.open("wb", buffering=0)).fileno()
        _write(target, memoryview(shard.header), 0)

        def work() -> None:
            buffer = np.empty(CHUNK, np.uint8)
            try:
                while not order.failed:
                    with take:
                        ticket, chunk = next(tickets, (-1, None))
                    if chunk is None:
                        return
                    data = buffer[: chunk.nbytes]
                    tensor = chunk.piece.tensor
                    start = chunk.piece.offset + chunk.offset
                    read_into(descriptors(tensor.file), data, tensor.start + start, tensor.file.name)
                    written = _convert(chunk.output, tensor, start, data)
                    _write(target, written.data, chunk.destination)
                    order.wait(ticket)
                    running[0].update(data.data)
                    digest.update(written.data)
                    if chunk.last:
                        piece = chunk.piece
                        segments.append(Segment(tensor.name, piece.offset, piece.nbytes, running[0].hexdigest()))
                        running[0] = blake3()
                    order.done()
                    advance(chunk.nbytes)
            except _Failed:
                return
            except BaseException:
                order.fail()
                raise

        with ThreadPoolExecutor(max_workers=workers) as pool:
            tasks = [pool.submit(work) for _ in range(workers)]
            try:
                for task in tasks:
                    task.result()
            except BaseException:  # Ctrl-C included: the pool would otherwise wait for the whole shard
                order.fail()
                raise
        os.fsync(target)
    return ShardDigest(digest.hexdigest(), shard.nbytes, tuple(segments))


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _convert(output: Output, tensor: TensorInfo, start: int, data: Bytes) -> Bytes:
    """Scan a stretch of a source tensor that begins at byte `start`, then apply the output's operation."""
    mask = nonfinite(data, tensor.dtype)
    if mask is not None:
        _report_nonfinite(tensor)
    if output.operation == COPY:
        return data
    values = to_float32(data, tensor.dtype)
    if output.operation == BAKE:
        values = np.exp(np.clip(values, np.float32(1e-7), np.float32(2.0)), dtype=np.float32)
    converted = from_float32(np.ascontiguousarray(values), output.dtype)
    mask = nonfinite(converted, output.dtype)
    if mask is not None:
        index = start // SIZES[tensor.dtype] + int(mask.argmax())
        value = float(values.reshape(-1)[int(mask.argmax())])
        raise NonFiniteError(
            f"{tensor.name}{_position(tensor, index)} = {value:.6g} does not fit in {output.dtype}",
            "use --dtype bfloat16, which has the range of float32, or keep the dtype",
        )
    return converted


def _position(tensor: TensorInfo, index: int) -> str:
    return str([int(i) for i in np.unravel_index(index, tensor.shape)]) if tensor.shape else ""


def _report_nonfinite(tensor: TensorInfo) -> None:
    """Raise, naming the first non-finite element of a tensor and how many there are in all."""
    count, first = 0, -1
    with tensor.file.open("rb", buffering=0) as stream:
        for offset in range(0, tensor.nbytes, CHUNK):
            data = np.empty(min(CHUNK, tensor.nbytes - offset), np.uint8)
            read_into(stream.fileno(), data, tensor.start + offset, tensor.file.name)
            mask = nonfinite(data, tensor.dtype)
            if mask is not None:
                first = offset // SIZES[tensor.dtype] + int(mask.argmax()) if first < 0 else first
                count += int(mask.sum())
    many = "1 value is" if count == 1 else f"{count:,} values are"
    raise NonFiniteError(
        f"{tensor.name}: {many} NaN or infinite, the first at {_position(tensor, first)} (in {tensor.file.name})",
        "the checkpoint is broken: go back to one from before the training diverged",
    )


def digest_file(file: Path) -> str:
    """BLAKE3 of a file, read in chunks."""
    digest = blake3()
    with file.open("rb") as stream:
        while data := stream.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def same_bytes(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors of equal dtype and shape hold the same bytes, compared in chunks."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb", buffering=0) as one, second.file.open("rb", buffering=0) as two:
        for offset in range(0, first.nbytes, CHUNK):
            size = min(CHUNK, first.nbytes - offset)
            a, b = np.empty(size, np.uint8), np.empty(size, np.uint8)
            read_into(one.fileno(), a, first.start + offset, first.file.name)
            read_into(two.fileno(), b, second.start + offset, second.file.name)
            if not np.array_equal(a, b):
                return False
    return True


def remaining(shards: Sequence[Shard], finished: set[str]) -> int:
    """Bytes still to be written."""
    return sum(shard.nbytes for shard in shards if shard.filename not in finished)
