"""The statistics of a calibration: one safetensors file, and beside it a JSON document that people and tools read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.calibration.moments import RANK, Moments
from zaya_tools.calibration.observing import sites
from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import SourceError, ZayaError
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.parameters import Parameter, Role, parameters

FORMAT = 1
PERCENTILES = (99.0, 99.9, 99.99)
_KINDS = tuple(field.name for field in fields(Moments))


@dataclass(frozen=True)
class BlockCoverage:
    """One block: tokens that each expert took, tokens that skipped, and the router's mean entropy in nats a token."""

    block: int
    expert_tokens: tuple[int, ...]
    skipped: int
    router_entropy: float

    @property
    def tokens(self) -> int:
        """Tokens that went through the block."""
        return sum(self.expert_tokens) + self.skipped

    def starved(self, least: int) -> tuple[int, ...]:
        """Experts with fewer than `least` tokens."""
        return tuple(expert for expert, tokens in enumerate(self.expert_tokens) if tokens < least)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, stable in names and order."""
        return {
            "block": self.block,
            "expert_tokens": list(self.expert_tokens),
            "skipped_tokens": self.skipped,
            "skip_share": self.skipped / self.tokens if self.tokens else 0.0,
            "router_entropy": self.router_entropy,
        }


@dataclass(frozen=True)
class Statistics:
    """What a calibration found: moments by native parameter name, coverage by block, and `facts` on how it was made.

    `identity` tells the model that they are of: see `identity`.
    """

    moments: Mapping[str, Moments]
    blocks: tuple[BlockCoverage, ...]
    identity: str
    facts: Mapping[str, Any]

    def starved(self, least: int = 1) -> tuple[tuple[int, int, int], ...]:
        """(block, expert, its tokens) of every expert with fewer than `least` tokens."""
        return tuple((b.block, expert, b.expert_tokens[expert]) for b in self.blocks for expert in b.starved(least))

    def document(self, architecture: Architecture) -> dict[str, Any]:
        """Everything but the channels, as plain values: how it was made, coverage, and figures module by module."""
        return {
            "format": FORMAT,
            "identity": self.identity,
            **self.facts,
            "blocks": [block.as_dict() for block in self.blocks],
            "starved": [{"block": b, "expert": e, "tokens": n} for b, e, n in self.starved()],
            "modules": modules(self.moments, architecture),
        }


def modules(moments: Mapping[str, Moments], architecture: Architecture) -> dict[str, Any]:
    """Tokens, largest magnitude and percentiles of the input of every quantizable module, by its runtime name."""
    found = {}
    for parameter in parameters(architecture):
        held = moments.get(parameter.name)
        if held is None:
            continue
        for part in NATIVE_PER_EXPERT.parts(parameter, architecture):
            at = part.expert or 0
            found[part.name.removesuffix(".weight")] = {
                "tokens": int(held.tokens[at]),
                "amax": float(held.amax[at]),
                "percentiles": {f"{p:g}": held.percentile(at, p) for p in PERCENTILES},
            }
    return found


def tensors(moments: Mapping[str, Moments], architecture: Architecture, blocks: Iterable[int]) -> dict[str, Tensor]:
    """The moments of some blocks as tensors to store, under the name of the first parameter with this input."""
    return {
        f"{_stem(site[0])}.{kind}": getattr(moments[site[0].name], kind).contiguous()
        for block in blocks
        for site in sites(architecture, block)
        for kind in _KINDS
    }


def moments_of(stored: Mapping[str, Tensor], architecture: Architecture, blocks: Iterable[int]) -> dict[str, Moments]:
    """The moments of some blocks, by parameter name, out of stored tensors; KeyError where one is not there."""
    found: dict[str, Moments] = {}
    for block in blocks:
        for site in sites(architecture, block):
            held = Moments(**{kind: stored[f"{_stem(site[0])}.{kind}"] for kind in _KINDS})
            found |= dict.fromkeys((parameter.name for parameter in site), held)
    return found


def _stem(parameter: Parameter) -> str:
    return parameter.name.removesuffix(".weight")


def json_file(file: Path) -> Path:
    """Where the document of a statistics file is."""
    return file.with_suffix(".json")


def save(statistics: Statistics, architecture: Architecture, file: Path) -> None:
    """Write `file` and the document beside it, each appearing whole."""
    from safetensors.torch import save_file

    content = json.dumps(statistics.document(architecture), indent=1).encode() + b"\n"
    unfinished = file.with_name(f".{file.name}.unfinished")
    everything = tensors(statistics.moments, architecture, range(architecture.blocks))
    save_file(everything, unfinished, {"format": "pt"})
    _publish(unfinished, file)
    target = json_file(file)
    unfinished = target.with_name(f".{target.name}.unfinished")
    unfinished.write_bytes(content)
    _publish(unfinished, target)


def _publish(unfinished: Path, file: Path) -> None:
    descriptor = os.open(unfinished, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    unfinished.rename(file)


def load(file: Path, architecture: Architecture, expected_identity: str | None = None) -> Statistics:
    """Read the statistics of a model of this geometry, with `expected_identity` of this very model.

    SourceError where they cannot be read, ZayaError where they are of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    document = read_json(json_file(file))
    if document.get("format") != FORMAT:
        raise SourceError(f"{json_file(file).name} is not a calibration of this version", "run `zaya calibrate` again")
    try:
        stored = load_file(file)
        blocks = tuple(_coverage(entry) for entry in document["blocks"])
        if len(blocks) != architecture.blocks or any(len(b.expert_tokens) != architecture.experts for b in blocks):
            raise _other(file)
        moments = moments_of(stored, architecture, range(architecture.blocks))
        recorded = str(document["identity"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{file} cannot be read: {error}", "run `zaya calibrate` again") from error
    _check(moments, architecture, file)
    if expected_identity is not None and recorded != expected_identity:
        raise ZayaError(f"{file} is a calibration of another model", "calibrate the one that is quantized")
    known = ("format", "identity", "blocks", "starved", "modules")
    facts = {key: value for key, value in document.items() if key not in known}
    return Statistics(moments, blocks, recorded, facts)


def _coverage(entry: Mapping[str, Any]) -> BlockCoverage:
    tokens = tuple(int(number) for number in entry["expert_tokens"])
    return BlockCoverage(int(entry["block"]), tokens, int(entry["skipped_tokens"]), float(entry["router_entropy"]))


def _other(file: Path) -> ZayaError:
    return ZayaError(f"{file} is a calibration of a model of another shape", "calibrate the one that is quantized")


def _check(moments: Mapping[str, Moments], architecture: Architecture, file: Path) -> None:
    for index in range(architecture.blocks):
        for site in sites(architecture, index):
            held = moments[site[0].name]
            parts = site[0].shape[0] if site[0].role is Role.EXPERT else 1
            if held.second_moment.shape != (parts, site[0].shape[-1]) or held.sketch.shape[-1] != RANK:
                raise _other(file)
            for kind in _KINDS:
                values = getattr(held, kind)
                if not bool(torch.isfinite(values).all()) or (kind != "sketch" and bool((values < 0).any())):
                    raise SourceError(f"{file}: {kind} of {site[0].name} holds numbers that cannot be")
