"""Reads byte ranges of tensors, those included whose parts several files or ranks hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from zaya_tools.dtypes import Bytes
from zaya_tools.errors import SourceError
from zaya_tools.tensors import Chunk, TensorInfo


class Files:
    """Files that are opened for reading when first asked for, once."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, file: Path) -> int:
        """The descriptor of a file."""
        with self._lock:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(file.open("rb", buffering=0)).fileno()
            return self._open[file]


def read_into(descriptor: int, buffer: Bytes, start: int, name: str) -> None:
    """Fill `buffer` from byte `start` of an open file; SourceError when the file ends early."""
    view = buffer.data
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], start + done)
        except OSError as error:
            raise SourceError(f"{name} cannot be read at byte {start + done:,}: {error.strerror}") from error
        if count == 0:
            raise SourceError(f"{name} ended at byte {start + done:,}", "the file changed while it was read")
        done += count


def read_range(tensor: TensorInfo, offset: int, buffer: Bytes, descriptor: Callable[[Path], int]) -> None:
    """Fill `buffer` with the bytes of a tensor from `offset` on; `descriptor` opens files (see Files).

    A tensor in chunks is put together on the way, with no more memory than the buffer's size again.
    """
    if not tensor.chunks:
        read_into(descriptor(tensor.file), buffer, tensor.start + offset, tensor.file.name)
        return
    for chunk in tensor.chunks:
        _read_chunk(chunk, tensor.pitch, offset, buffer, descriptor)


def holder(tensor: TensorInfo, offset: int) -> str:
    """Which file has byte `offset` of a tensor: its name, with its folder's where several hold the tensor."""
    row, column = divmod(offset, tensor.pitch) if tensor.chunks else (0, 0)
    for chunk in tensor.chunks:
        if chunk.row <= row < chunk.row + chunk.rows and chunk.column <= column < chunk.column + chunk.width:
            return f"{chunk.file.parent.name}/{chunk.file.name}"
    return tensor.file.name


_WIDE = 64 * 2**10
"""Parts of rows of this many bytes are read one by one; shorter ones many rows at a time."""


def _read_chunk(chunk: Chunk, pitch: int, offset: int, buffer: Bytes, descriptor: Callable[[Path], int]) -> None:
    """Read what a chunk has of bytes [offset, offset + len(buffer)) into its places in the buffer."""
    end = offset + len(buffer)
    first, last = max(offset // pitch, chunk.row), min(-(-end // pitch), chunk.row + chunk.rows)
    if first >= last:
        return
    name = chunk.file.name
    if chunk.width == pitch:
        low, high = max(offset, first * pitch), min(end, last * pitch)
        place = buffer[low - offset : high - offset]
        read_into(descriptor(chunk.file), place, chunk.start + low - chunk.row * pitch, name)
        return
    if chunk.width >= _WIDE:
        for row in range(first, last):
            left = row * pitch + chunk.column
            low, high = max(offset, left), min(end, left + chunk.width)
            if low < high:
                start = chunk.start + (row - chunk.row) * chunk.width + low - left
                read_into(descriptor(chunk.file), buffer[low - offset : high - offset], start, name)
        return
    rows = np.empty((last - first, chunk.width), np.uint8)
    read_into(descriptor(chunk.file), rows.reshape(-1), chunk.start + (first - chunk.row) * chunk.width, name)
    for row, part in enumerate(rows, first):
        left = row * pitch + chunk.column
        low, high = max(offset, left), min(end, left + chunk.width)
        if low < high:
            buffer[low - offset : high - offset] = part[low - left : high - left]
