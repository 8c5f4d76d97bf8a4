"""The manifest: what was read, what was written, and the digests of both. No times and no paths, so that equal runs
give equal bytes."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from zaya_tools import __version__
from zaya_tools.checkpoint.header import Header
from zaya_tools.checkpoint.plan import Plan
from zaya_tools.checkpoint.pump import Segment, ShardDigest
from zaya_tools.layouts.match import Match

FORMAT = 1


def source_files(headers: Sequence[Header]) -> dict[str, Any]:
    """Size and header digest of every source file, by name."""
    return {h.name: {"bytes": h.size, "header_blake3": blake3(h.raw).hexdigest()} for h in headers}


def manifest(
    *,
    name: str,
    found: Match,
    headers: Sequence[Header],
    plan: Plan,
    options: Mapping[str, Any],
    digests: Mapping[str, ShardDigest],
    files: Mapping[str, bytes],
    notes: Sequence[str],
    warnings: Sequence[str],
    more: Mapping[str, Any],
) -> bytes:
    """The manifest as JSON bytes. `files` are the small files of the output by name, `name` is the source's.

    `more` are the entries that a command adds of its own.
    """
    segments: dict[str, list[Segment]] = {}
    for digest in digests.values():
        for segment in digest.segments:
            # Gate and up may be in one tensor of the source and in two shards.
            if segment not in segments.setdefault(segment.tensor, []):
                segments[segment.tensor].append(segment)
    written = {name: {"bytes": d.nbytes, "blake3": d.blake3} for name, d in digests.items()}
    written |= {name: {"bytes": len(data), "blake3": blake3(data).hexdigest()} for name, data in files.items()}
    content = {
        "format": FORMAT,
        "tool": {"zaya_tools": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "options": dict(options),
        "source": {
            "name": name,
            "layout": found.layout.name,
            "files": source_files(headers),
            "tensors": {
                tensor: [{"offset": s.offset, "bytes": s.nbytes, "blake3": s.blake3} for s in stretches]
                for tensor, stretches in sorted(segments.items())
            },
        },
        "layout": plan.layout.name,
        "architecture": plan.architecture.as_dict(),
        "dropped": dict(plan.drops),
        "notes": list(notes),
        "warnings": list(warnings),
        **more,
        "tensors": {
            output.name: {
                "file": shard.filename,
                "role": output.role.value,
                "dtype": output.dtype,
                "shape": list(output.shape),
                "operation": output.operation,
                "sources": [piece.tensor.name for piece in output.pieces],
            }
            for shard in plan.shards
            for output in shard.outputs
        },
        "files": dict(sorted(written.items())),
    }
    return (json.dumps(content, indent=1) + "\n").encode()
