"""A checkpoint opened for a check: its files and its tensors against the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.opening import open_checkpoint
from zaya_tools.checkpoint.sidefiles import MANIFEST
from zaya_tools.checkpoint.source import Source, read_json
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.findings import Finding, Severity
from zaya_tools.layouts.match import Match, match, require
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT

SMOOTHED = "smoothed"
"""Key of a manifest's facts about a weight: its numbers are the source's only together with those of its neighbour."""
LEARNED = "learned"
"""Key of those facts: numbers were moved from the nearest for the sake of what the inputs make of them."""


@dataclass(frozen=True)
class Opened:
    """A checkpoint folder and what its tensors are."""

    source: Source
    found: Match

    @cached_property
    def smoothed(self) -> frozenset[str]:
        """Weights that its manifest says to have been scaled against one another, row by row or column by column."""
        return self._declared(SMOOTHED)

    @cached_property
    def learned(self) -> frozenset[str]:
        """Weights that its manifest says to have been rounded for their inputs."""
        return self._declared(LEARNED)

    def _declared(self, key: str) -> frozenset[str]:
        try:
            held = read_json(self.source.folder / MANIFEST).get("quantized")
        except ZayaError:
            return frozenset()
        entries = held.items() if isinstance(held, dict) else ()
        return frozenset(name for name, facts in entries if isinstance(facts, dict) and facts.get(key) is True)

    @property
    def native(self) -> bool:
        """Whether the names are those that transformers and vLLM have."""
        return self.found.layout in (NATIVE, NATIVE_PER_EXPERT)


def open_model(folder: Path, check: str) -> Opened | Finding:
    """The checkpoint under test, or a failure that says why it cannot be read; SourceError if there is no folder."""
    try:
        source = open_checkpoint(folder)
        return Opened(source, match(source.tensors, source.config, str(folder)))
    except ZayaError as error:
        if not folder.is_dir():
            raise
        return Finding(check, "fail", error.message)


def open_reference(folder: Path) -> Opened:
    """The checkpoint to compare with; a ZayaError when it cannot be read whole: a broken reference proves nothing."""
    source = open_checkpoint(folder)
    return Opened(source, require(match(source.tensors, source.config, str(folder))))


# A converted model may be given other stop tokens or a longer context on purpose. The dtype of each tensor is
# checked by itself, and a baked `clamp_temp` is gone from the config for good reason.
_ADJUSTABLE = {"pad_token", "bos_token", "eos_token", "max_positions", "rope_scaling"}
_CHECKED_ELSEWHERE = {"dtype", "clamp_temp"}


def differences(model: Architecture, reference: Architecture) -> Iterator[tuple[Severity, str]]:
    """(severity, "field = value, the reference has value") of every field in which two geometries differ."""
    for entry in fields(Architecture):
        mine, other = getattr(model, entry.name), getattr(reference, entry.name)
        if mine != other and entry.name not in _CHECKED_ELSEWHERE:
            severity: Severity = "warn" if entry.name in _ADJUSTABLE else "fail"
            yield severity, f"{entry.name} = {mine}, the reference has {other}"
