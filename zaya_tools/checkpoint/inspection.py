"""`zaya inspect`: what a checkpoint is, from headers and balancing biases alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.conversion import plan_match
from zaya_tools.checkpoint.hub import locate
from zaya_tools.checkpoint.opening import Reading, open_checkpoint
from zaya_tools.checkpoint.sidefiles import SideFiles, side_files
from zaya_tools.checkpoint.skip import SkipClass, skip_classes
from zaya_tools.errors import ZayaError
from zaya_tools.layouts.match import Match, match
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.parameters import Role, active, parameters, total


@dataclass(frozen=True)
class Held:
    """Tensors of one role and dtype: how many, and their bytes."""

    role: str
    dtype: str
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Quantization:
    """Quantized tensors of a role: how many of how many, and the format that config.json states."""

    role: str
    quantized: int
    total: int
    format: str | None


@dataclass(frozen=True)
class Inspection:
    """Everything that `zaya inspect` says. `convertible` is the verdict on `zaya convert`; `verdict` says why."""

    name: str
    layout: str
    architecture: Architecture
    tensors: int
    nbytes: int
    files: int
    parameters: int
    active: int
    embedding: int
    held: tuple[Held, ...]
    quantization: tuple[Quantization, ...]
    missing: tuple[str, ...]
    surplus: tuple[str, ...]
    dropped: Mapping[str, str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    skip: tuple[SkipClass, ...]
    sides: SideFiles
    convertible: bool
    complete: bool
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, stable in names and order."""
        return {
            "name": self.name,
            "layout": self.layout,
            "architecture": self.architecture.as_dict(),
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "parameters": {
                "total": self.parameters,
                "active_per_token": self.active,
                "embedding": self.embedding,
            },
            "held": [{"role": h.role, "dtype": h.dtype, "tensors": h.tensors, "bytes": h.nbytes} for h in self.held],
            "quantization": [
                {"role": q.role, "quantized": q.quantized, "of": q.total, "format": q.format} for q in self.quantization
            ],
            "missing": list(self.missing),
            "surplus": list(self.surplus),
            "dropped": dict(self.dropped),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "skip_class": [
                {
                    "block": s.block,
                    "bias": s.bias,
                    "largest_expert_bias": s.largest_expert_bias,
                    "state": s.state,
                }
                for s in self.skip
            ],
            "side_files": {
                "copied": list(self.sides.copied),
                "missing": list(self.sides.missing),
                "left": list(self.sides.left),
            },
            "complete": self.complete,
            "convertible": self.convertible,
            "verdict": self.verdict,
        }


def inspect(source: str | Path, reading: Reading | None = None) -> Inspection:
    """Report on a checkpoint, a folder, a file or a hub id, of any size, without reading its weights.

    `reading` chooses an iteration of a run and completes what the checkpoint says of itself.

    Raises a ZayaError where there is nothing to report on: unreadable files, or no ZAYA1 layout or geometry.
    """
    folder, name = locate(str(source))
    opened = open_checkpoint(folder, reading)
    found = match(opened.tensors, opened.config, str(folder))
    notes, warnings = [*opened.notes, *found.notes], []
    dropped = dict(found.drops)
    convertible, verdict = False, "incomplete or inconsistent: convert would refuse it"
    if not found.problems:
        try:
            work = plan_match(opened, found, name)
            convertible = True
            verdict = f"convert would write {len(list(work.plan.outputs())):,} native tensors"
            notes, warnings, dropped = list(work.notes), list(work.warnings), dict(work.plan.drops)
        except ZayaError as error:
            verdict = str(error)
    if found.head_alias is not None:
        notes.append("lm_head.weight is stored though tied: convert compares it with the embedding before it drops it")
    return Inspection(
        name=name,
        layout=_layout_name(found),
        architecture=found.architecture,
        tensors=len(opened.tensors),
        nbytes=opened.nbytes,
        files=len(opened.headers),
        parameters=total(found.architecture),
        active=active(found.architecture),
        embedding=next(p.numel for p in parameters(found.architecture) if p.role is Role.EMBEDDING),
        held=_held(found),
        quantization=_quantization(found, opened.config),
        missing=found.missing,
        surplus=found.surplus,
        dropped=dropped,
        problems=found.problems,
        notes=tuple(notes),
        warnings=tuple(warnings),
        skip=skip_classes(found),
        sides=side_files(opened.side_folder, opened.weight_names),
        convertible=convertible,
        complete=not found.problems,
        verdict=verdict,
    )


def _layout_name(found: Match) -> str:
    if found.layout is NATIVE_PER_EXPERT:
        return "native (one tensor an expert)"
    return "native (older spellings)" if found.layout is NATIVE and found.renamed else found.layout.name


def _held(found: Match) -> tuple[Held, ...]:
    counts: dict[tuple[str, str], list[int]] = {}
    for parameter in parameters(found.architecture):
        for bound in found.bound[parameter.name]:
            stored = [*bound.companions.values(), *([bound.tensor] if bound.tensor else [])]
            for tensor in stored:
                entry = counts.setdefault((parameter.role.value, tensor.dtype), [0, 0])
                entry[0] += 1
                entry[1] += tensor.nbytes
    order = [role.value for role in Role]
    keys = sorted(counts, key=lambda key: (order.index(key[0]), key[1]))
    return tuple(Held(role, dtype, *counts[role, dtype]) for role, dtype in keys)


def _quantization(found: Match, config: Mapping[str, Any]) -> tuple[Quantization, ...]:
    if not found.quantized:
        return ()
    stated = config.get("quantization_config")
    name = stated.get("format") if isinstance(stated, dict) else None
    result = []
    for role in (Role.EMBEDDING, Role.ATTENTION, Role.EXPERT, Role.HEAD):
        states = [b.quantized for p in parameters(found.architecture) if p.role is role and len(p.shape) > 1
                  for b in found.bound[p.name]]  # fmt: skip
        if any(states):
            result.append(Quantization(role.value, sum(states), len(states), name))
    return tuple(result)
