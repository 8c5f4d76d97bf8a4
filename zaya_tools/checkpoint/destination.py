"""Where an output may go: a new name, an empty folder, or with --force what an earlier run of zaya wrote there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from zaya_tools.checkpoint.hub import expand
from zaya_tools.checkpoint.sidefiles import MANIFEST
from zaya_tools.checkpoint.source import BLOCK, read_json
from zaya_tools.errors import DestinationError, SourceError

_HASHED = 16 * 2**20


def settle(destination: str | Path) -> Path:
    """The destination under its real folder: `.` and `..` resolved, a link at its own name kept for the checks."""
    path = expand(destination)
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def partial_folder(destination: Path) -> Path:
    """Where an unfinished run keeps its work: hidden, beside the destination, on the same file system."""
    return destination.parent / f".{destination.name}.zaya-partial"


def check_destination(destination: Path, source: Path, force: bool) -> None:
    """DestinationError when a settled `destination` may not be written: in or around the source, or not ours."""
    target, origin = destination.resolve(), source.resolve()
    if target == origin or target.is_relative_to(origin) or origin.is_relative_to(target):
        raise DestinationError(
            f"{destination} and the source {source} lie in one another", "the source is never written to"
        )
    if origin.is_relative_to(partial_folder(target)):
        raise DestinationError(f"the source {source} is the unfinished work for {destination}", "move it elsewhere")
    if not target.parent.is_dir():
        raise DestinationError(f"the folder {target.parent} does not exist", "create it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise DestinationError(f"{target.parent} is not writable")
    if not destination.exists() and not destination.is_symlink():
        return
    if destination.is_symlink() or not destination.is_dir():
        raise DestinationError(f"{destination} exists and is not a folder", "choose another destination")
    # Found out now, not by the rename at the end of the run.
    if destination.is_mount() or destination.samefile("."):
        what = "a mount point" if destination.is_mount() else "the current folder"
        raise DestinationError(f"{destination} is {what}, which cannot be replaced in one step", "name a folder in it")
    check_replaceable(destination, force)


def check_replaceable(destination: Path, force: bool) -> None:
    """DestinationError unless the folder is absent or empty, or with `force` holds what zaya wrote and nothing else."""
    if not destination.exists() or not any(destination.iterdir()):
        return
    if not force:
        raise DestinationError(
            f"{destination} already exists", "choose another name, or --force to replace what zaya wrote there"
        )
    written = listed_files(destination)
    if not written:
        raise DestinationError(
            f"{destination} has no {MANIFEST} of zaya's: zaya did not write it",
            "nothing that zaya did not write is deleted",
        )
    for entry in sorted(destination.rglob("*")):
        name = entry.relative_to(destination).as_posix()
        if entry.is_dir() and not entry.is_symlink() and any(known.startswith(f"{name}/") for known in written):
            continue
        if name != MANIFEST and not _as_listed(entry, written.get(name)):
            raise DestinationError(
                f"{entry} is not a file that zaya wrote, or was changed since",
                "move it away: nothing that zaya did not write is deleted",
            )


def listed_files(folder: Path) -> Mapping[str, Any]:
    """What the manifest in `folder` says that was written there, by file name; empty without a manifest of ours."""
    try:
        files = read_json(folder / MANIFEST).get("files")
    except SourceError:
        return {}
    return files if isinstance(files, dict) else {}


def _as_listed(file: Path, facts: Any) -> bool:
    """Whether this is a plain file of the size (small files: the bytes) that the manifest lists."""
    if not isinstance(facts, dict) or file.is_symlink() or not file.is_file():
        return False
    size = file.stat().st_size
    # Hashing shards of gigabytes again would make --force slow; whoever edits a small file changes its digest.
    return size == facts.get("bytes") and (size > _HASHED or digest_of(file) == facts.get("blake3"))


def digest_of(file: Path) -> str:
    """The BLAKE3 of a file's bytes, in hex."""
    digest = blake3()
    with file.open("rb") as stream:
        while data := stream.read(BLOCK):
            digest.update(data)
    return digest.hexdigest()


def remove_written(folder: Path) -> None:
    """Delete the files below a folder that its manifest lists, then the folders in which nothing else is."""
    written = listed_files(folder)
    below = sorted(folder.rglob("*"), reverse=True)  # what is in a folder comes before the folder
    for entry in below:  # never the names of the manifest: they could point out of the folder
        name = entry.relative_to(folder).as_posix()
        if entry.is_dir() and not entry.is_symlink():
            if any(known.startswith(f"{name}/") for known in written) and not any(entry.iterdir()):
                entry.rmdir()
        elif name in written and name != MANIFEST:
            entry.unlink()
    (folder / MANIFEST).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
