"""One file being written by several threads, past the page cache where the file system can do that."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType

import numpy as np

from zaya_tools.dtypes import Bytes

PAGE = 4096
"""Direct writes begin at, and come from, multiples of this many bytes."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


def page_aligned(nbytes: int) -> Bytes:
    """A buffer of at least `nbytes` zeros, in whole pages, that begins at one, as direct writes need it."""
    return np.frombuffer(mmap.mmap(-1, -(-nbytes // PAGE) * PAGE), np.uint8)  # anonymous maps begin at a page


class ShardFile:
    """A file of known size, written block by block in any order.

    Direct writes spare the copy into the page cache and its eviction of what others have there, and leave nothing
    for fsync to wait on. They take whole pages, so the last block is padded and the file cut to size at the end.
    Where the file system refuses one, this and all later writes go through the cache.
    """

    def __init__(self, file: Path) -> None:
        self._direct = True
        try:
            self._descriptor = os.open(file, _FLAGS | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._direct = False
            self._descriptor = os.open(file, _FLAGS, 0o666)
        self._turn = threading.Lock()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, buffer: Bytes, length: int, offset: int) -> None:
        """Write the first `length` bytes of a page-aligned buffer at `offset`; the rest of its last page is cleared."""
        padded = -(-length // PAGE) * PAGE
        buffer[length:padded] = 0
        view = buffer[:padded].data
        done = 0
        while done < padded:
            direct = self._direct
            # Several buffered writers of one file would only spin on its lock.
            with nullcontext() if direct else self._turn:
                try:
                    done += os.pwrite(self._descriptor, view[done:], offset + done)
                except OSError as error:
                    # A short write, as at the end of the disk, leaves an odd rest; the cache takes it, or says why not.
                    if error.errno not in _REFUSED or not direct:
                        raise
                    flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
                    fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                    self._direct = False  # after the flag: other threads' writes may be on their way

    def finish(self, size: int) -> None:
        """Cut the file to `size` bytes and wait until it is on disk."""
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
