"""Writes a plan: into a hidden sibling folder, shard by shard, published by one rename when everything is there."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from zaya_tools.checkpoint.plan import Plan
from zaya_tools.checkpoint.pump import Segment, ShardDigest, write_shard
from zaya_tools.checkpoint.sidefiles import MANIFEST
from zaya_tools.checkpoint.source import BLOCK, read_json
from zaya_tools.errors import DestinationError, SourceError

_OUTPUT, _REPLACED, _RECORDS, _STATE, _LOCK = "output", "replaced", "records", "state.json", "lock"
_HASHED = 16 * 2**20
_SLACK = 64 * 2**20  # for side files, index and manifest


def partial_folder(destination: Path) -> Path:
    """Where an unfinished run keeps its work: hidden, beside the destination, on the same file system."""
    return destination.parent / f".{destination.name}.zaya-partial"


def check_destination(destination: Path, source: Path, force: bool) -> None:
    """DestinationError when `destination` may not be written: inside the source, around it, or not ours to replace."""
    target, origin = destination.resolve(), source.resolve()
    if target == origin or target.is_relative_to(origin) or origin.is_relative_to(target):
        raise DestinationError(
            f"{destination} and the source {source} lie in one another", "the source is never written to"
        )
    if not target.parent.is_dir():
        raise DestinationError(f"the folder {target.parent} does not exist", "create it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise DestinationError(f"{target.parent} is not writable")
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_symlink() or not destination.is_dir():
        raise DestinationError(f"{destination} exists and is not a folder", "choose another destination")
    if not any(destination.iterdir()):
        return
    if not force:
        raise DestinationError(
            f"{destination} already exists", "choose another name, or --force to replace what zaya wrote there"
        )
    _check_ours(destination)


def _check_ours(folder: Path) -> None:
    """Every entry must be a file that this folder's manifest lists, with the size (small files: the bytes) it lists."""
    if not (folder / MANIFEST).is_file():
        raise DestinationError(
            f"{folder} has no {MANIFEST}: zaya did not write it", "nothing that zaya did not write is deleted"
        )
    files = read_json(folder / MANIFEST).get("files")
    listed = files if isinstance(files, dict) else {}
    for entry in sorted(folder.iterdir()):
        if entry.name == MANIFEST:
            continue
        facts = listed.get(entry.name)
        if not isinstance(facts, dict) or entry.is_symlink() or not entry.is_file() or not _as_listed(entry, facts):
            raise DestinationError(
                f"{entry} is not a file that zaya wrote, or was changed since",
                "move it away: nothing that zaya did not write is deleted",
            )


def _as_listed(file: Path, facts: Mapping[str, Any]) -> bool:
    size = file.stat().st_size
    # Hashing shards of gigabytes again would make --force slow; whoever edits a small file changes its digest.
    return size == facts.get("bytes") and (size > _HASHED or _digest(file) == facts.get("blake3"))


def _digest(file: Path) -> str:
    digest = blake3()
    with file.open("rb") as stream:
        while data := stream.read(BLOCK):
            digest.update(data)
    return digest.hexdigest()


class Workspace:
    """The hidden folder of one run: `output` becomes the destination, the rest is for resuming."""

    def __init__(self, folder: Path, finished: dict[str, ShardDigest]) -> None:
        self.folder = folder
        self.output = folder / _OUTPUT
        self.finished = finished

    def write(self, plan: Plan, workers: int, advance: Callable[[int], None]) -> dict[str, ShardDigest]:
        """Write every shard that is not there yet; digests by file name, finished ones included."""
        for shard in plan.shards:
            if shard.filename in self.finished:
                continue
            unfinished = self.folder / f"{shard.filename}.unfinished"
            try:
                digest = write_shard(shard, unfinished, workers, advance)
            except OSError as error:
                unfinished.unlink(missing_ok=True)
                raise _disk_error(error, shard.filename, len(self.finished)) from error
            unfinished.rename(self.output / shard.filename)
            _sync_folder(self.output)
            self._save(self.folder / _RECORDS / f"{shard.filename}.json", json.dumps(asdict(digest)).encode())
            self.finished[shard.filename] = digest
        return {shard.filename: self.finished[shard.filename] for shard in plan.shards}

    def add(self, name: str, content: bytes) -> None:
        """Write a small file of the output, durably."""
        self._save(self.output / name, content)

    def _save(self, file: Path, content: bytes) -> None:
        try:
            _write_bytes(file, content)
        except OSError as error:
            raise _disk_error(error, file.name, len(self.finished)) from error

    def publish(self, destination: Path) -> None:
        """Make the output appear under its final name, replacing an earlier run's if there is one."""
        _sync_folder(self.output)
        if destination.exists() and any(destination.iterdir()):
            _check_ours(destination)
            if not _exchange(self.output, destination):
                old = self.folder / _REPLACED
                destination.rename(old)
                self.output.rename(destination)
                old.rename(self.output)
            _remove_listed(self.output)
        else:
            self.output.rename(destination)
        _sync_folder(destination.parent)
        discard(self.folder)


def discard(folder: Path) -> None:
    """Delete a run's hidden folder."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def open_workspace(
    destination: Path, plan: Plan, fingerprint: str, *, resume: bool, force: bool
) -> Iterator[Workspace]:
    """Create, or with `resume` reopen, the hidden folder for `destination`, locked against a second process.

    DestinationError when another process writes there, when an unfinished run is found without `resume` or
    `force`, when `resume` finds one of another source, plan or version, or when the disk is too small.
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
                discard(folder)
            raise DestinationError(
                f"{destination} needs {need:,} bytes of disk, {free:,} are free", "free some space, or write elsewhere"
            )
        for name in (_OUTPUT, _RECORDS):
            (folder / name).mkdir(exist_ok=True)
        _write_bytes(folder / _STATE, json.dumps({"fingerprint": fingerprint}).encode())
        yield Workspace(folder, finished)


@contextmanager
def _locked(folder: Path, destination: Path) -> Iterator[None]:
    # A lock that the kernel drops when the process dies, however it dies.
    folder.mkdir(exist_ok=True)
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DestinationError(
                f"another zaya process is writing {destination}", "wait for it, or choose another name"
            ) from error
        yield


def _finished(folder: Path, plan: Plan, fingerprint: str, destination: Path) -> dict[str, ShardDigest]:
    if read_json(folder / _STATE).get("fingerprint") != fingerprint:
        raise DestinationError(
            f"the unfinished run for {destination} was of another source, other options or another version",
            "--force starts again",
        )
    result = {}
    for shard in plan.shards:
        record = folder / _RECORDS / f"{shard.filename}.json"
        written = folder / _OUTPUT / shard.filename
        if not record.exists() or not written.exists() or written.stat().st_size != shard.nbytes:
            continue
        try:
            facts = read_json(record)
        except SourceError:
            continue  # cut off while it was written: the shard is written again
        segments = tuple(Segment(**segment) for segment in facts["segments"])
        result[shard.filename] = ShardDigest(facts["blake3"], facts["nbytes"], segments)
    return result


def _clear(folder: Path) -> None:
    """Empty our own hidden folder, the lock aside."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _remove_listed(folder: Path) -> None:
    """Delete the files that a replaced folder's manifest lists, then the folder if nothing else is in it."""
    listed: Mapping[str, Any] = read_json(folder / MANIFEST)["files"]
    for name in [*listed, MANIFEST]:
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def _disk_error(error: OSError, name: str, finished: int) -> DestinationError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DestinationError(
            f"the disk is full: {name} could not be written ({finished} finished shards are kept)",
            "free some space, then run again with --resume",
        )
    return DestinationError(
        f"{name} could not be written: {error.strerror}", "finished shards are kept: --resume continues"
    )


def _write_bytes(file: Path, content: bytes) -> None:
    unfinished = file.with_name(f"{file.name}.unfinished")
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
