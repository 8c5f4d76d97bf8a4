"""The statistics of a calibration: one safetensors file, and beside it a JSON document that people and tools read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.calibration.moments import BINS, RANK, Moments
from zaya_tools.calibration.observing import sites
from zaya_tools.checkpoint.destination import digest_of
from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import SourceError, ZayaError
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.parameters import Parameter, Role, parameters

FORMAT = 2
PERCENTILES = (99.0, 99.9, 99.99)
KINDS = tuple(field.name for field in fields(Moments))
"""The tensors of each site, by the last part of their names."""
_AGAIN = "run `zaya calibrate` again, with --force to replace it"


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
        for kind in KINDS
    }


def moments_of(stored: Mapping[str, Tensor], architecture: Architecture, blocks: Iterable[int]) -> dict[str, Moments]:
    """The moments of some blocks, by parameter name, out of stored tensors; KeyError where one is not there."""
    found: dict[str, Moments] = {}
    for block in blocks:
        for site in sites(architecture, block):
            held = Moments(**{kind: stored[f"{_stem(site[0])}.{kind}"] for kind in KINDS})
            found |= dict.fromkeys((parameter.name for parameter in site), held)
    return found


def _stem(parameter: Parameter) -> str:
    return parameter.name.removesuffix(".weight")


def json_file(file: Path) -> Path:
    """Where the document of a statistics file is."""
    return file.with_suffix(".json")


def save(statistics: Statistics, architecture: Architecture, file: Path, work: Path) -> dict[str, Any]:
    """Write `file` and the document beside it, each appearing whole; returns the document.

    `work` is a folder on the same file system in which both are made. The document names the bytes of `file` that it
    belongs to.
    """
    from safetensors.torch import save_file

    unfinished = work / ".unfinished-statistics"
    described = work / ".unfinished-statistics.json"
    save_file(tensors(statistics.moments, architecture, range(architecture.blocks)), unfinished, {"format": "pt"})
    written = {"bytes": unfinished.stat().st_size, "blake3": digest_of(unfinished)}
    document = {**statistics.document(architecture), "tensors": written}
    described.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    # safetensors gives its files a mode of its own; this one has what the user's umask leaves.
    unfinished.chmod(described.stat().st_mode & 0o777)
    for made, target in ((unfinished, file), (described, json_file(file))):
        _sync(made)
        made.rename(target)
    return document


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(file: Path, architecture: Architecture, expected_identity: str | None = None) -> Statistics:
    """Read the statistics of a model of this geometry, with `expected_identity` of this very model.

    SourceError where there are none, where they cannot be read, and where the two files do not belong together or were
    changed; ZayaError where they are of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    document = read_document(file)
    try:
        if document["tensors"]["blake3"] != digest_of(file):
            raise SourceError(f"{file.name} is not the file that {json_file(file).name} describes", _AGAIN)
        stored = load_file(file)
        blocks = tuple(_coverage(entry) for entry in document["blocks"])
        if len(blocks) != architecture.blocks or any(len(b.expert_tokens) != architecture.experts for b in blocks):
            raise _other(file)
        moments = moments_of(stored, architecture, range(architecture.blocks))
        recorded = str(document["identity"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise SourceError(f"{file} cannot be read: {error}", _AGAIN) from error
    _check(moments, blocks, architecture, file)
    if expected_identity is not None and recorded != expected_identity:
        raise ZayaError(f"{file} is a calibration of another model", "calibrate the one that is quantized")
    known = ("format", "identity", "blocks", "starved", "modules", "tensors")
    facts = {key: value for key, value in document.items() if key not in known}
    return Statistics(moments, blocks, recorded, facts)


def read_document(file: Path) -> dict[str, Any]:
    """The document of a statistics file; SourceError where one of the two is missing, and for another version's."""
    beside = json_file(file)
    there = [entry for entry in (file, beside) if entry.is_file()]
    if not there:
        raise SourceError(f"there are no statistics {file}", "`zaya calibrate` makes them")
    if len(there) == 1:
        missing = beside if there == [file] else file
        raise SourceError(f"{there[0]} has no {missing.name} beside it", f"statistics are both files: {_AGAIN}")
    try:
        document = read_json(beside)
    except SourceError as error:
        raise SourceError(error.message, _AGAIN) from error
    if document.get("format") != FORMAT:
        raise SourceError(f"{beside.name} is not a calibration of this version", _AGAIN)
    return document


def _coverage(entry: Mapping[str, Any]) -> BlockCoverage:
    tokens = tuple(int(number) for number in entry["expert_tokens"])
    return BlockCoverage(int(entry["block"]), tokens, int(entry["skipped_tokens"]), float(entry["router_entropy"]))


def _other(file: Path) -> ZayaError:
    return ZayaError(f"{file} is a calibration of a model of another shape", "calibrate the one that is quantized")


def _check(
    moments: Mapping[str, Moments], blocks: tuple[BlockCoverage, ...], architecture: Architecture, file: Path
) -> None:
    for index, block in enumerate(blocks):
        if block.block != index or block.skipped < 0 or not 0 <= block.router_entropy < math.inf:
            raise SourceError(f"{json_file(file)}: the coverage of block {index} cannot be", _AGAIN)
        for site in sites(architecture, index):
            held, expert = moments[site[0].name], site[0].role is Role.EXPERT
            parts, width = site[0].shape[0] if expert else 1, site[0].shape[-1]
            if held.second_moment.shape != (parts, width):
                raise _other(file)
            for kind in KINDS:
                _check_tensor(getattr(held, kind), kind, parts, width, f"{file}: {kind} of {site[0].name}")
            if expert and tuple(held.tokens.tolist()) != block.expert_tokens:
                raise SourceError(f"{file}: the tokens of {site[0].name} are not those of block {index}", _AGAIN)


def _check_tensor(values: Tensor, kind: str, parts: int, width: int, where: str) -> None:
    shape, dtype = _form(kind, parts, width)
    if values.shape != shape or values.dtype != dtype:
        raise SourceError(f"{where} is {values.dtype} {list(values.shape)}, expected {dtype} {list(shape)}", _AGAIN)
    if not bool(torch.isfinite(values).all()) or (kind != "sketch" and bool((values < 0).any())):
        raise SourceError(f"{where} holds numbers that cannot be", _AGAIN)


def _form(kind: str, parts: int, width: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a kind of figures: see `Moments`."""
    whole = {"tokens": (parts,), "histogram": (parts, BINS)}
    if kind in whole:
        return whole[kind], torch.int64
    return {"amax": (parts,), "sketch": (parts, width, RANK)}.get(kind, (parts, width)), torch.float32
