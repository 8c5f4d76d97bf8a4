"""Writes a plan: into a hidden sibling folder, shard by shard, published by one rename when everything is there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from zaya_tools.checkpoint.destination import check_replaceable, partial_folder, remove_written
from zaya_tools.checkpoint.plan import Plan, Shard
from zaya_tools.checkpoint.pump import Segment, ShardDigest
from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import DestinationError, NonFiniteError, SourceError, ZayaError

_OUTPUT, _REPLACED, _RECORDS, _STATE, _LOCK = "output", "replaced", "records", "state.json", "lock"
_UNFINISHED = ".unfinished"
_SLACK = 64 * 2**20  # for side files, index and manifest

WriteShard = Callable[[Shard, Path], ShardDigest]
"""Writes one shard to a file, which is on disk when this returns."""


class Workspace:
    """The hidden folder of one run: `output` becomes the destination, the rest is for resuming."""

    def __init__(self, folder: Path, finished: dict[str, ShardDigest]) -> None:
        self.folder = folder
        self.output = folder / _OUTPUT
        self.finished = finished

    def write(self, plan: Plan, write_shard: WriteShard) -> dict[str, ShardDigest]:
        """Write every shard that is not there yet; digests by file name, finished ones included."""
        for shard in plan.shards:
            if shard.filename in self.finished:
                continue
            unfinished = self.folder / f"{_flat(shard)}{_UNFINISHED}"
            try:
                digest = write_shard(shard, unfinished)
            except OSError as error:
                unfinished.unlink(missing_ok=True)
                raise self._explain(error, shard.filename) from error
            written = self.output / shard.filename
            written.parent.mkdir(parents=True, exist_ok=True)
            unfinished.rename(written)
            for parent in [written.parent, *written.parent.parents][: shard.filename.count("/") + 1]:
                _sync_folder(parent)
            record = {"mtime_ns": written.stat().st_mtime_ns, "digest": asdict(digest)}
            self._save(self.folder / _RECORDS / f"{_flat(shard)}.json", json.dumps(record).encode())
            self.finished[shard.filename] = digest
        return {shard.filename: self.finished[shard.filename] for shard in plan.shards}

    def add(self, name: str, content: bytes) -> None:
        """Write a small file of the output, durably."""
        self._save(self.output / name, content)

    def _save(self, file: Path, content: bytes) -> None:
        try:
            _write_bytes(file, content)
        except OSError as error:
            raise self._explain(error, file.name) from error

    def _explain(self, error: OSError, name: str) -> ZayaError:
        if error.filename and not Path(os.fsdecode(error.filename)).is_relative_to(self.folder):
            return SourceError(f"{error.filename} cannot be read: {error.strerror}", "--resume continues")
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return DestinationError(
                f"the disk is full: {name} could not be written ({len(self.finished)} finished shards are kept)",
                "free some space, then run again with --resume",
            )
        return DestinationError(
            f"{name} could not be written: {error.strerror}", "finished shards are kept: --resume continues"
        )

    def publish(self, destination: Path, force: bool) -> None:
        """Make the output appear under its final name, with `force` replacing what an earlier run left there."""
        _sync_folder(self.output)
        check_replaceable(destination, force)  # again: hours may have passed
        if destination.exists() and any(destination.iterdir()):
            if not _exchange(self.output, destination):
                old = self.folder / _REPLACED
                destination.rename(old)
                self.output.rename(destination)
                old.rename(self.output)
            remove_written(self.output)
        else:
            self.output.rename(destination)
        _sync_folder(destination.parent)
        _discard(self.folder)


def _flat(shard: Shard) -> str:
    """A shard's name without folders: unfinished shards and records lie side by side."""
    return shard.filename.replace("/", "+")


@contextmanager
def open_workspace(
    destination: Path, plan: Plan, fingerprint: str, *, resume: bool, force: bool
) -> Iterator[Workspace]:
    """Create, or with `resume` reopen, the hidden folder for `destination`, locked against a second process.

    DestinationError when another process writes there, when an unfinished run is found without `resume` or
    `force`, when `resume` finds one of another source, plan or version, or when the disk is too small. A run that
    bad numbers end leaves nothing: it could not be resumed.
    """
    folder = partial_folder(destination)
    with _locked(folder, destination):
        finished: dict[str, ShardDigest] = {}
        if (folder / _STATE).exists():
            if resume:
                finished = _finished(folder, plan, fingerprint, destination)
            elif not force:
                raise DestinationError(
                    f"an unfinished run for {destination} is in {folder}", "--resume continues it, --force starts again"
                )
        if not finished:
            _clear(folder)
        need = sum(shard.nbytes for shard in plan.shards if shard.filename not in finished) + _SLACK
        free = shutil.disk_usage(folder).free
        if need > free:
            if not finished:
                _discard(folder)
            raise DestinationError(
                f"{destination} needs {need:,} bytes of disk, {free:,} are free", "free some space, or write elsewhere"
            )
        for name in (_OUTPUT, _RECORDS):
            (folder / name).mkdir(exist_ok=True)
        _write_bytes(folder / _STATE, json.dumps({"fingerprint": fingerprint}).encode())
        try:
            yield Workspace(folder, finished)
        except NonFiniteError:
            _discard(folder)
            raise


def recover(destination: Path) -> None:
    """Put a replaced output back that a run, killed where folders cannot be exchanged, left without its name."""
    folder = partial_folder(destination)
    if (folder / _REPLACED).exists() and not destination.exists():
        with _locked(folder, destination):
            (folder / _REPLACED).rename(destination)


def discard_finished(destination: Path, fingerprint: str) -> None:
    """Delete what a run of this fingerprint, killed after it had published, left behind; other runs' work stays."""
    folder = partial_folder(destination)
    if folder.exists():
        with _locked(folder, destination):
            if not (folder / _STATE).exists() or _fingerprint(folder) == fingerprint:
                _discard(folder)


@contextmanager
def _locked(folder: Path, destination: Path) -> Iterator[None]:
    # A lock that the kernel drops when the process dies, however it dies.
    if folder.is_symlink():
        raise DestinationError(f"{folder} is a link, not the work of an unfinished run", "move it away")
    while True:
        folder.mkdir(exist_ok=True)
        lock = _lock(folder, destination)
        if lock is not None:
            with lock:
                yield
            return


def _lock(folder: Path, destination: Path) -> TextIO | None:
    """The locked file; None when a run that ended meanwhile deleted it, so that its lock guards nothing."""
    file = folder / _LOCK
    try:
        _check_ours(folder)
        lock = file.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                return lock
        except BlockingIOError as error:
            lock.close()
            raise DestinationError(
                f"another zaya process is writing {destination}", "wait for it, or choose another name"
            ) from error
        lock.close()
    except FileNotFoundError:
        pass
    return None


def _fingerprint(folder: Path) -> Any:
    try:
        return read_json(folder / _STATE).get("fingerprint")
    except SourceError:
        return None


def _finished(folder: Path, plan: Plan, fingerprint: str, destination: Path) -> dict[str, ShardDigest]:
    if _fingerprint(folder) != fingerprint:
        raise DestinationError(
            f"the unfinished run for {destination} was of another source, other options or another version",
            "--force without --resume starts again",
        )
    found = ((shard.filename, _recorded(folder, shard)) for shard in plan.shards)
    return {name: digest for name, digest in found if digest is not None}


def _recorded(folder: Path, shard: Shard) -> ShardDigest | None:
    """The digest of a finished shard; None, so that it is written again, where file and record do not belong together.

    The time tells the shard from one of the same size that a publishing run had swapped in when it was killed.
    """
    try:
        record = read_json(folder / _RECORDS / f"{_flat(shard)}.json")
        facts = record["digest"]
        segments = tuple(Segment(**segment) for segment in facts["segments"])
        digest = ShardDigest(facts["blake3"], facts["nbytes"], segments, facts["facts"])
        status = (folder / _OUTPUT / shard.filename).stat()
    except (SourceError, OSError, KeyError, TypeError):
        return None
    return digest if (status.st_size, status.st_mtime_ns) == (shard.nbytes, record.get("mtime_ns")) else None


def _check_ours(folder: Path) -> None:
    """DestinationError for a hidden folder that has something in it which no run of ours puts there."""
    for entry in folder.iterdir():
        known = entry.name in (_OUTPUT, _REPLACED, _RECORDS, _STATE, _LOCK) or entry.suffix == _UNFINISHED
        if not known or entry.is_symlink():
            raise DestinationError(
                f"{entry} is not of an unfinished run of zaya",
                "move it away: nothing that zaya did not write is deleted",
            )


def _clear(folder: Path) -> None:
    """Empty our own hidden folder, the lock aside."""
    _check_ours(folder)
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _discard(folder: Path) -> None:
    """Delete our own hidden folder; something strange in it stays, with the folder."""
    try:
        _clear(folder)
        (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()
    except (OSError, DestinationError):
        return  # the output is whole already: what is left over is no reason to fail


def _write_bytes(file: Path, content: bytes) -> None:
    unfinished = file.with_name(f"{file.name}{_UNFINISHED}")
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.rename(file)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step (Linux renameat2); False where that is not to be had."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(call(here, os.fsencode(first), here, os.fsencode(second), swap) == 0)
