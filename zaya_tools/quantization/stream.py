"""Writes a shard of a quantized checkpoint: matrices by slabs of rows, in several threads, written in file order.

A worker reads a slab, quantizes it and waits for its turn to append the result. Memory is a slab and its result a
worker and a few blocks on their way to the disk, whatever the size of the shard: only the scales of the matrix
that is being appended are kept until its values are written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from zaya_tools.checkpoint.plan import COPY, Output, Piece, Shard
from zaya_tools.checkpoint.pump import Segment, ShardDigest, convert_elements, report_nonfinite
from zaya_tools.checkpoint.ranges import Files, read_range
from zaya_tools.checkpoint.shardfile import ShardFile, page_aligned
from zaya_tools.checkpoint.source import BLOCK
from zaya_tools.checkpoint.threads import Order, run
from zaya_tools.dtypes import SIZES, Bytes, nonfinite
from zaya_tools.model.weights import TORCH
from zaya_tools.quantization.planning import Matrix, QuantizedOutput
from zaya_tools.quantization.quantize import Facts, largest, quantize

SLAB = BLOCK
"""Source bytes that are quantized at a time: a whole number of rows."""


@dataclass(frozen=True)
class _Read:
    """Source bytes of a piece; `last` says that they end it."""

    data: Bytes
    piece: Piece
    last: bool


@dataclass(frozen=True)
class _Done:
    """What a task has made: bytes to append now, others by suffix that follow the matrix's values, and `last`."""

    reads: tuple[_Read, ...] = ()
    append: Bytes | None = None
    later: tuple[tuple[str, Bytes], ...] = ()
    last: bool = False
    matrix: Matrix | None = None
    facts: Facts | None = None


@dataclass(frozen=True)
class _Stretch:
    """Source bytes [offset, offset + nbytes) of a piece of a full-precision output."""

    output: Output
    piece: Piece
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Rows:
    """Rows [first, last) of a matrix, for those of its tensors that lie side by side."""

    outputs: tuple[QuantizedOutput, ...]
    first: int
    last: int


def _tasks(shard: Shard) -> Iterator[_Stretch | _Rows]:
    for group in _groups(shard.outputs):
        first = group[0]
        if isinstance(first, QuantizedOutput):
            matrix = first.matrix
            step = max(1, SLAB // (matrix.columns * SIZES[matrix.dtype]) // matrix.scheme.rows) * matrix.scheme.rows
            members = tuple(output for output in group if isinstance(output, QuantizedOutput))
            for row in range(0, matrix.rows, step):
                yield _Rows(members, row, min(row + step, matrix.rows))
        else:
            for piece in first.pieces:
                for offset in range(0, piece.nbytes, BLOCK):
                    yield _Stretch(first, piece, offset, min(BLOCK, piece.nbytes - offset))


def _groups(outputs: Sequence[Output]) -> Iterator[list[Output]]:
    """Neighbours that store one matrix, values first; everything else alone."""
    group: list[Output] = []
    for output in outputs:
        together = (
            group
            and isinstance(output, QuantizedOutput)
            and isinstance(group[0], QuantizedOutput)
            and group[0].matrix is output.matrix
            and group[0].bulk
        )
        if group and not together:
            yield group
            group = []
        group.append(output)
    yield group


class _Sink:
    """Appends what tasks have made, in order. Everything but `store` needs the turn."""

    def __init__(self, target: ShardFile) -> None:
        self._target = target
        self._buffer = page_aligned(BLOCK)
        self._used = 0
        self._offset = 0
        self._free: list[Bytes] = []
        self._later: dict[str, list[Bytes]] = {}
        self._facts: Facts | None = None
        self._running = blake3()  # of the current source piece
        self.digest = blake3()
        self.segments: list[Segment] = []
        self.facts: dict[str, dict[str, Any]] = {}

    def take(self, done: _Done) -> list[tuple[Bytes, int]]:
        """Append a result; the full blocks that this gives have to be stored next, without the turn."""
        for read in done.reads:
            self._running.update(read.data.data)
            if read.last:
                piece = read.piece
                self.segments.append(Segment(piece.tensor.name, piece.offset, piece.nbytes, self._running.hexdigest()))
                self._running = blake3()
        full: list[tuple[Bytes, int]] = []
        if done.append is not None:
            self._append(done.append, full)
        for suffix, data in done.later:
            self._later.setdefault(suffix, []).append(data)
        if done.facts is not None:
            self._facts = done.facts if self._facts is None else self._facts + done.facts
        if done.last:
            for parts in self._later.values():
                for data in parts:
                    self._append(data, full)
            self._later = {}
            if done.matrix is not None and self._facts is not None:
                self.facts[done.matrix.name] = _record(done.matrix, self._facts)
                self._facts = None
        return full

    def _append(self, data: Bytes, full: list[tuple[Bytes, int]]) -> None:
        start = 0
        while start < data.size:
            count = min(data.size - start, BLOCK - self._used)
            self._buffer[self._used : self._used + count] = data[start : start + count]
            start += count
            self._used += count
            if self._used == BLOCK:
                self.digest.update(self._buffer[:BLOCK].data)
                full.append((self._buffer, self._offset))
                self._offset += BLOCK
                self._buffer = self._free.pop() if self._free else page_aligned(BLOCK)
                self._used = 0

    def store(self, full: Sequence[tuple[Bytes, int]]) -> None:
        """Write full blocks to the file."""
        for buffer, offset in full:
            self._target.write(buffer, BLOCK, offset)
            self._free.append(buffer)

    def finish(self) -> int:
        """Write what is left, and wait for the disk; the size of the file."""
        size = self._offset + self._used
        self.digest.update(self._buffer[: self._used].data)
        if self._used:
            self._target.write(self._buffer, self._used, self._offset)
        self._target.finish(size)
        return size


class _Largest:
    """Largest magnitude of everything that shares a global scale, found once, by the first thread that asks."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._found: dict[tuple[Piece, ...], Future[float]] = {}

    def of(self, pieces: tuple[Piece, ...]) -> float:
        with self._lock:
            future = self._found.get(pieces)
            mine = future is None
            if future is None:
                future = self._found[pieces] = Future()
        if mine:
            try:
                future.set_result(max(self._scan(piece) for piece in pieces))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _scan(self, piece: Piece) -> float:
        found = 0.0
        for offset in range(0, piece.nbytes, BLOCK):
            data = np.empty(min(BLOCK, piece.nbytes - offset), np.uint8)
            read_range(piece.tensor, piece.offset + offset, data, self._files)
            if nonfinite(data, piece.tensor.dtype) is not None:
                report_nonfinite(piece.tensor)
            found = max(found, largest(torch.from_numpy(data).view(TORCH[piece.tensor.dtype])))
        return found


@dataclass(frozen=True)
class _Maker:
    """Makes the bytes of a task from the source."""

    files: Files
    largest: _Largest
    device: torch.device

    def __call__(self, task: _Stretch | _Rows) -> _Done:
        return self._stretch(task) if isinstance(task, _Stretch) else self._rows(task)

    def _stretch(self, task: _Stretch) -> _Done:
        output, tensor = task.output, task.piece.tensor
        start = task.piece.offset + task.offset
        data = np.empty(task.nbytes, np.uint8)
        read_range(tensor, start, data, self.files)
        if nonfinite(data, tensor.dtype) is not None:
            report_nonfinite(tensor)
        written = data if output.operation == COPY else convert_elements(output, tensor, start, data)
        return _Done((_Read(data, task.piece, task.offset + task.nbytes == task.piece.nbytes),), written)

    def _rows(self, task: _Rows) -> _Done:
        matrix = task.outputs[0].matrix
        width = matrix.columns * SIZES[matrix.dtype]
        data = np.empty((task.last - task.first) * width, np.uint8)
        reads = tuple(self._read(matrix.pieces, task.first * width, data))
        weight = torch.from_numpy(data).view(TORCH[matrix.dtype]).view(-1, matrix.columns).to(self.device)
        amax = self.largest.of(matrix.shared) if matrix.shared else None
        made = quantize(weight, matrix.scheme, matrix.observer, amax=amax)
        if not made.finite:
            # The rows may be those of several source tensors, of which one is bad.
            for read in reads:
                if nonfinite(read.data, matrix.dtype) is not None:
                    report_nonfinite(read.piece.tensor)
        wanted = {output.suffix: _stored(output, made.tensors, task) for output in task.outputs}
        last = task.last == matrix.rows
        if not task.outputs[0].bulk:  # not beside the values, which were read and measured where they are
            return _Done(later=_present(wanted), last=last)
        values = wanted.pop(task.outputs[0].suffix)
        return _Done(reads, values, _present(wanted), last, matrix, made.facts)

    def _read(self, pieces: Sequence[Piece], start: int, into: Bytes) -> Iterator[_Read]:
        """Fill `into` from byte `start` of the pieces' concatenation."""
        end, position = start + into.size, 0
        for piece in pieces:
            low, high = max(start, position), min(end, position + piece.nbytes)
            if low < high:
                place = into[low - start : high - start]
                read_range(piece.tensor, piece.offset + low - position, place, self.files)
                yield _Read(place, piece, high == position + piece.nbytes)
            position += piece.nbytes


def _stored(output: QuantizedOutput, tensors: Mapping[str, torch.Tensor], task: _Rows) -> Bytes | None:
    """The bytes of a matrix's tensor that come from some of its rows; None for what has no rows, but for the last."""
    matrix, suffix = output.matrix, output.suffix
    if suffix in ("weight_shape", "weight_global_scale") and task.last < matrix.rows:
        return None
    if suffix == "weight_shape":
        return np.array([matrix.rows, matrix.columns], np.int64).view(np.uint8)
    return tensors[suffix].cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _record(matrix: Matrix, facts: Facts) -> dict[str, Any]:
    """What the manifest says of a matrix, in as many digits as are the same on every machine."""
    figures = {name: None if value is None else float(f"{value:.5g}") for name, value in facts.as_dict().items()}
    return {"scheme": matrix.scheme.name, "observer": matrix.observer, **figures}


def _present(data: Mapping[str, Bytes | None]) -> tuple[tuple[str, Bytes], ...]:
    return tuple((suffix, entry) for suffix, entry in data.items() if entry is not None)


def write_quantized(
    shard: Shard, file: Path, workers: int, advance: Callable[[int], None], device: torch.device
) -> ShardDigest:
    """Write one shard to `file` and return its digest, with facts by matrix; it is on disk when this returns.

    `advance` is called with the source bytes done, from any thread. Raises NonFiniteError where the source holds NaN
    or infinity, OSError from the file system.
    """
    order = Order()
    take = threading.Lock()
    tickets = enumerate(_tasks(shard), 1)
    with ExitStack() as stack:
        files = stack.enter_context(Files())
        sink = _Sink(stack.enter_context(ShardFile(file)))
        make = _Maker(files, _Largest(files), device)
        sink.store(sink.take(_Done(append=np.frombuffer(shard.header, np.uint8))))
        order.done()

        def work() -> None:
            while not order.failed:
                with take:
                    ticket, task = next(tickets, (0, None))
                if task is None:
                    return
                done = make(task)
                order.wait(ticket)
                full = sink.take(done)
                order.done()
                # Last, so that nobody waits for another one's way to the disk.
                sink.store(full)
                advance(sum(read.data.size for read in done.reads))

        run(work, workers, order)
        size = sink.finish()
    return ShardDigest(sink.digest.hexdigest(), size, tuple(sink.segments), sink.facts)
