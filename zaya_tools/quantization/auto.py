"""`--recipe auto`: measure every unit's damage, choose under a size, and write the choice down as a recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from zaya_tools import __version__
from zaya_tools.calibration.data import Choice
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.run import draw
from zaya_tools.calibration.workspace import Workspace, open_workspace
from zaya_tools.checkpoint.destination import check_destination, listed_files, partial_folder, settle
from zaya_tools.checkpoint.manifest import source_files
from zaya_tools.checkpoint.opening import Reading
from zaya_tools.checkpoint.plan import stamps
from zaya_tools.checkpoint.source import read_json
from zaya_tools.checkpoint.writer import recover
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.validation import compute_dtype
from zaya_tools.model.device import choose_device
from zaya_tools.model.streaming import Stream
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import total
from zaya_tools.quantization.calibrated import Calibration, Report, Stage, measured, read_statistics
from zaya_tools.quantization.conversion import Quantization, plan_quantization
from zaya_tools.quantization.damage import CANDIDATES, Option, Unit, copies, measure_units, units_of
from zaya_tools.quantization.gptq import kernel
from zaya_tools.quantization.mixed import Chosen, choose, recipe_of, recipe_text
from zaya_tools.quantization.recipe import Recipe
from zaya_tools.quantization.room import check_room, few
from zaya_tools.quantization.scheme import GPTQ, IMATRIX, Observer
from zaya_tools.quantization.trial import Followed, Inputs, Recorded

RECIPE, DAMAGES = "recipe.yaml", "damages.json"
"""The files of an output that say what was chosen, and what every scheme would cost where."""


@dataclass(frozen=True)
class Auto:
    """A chosen recipe, the file's text, and why. `fingerprint` tells model, data and options from others."""

    recipe: Recipe
    text: str
    chosen: Chosen
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, stable in names and order."""
        return {
            "bytes": self.chosen.nbytes,
            "expected_damage": self.chosen.damage,
            "units": [
                {
                    "role": unit.role,
                    "block": unit.block,
                    "scheme": option.scheme,
                    "options": [asdict(other) for other in unit.options],
                }
                for unit, option in zip(self.chosen.units, self.chosen.options, strict=True)
            ],
        }

    @property
    def files(self) -> dict[str, bytes]:
        """What to add to the checkpoint that is made by it, by name."""
        damages = json.dumps({"fingerprint": self.fingerprint, **self.as_dict()}, indent=2)
        return {RECIPE: self.text.encode(), DAMAGES: f"{damages}\n".encode()}


@contextmanager
def choosing(
    source: str | Path, destination: str | Path, calibration: Calibration, *, size: int | None = None,
    bits: float | None = None, device: str = "auto", resume: bool = False, force: bool = False,
    reading: Reading | None = None, planning: Mapping[str, Any] | None = None, report: Report | None = None,
) -> Iterator[Auto]:  # fmt: skip
    """Choose a scheme for the attention and the experts of every block, for `size` bytes of tensors or `bits` a weight.

    `planning` are the options that `plan_quantization` will have, so that what it would refuse is refused now.
    The recipe rounds by GPTQ where `calibration` has data and llm-compressor is installed, else by the statistics, and
    so does the weighing. What was found is kept beside `destination` until the block under this ends without an error:
    quantize in it, and `resume` never weighs again what was weighed. Nor does it where `destination` is complete.

    Raises a ZayaError for targets that make no sense or cannot be met, where nothing is known of the inputs, for a
    destination that cannot be written and where the disk is too small.
    """
    job = _plan(source, calibration, size, bits, device, reading, planning or {})
    target = settle(destination)
    beside = target.with_name(f"{target.name}.auto")
    recover(target)
    units = _published(target, job.fingerprint) if resume else None
    if units is None:
        check_destination(target, job.plain.source.folder, force)
    elif not partial_folder(beside).exists():
        yield job.choose(units)
        return
    with open_workspace(beside, job.stamp, resume=resume, force=force, every=calibration.every) as space:
        yield job.choose(units or job.weigh(space, report or (lambda _: None)))


def choose_recipe(source: str | Path, destination: str | Path, calibration: Calibration, **options: Any) -> Auto:
    """What `choosing` gives, with the same options, where nothing is to be kept for a quantization to come."""
    with choosing(source, destination, calibration, **options) as auto:
        return auto


@dataclass(frozen=True)
class _Job:
    """A choice that is to be made, checked as far as it can be before the work begins."""

    plain: Quantization
    weights: Weights
    calibration: Calibration
    observer: Observer
    ids: Tensor
    units: tuple[Unit, ...]
    target: int
    fingerprint: str
    moments: Mapping[str, Moments] | None

    @property
    def stamp(self) -> str:
        """What unfinished work belongs to: to the very files, as they are."""
        return blake3(json.dumps([self.fingerprint, stamps(self.plain.source.headers)]).encode()).hexdigest()

    def choose(self, units: tuple[Unit, ...]) -> Auto:
        other = self.plain.plan.data_bytes - sum(unit.options[-1].nbytes for unit in units)
        chosen = choose(units, other, self.target)
        text = recipe_text(chosen, self.observer, total(self.weights.architecture))
        return Auto(recipe_of(text), text, chosen, self.fingerprint)

    def weigh(self, space: Workspace, say: Report) -> tuple[Unit, ...]:
        weights, budget = self.weights, self.calibration.budget
        ids = few(self.ids, weights, copies(self.units))
        check_room(weights, ids, copies(self.units), self.ids if self.observer == GPTQ else None, budget, space.folder)
        return measure_units(
            weights, self.units, self._inputs(space, say), ids, space, budget=budget // 2,
            report=lambda name, done, of: say(Stage(name, done, of)),
        )  # fmt: skip

    def _inputs(self, space: Workspace, say: Report) -> Inputs:
        weights, given = self.weights, self.calibration
        if self.observer == GPTQ:
            return Followed(Stream(weights, weights.ends(), self.ids, budget=given.budget // 2))
        if self.moments is not None:
            return Recorded(weights, self.moments)
        return Recorded(weights, measured(weights, self.ids, given.budget, space, say))


def _plan(
    source: str | Path, calibration: Calibration, size: int | None, bits: float | None, device: str,
    reading: Reading | None, planning: Mapping[str, Any],
) -> _Job:  # fmt: skip
    if (size is None) == (bits is None):
        raise ZayaError("auto needs one target", "give either --target-size or --target-bits")
    if bits is not None and not 0 < bits <= 32:
        raise ZayaError(
            f"{bits} bits a weight cannot be", "a weight has 16 in a checkpoint, and 4 in the smallest scheme"
        )
    plain = plan_quantization(source, "bf16", reading=reading, **planning)
    weights = Weights(plain.source, plain.found, compute_dtype(calibration.dtype), choose_device(device))
    target = size if size is not None else int((bits or 0) * total(weights.architecture) / 8)
    if calibration.statistics is None and calibration.choice is None:
        raise ZayaError(
            "recipe auto needs to know its inputs", "give --stats FILE, which `zaya calibrate` makes, or --data"
        )
    if calibration.choice is not None and not calibration.choice.repeatable:
        raise ZayaError("auto reads its data twice, and a pipe can be read once", "give a file to --data")
    units = units_of(weights, planning.get("tensor_parallel", 1))
    # A target that cannot be met is known before anything is weighed.
    choose(units, plain.plan.data_bytes - sum(unit.options[-1].nbytes for unit in units), target)
    choice = calibration.choice or Choice(context=min(Choice().context, weights.architecture.max_positions))
    drawn = draw(weights, choice, calibration.tokenizer)
    observer = _observer(calibration)
    inputs, moments = [drawn.digest], None
    if observer != GPTQ and calibration.statistics is not None:
        held, digest = read_statistics(calibration.statistics, weights)
        inputs, moments = [drawn.digest, digest], held.moments
    record = {
        "versions": [__version__, torch.__version__],
        "source": [source_files(plain.source.headers), plain.options],
        "computing": [weights.device.type, calibration.dtype, observer, CANDIDATES],
        "inputs": inputs,
        "target": target,
    }
    fingerprint = blake3(json.dumps(record, sort_keys=True).encode()).hexdigest()
    return _Job(plain, weights, calibration, observer, drawn.ids, units, target, fingerprint, moments)


def _observer(calibration: Calibration) -> Observer:
    if calibration.choice is None:
        return IMATRIX
    try:
        kernel()
    except ZayaError:
        return IMATRIX
    return GPTQ


def _published(target: Path, fingerprint: str) -> tuple[Unit, ...] | None:
    """The units of a finished output of this model, data and options; None where `target` is no such thing."""
    if DAMAGES not in listed_files(target) or not (target / DAMAGES).is_file():
        return None
    held = read_json(target / DAMAGES)
    if held.get("fingerprint") != fingerprint:
        return None
    return tuple(map(Unit.of, held["units"]))


def explanation(auto: Auto) -> list[tuple[str, int, str, Unit, Option]]:
    """(role, block, scheme, the unit, the option) of every unit, the most harmed first."""
    rows = [
        (unit.role, unit.block, option.scheme or "full precision", unit, option)
        for unit, option in zip(auto.chosen.units, auto.chosen.options, strict=True)
    ]
    return sorted(rows, key=lambda row: -row[4].damage)
