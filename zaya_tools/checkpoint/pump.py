"""Moves a shard's bytes: read, scan, convert, write in several threads, and hash in order.

The file is cut into blocks. A worker fills a block with the stretches of source tensors that belong there, so
memory is a buffer a worker, whatever the size of the model. The heavy calls (pread, pwrite, hashing, numpy
reductions) release the interpreter's lock: threads use all cores even for a single shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from zaya_tools.checkpoint.plan import BAKE, COPY, Output, Piece, Shard
from zaya_tools.checkpoint.ranges import Files, holder, read_range
from zaya_tools.checkpoint.shardfile import ShardFile, page_aligned
from zaya_tools.checkpoint.source import BLOCK, stretches
from zaya_tools.checkpoint.threads import Order, run
from zaya_tools.dtypes import SIZES, Bytes, from_float32, nonfinite, to_float32
from zaya_tools.errors import NonFiniteError
from zaya_tools.tensors import TensorInfo


@dataclass(frozen=True)
class Segment:
    """The digest of one stretch of a source tensor, as read."""

    tensor: str
    offset: int
    nbytes: int
    blake3: str


@dataclass(frozen=True)
class ShardDigest:
    """What a finished shard is: the digest of the whole file, and of every stretch of source that went into it.

    `facts` are what was measured while it was written, by tensor: plain values that JSON can hold.
    """

    blake3: str
    nbytes: int
    segments: tuple[Segment, ...]
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Region:
    """Bytes [start, end) of the shard file: one piece of one output, or the header when there is no output."""

    start: int
    end: int
    output: Output | None
    piece: Piece | None


@dataclass(frozen=True)
class _Read:
    """Source bytes that a block was made of; `last` says that they end their piece."""

    data: Bytes
    piece: Piece
    last: bool


def _regions(shard: Shard) -> list[_Region]:
    regions = [_Region(0, len(shard.header), None, None)]
    for output in shard.outputs:
        for piece in output.pieces:
            start = regions[-1].end
            length = piece.nbytes // SIZES[output.source_dtype] * SIZES[output.dtype]
            regions.append(_Region(start, start + length, output, piece))
    return regions


def _blocks(regions: Sequence[_Region], block: int) -> Iterator[tuple[int, int, list[_Region]]]:
    """(start, end, regions that overlap) of every block of the file."""
    size = regions[-1].end
    first = 0
    for start in range(0, size, block):
        end = min(start + block, size)
        while regions[first].end <= start:
            first += 1
        last = first
        while last < len(regions) and regions[last].start < end:
            last += 1
        yield start, end, list(regions[first:last])


def write_shard(shard: Shard, file: Path, workers: int, advance: Callable[[int], None]) -> ShardDigest:
    """Write one shard to `file` and return its digest; the bytes are on disk when this returns.

    `advance` is called with the source bytes done, from any thread. Raises NonFiniteError before a NaN or an
    infinity is converted or published, OSError from the file system.
    """
    digest = blake3()
    segments: list[Segment] = []
    running = [blake3()]  # the digest of the current source stretch
    order = Order()
    take = threading.Lock()
    tickets = enumerate(_blocks(_regions(shard), BLOCK))

    def hash_in_order(block: Bytes, reads: Sequence[_Read]) -> None:
        digest.update(block.data)
        for read in reads:
            running[0].update(read.data.data)
            if read.last:
                piece = read.piece
                segments.append(Segment(piece.tensor.name, piece.offset, piece.nbytes, running[0].hexdigest()))
                running[0] = blake3()

    with ExitStack() as stack:
        files = stack.enter_context(Files())
        target = stack.enter_context(ShardFile(file))

        def work() -> None:
            buffer = page_aligned(BLOCK)
            while not order.failed:
                with take:
                    ticket, block = next(tickets, (-1, None))
                if block is None:
                    return
                start, end, regions = block
                reads = _fill(buffer, start, end, regions, shard.header, files)
                order.wait(ticket)
                hash_in_order(buffer[: end - start], reads)
                order.done()
                # Last, so that no block waits for another one's way to the disk.
                target.write(buffer, end - start, start)
                advance(sum(read.data.nbytes for read in reads))

        run(work, workers, order)
        target.finish(shard.nbytes)
    return ShardDigest(digest.hexdigest(), shard.nbytes, tuple(segments))


def _fill(buffer: Bytes, start: int, end: int, regions: Sequence[_Region], header: bytes, files: Files) -> list[_Read]:
    """Fill a block, bytes [start, end) of the file, and return the source bytes that it was made of."""
    reads = []
    for region in regions:
        low, high = max(start, region.start), min(end, region.end)
        place = buffer[low - start : high - start]
        if region.output is None or region.piece is None:
            place[:] = np.frombuffer(header[low:high], np.uint8)
            continue
        output, piece = region.output, region.piece
        wide, narrow = SIZES[output.source_dtype], SIZES[output.dtype]
        offset, length = (low - region.start) // narrow * wide, (high - low) // narrow * wide
        data = place if output.operation == COPY else np.empty(length, np.uint8)
        read_range(piece.tensor, piece.offset + offset, data, files)
        if nonfinite(data, piece.tensor.dtype) is not None:
            report_nonfinite(piece.tensor)
        if output.operation != COPY:
            place[:] = convert_elements(output, piece.tensor, piece.offset + offset, data)
        reads.append(_Read(data, piece, high == region.end))
    return reads


def convert_elements(output: Output, tensor: TensorInfo, start: int, data: Bytes) -> Bytes:
    """Apply the output's operation to the stretch of a source tensor that begins at byte `start`."""
    values = to_float32(data, tensor.dtype)
    if output.operation == BAKE:
        values = np.exp(np.clip(values, np.float32(1e-7), np.float32(2.0)), dtype=np.float32)
    converted = from_float32(np.ascontiguousarray(values), output.dtype)
    mask = nonfinite(converted, output.dtype)
    if mask is not None:
        first = int(mask.argmax())
        index = start // SIZES[tensor.dtype] + first
        raise NonFiniteError(
            f"{tensor.name}{_position(tensor, index)} = {float(values[first]):.6g} does not fit in {output.dtype}",
            "use --dtype bfloat16, which has the range of float32, or keep the dtype",
        )
    return converted


def _position(tensor: TensorInfo, index: int) -> str:
    return str([int(i) for i in np.unravel_index(index, tensor.shape)]) if tensor.shape else ""


def report_nonfinite(tensor: TensorInfo) -> None:
    """Raise, naming the first non-finite element of a tensor and how many there are in all."""
    count, first = 0, -1
    for offset, data in stretches(tensor):
        mask = nonfinite(data, tensor.dtype)
        if mask is not None:
            first = offset // SIZES[tensor.dtype] + int(mask.argmax()) if first < 0 else first
            count += int(mask.sum())
    where = holder(tensor, first * SIZES[tensor.dtype])
    many = "1 value is" if count == 1 else f"{count:,} values are"
    raise NonFiniteError(
        f"{tensor.name}: {many} NaN or infinite, the first at {_position(tensor, first)} (in {where})",
        "the checkpoint is broken: go back to one from before the training diverged",
    )
