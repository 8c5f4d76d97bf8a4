"""From a plan to a published checkpoint: what `convert` and `quantize` have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from zaya_tools.checkpoint import skip
from zaya_tools.checkpoint.destination import check_destination, listed_files, settle
from zaya_tools.checkpoint.handover import is_run, run_files
from zaya_tools.checkpoint.manifest import manifest, source_files
from zaya_tools.checkpoint.plan import Plan, fingerprint
from zaya_tools.checkpoint.pump import ShardDigest
from zaya_tools.checkpoint.sidefiles import MANIFEST, SideFiles
from zaya_tools.checkpoint.source import CONFIG, INDEX, Source, read_json, read_stretches, same_bytes
from zaya_tools.checkpoint.writer import WriteShard, discard_finished, open_workspace, recover
from zaya_tools.errors import SourceError
from zaya_tools.layouts.match import Match

Advance = Callable[[int], None]
"""Takes the source bytes done since the last call, from any thread."""


@dataclass(frozen=True)
class Conversion:
    """A conversion that is planned and checked, with everything to say about it before a byte is written."""

    source: Source
    name: str
    found: Match
    plan: Plan
    config: dict[str, Any]
    sides: SideFiles
    options: dict[str, Any]
    skip: tuple[skip.SkipClass, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Converted:
    """What was written. `already_complete` says that a resumed run found nothing left to do."""

    destination: Path
    conversion: Conversion
    digests: dict[str, ShardDigest]
    already_complete: bool = False


@dataclass(frozen=True)
class Extras:
    """What a command adds once all shards are written: small files by name, and entries of the manifest."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)


def execute(
    work: Conversion,
    destination: str | Path,
    write: WriteShard,
    *,
    resume: bool = False,
    force: bool = False,
    advance: Advance,
    finish: Callable[[Mapping[str, ShardDigest]], Extras] | None = None,
) -> Converted:
    """Write a planned checkpoint to `destination`, which appears whole or not at all.

    `finish` sees the digests of all shards. Raises a ZayaError; after one, or after a kill, `resume=True` continues
    with the shards that were finished.
    """
    target = settle(destination)
    stamp = fingerprint(work.plan, work.source.headers, {"options": work.options, "config": work.config})
    recover(target)
    if resume and complete(target, work):
        discard_finished(target, stamp)
        return Converted(target, work, {}, already_complete=True)
    check_destination(target, work.source.folder, force)
    _check_replicas(work.source)
    small = {name: _side_file(work.source.side_folder / name) for name in work.sides.copied}
    small |= run_files() if is_run(work.plan) else _config_files(work)
    with open_workspace(target, work.plan, stamp, resume=resume, force=force) as space:
        advance(sum(s.nbytes for digest in space.finished.values() for s in digest.segments))
        digests = space.write(work.plan, write)
        extras = finish(digests) if finish else Extras()
        small |= extras.files
        for name, content in small.items():
            space.add(name, content)
        record = manifest(
            name=work.name,
            found=work.found,
            headers=work.source.headers,
            plan=work.plan,
            options=work.options,
            digests=digests,
            files=small,
            notes=work.notes,
            warnings=work.warnings,
            more=extras.record,
        )
        space.add(MANIFEST, record)
        space.publish(target, force)
    return Converted(target, work, digests)


def _check_replicas(opened: Source) -> None:
    """What ranks hold in common has to be the same in all of them: one is used, so the others are compared with it."""
    for first, other in opened.replicas:
        if not same_bytes(first, other):
            raise SourceError(
                f"{first.name} differs between {first.file.parent.name} and {other.file.parent.name}",
                "the ranks are of different checkpoints, or training went apart: no export can choose between them",
            )


def _config_files(work: Conversion) -> dict[str, bytes]:
    return {CONFIG: _json(work.config), INDEX: _json(work.plan.index())}


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _side_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SourceError(f"{file.name} cannot be read: {error.strerror}") from error


def complete(destination: Path, work: Conversion) -> bool:
    """Whether `destination` already is what this conversion would write: its manifest says so, and nothing is gone."""
    files = listed_files(destination)
    if not {shard.filename for shard in work.plan.shards} <= files.keys():
        return False
    recorded = read_json(destination / MANIFEST)
    source = recorded.get("source")
    same = (
        recorded.get("options") == work.options
        and isinstance(source, dict)
        and source.get("files") == source_files(work.source.headers)
        and (_older(work.source, destination / MANIFEST) or _same_bytes(work.source, source.get("tensors")))
    )
    return same and all(_present(destination / name, facts) for name, facts in files.items())


def _older(source: Source, manifest_file: Path) -> bool:
    """Whether no file of the source was written after the manifest."""
    written = manifest_file.stat().st_mtime_ns
    return all(header.file.stat().st_mtime_ns < written for header in source.headers)


def _same_bytes(source: Source, recorded: Any) -> bool:
    """Whether every stretch of the source still has the digest that the manifest records."""
    if not isinstance(recorded, dict):
        return False
    for name, parts in recorded.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            return False
        for part in parts:
            digest = blake3()
            for data in read_stretches(tensor, part["offset"], part["bytes"]):
                digest.update(data.data)
            if digest.hexdigest() != part["blake3"]:
                return False
    return True


def _present(file: Path, facts: Any) -> bool:
    return isinstance(facts, dict) and file.is_file() and file.stat().st_size == facts.get("bytes")
