"""`--recipe auto`: measure every unit's damage, choose under a size, and write the choice down as a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from zaya_tools import __version__
from zaya_tools.calibration.data import Choice, sample
from zaya_tools.calibration.identity import identity
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.run import Pass, statistics_file
from zaya_tools.calibration.statistics import load
from zaya_tools.calibration.workspace import open_workspace
from zaya_tools.checkpoint.destination import settle
from zaya_tools.checkpoint.manifest import source_files
from zaya_tools.checkpoint.opening import Reading
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.validation import DTYPES
from zaya_tools.model.device import choose_device
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import total
from zaya_tools.quantization.calibrated import Calibration, Report, Stage
from zaya_tools.quantization.conversion import plan_quantization
from zaya_tools.quantization.damage import Option, Unit, measure_units
from zaya_tools.quantization.gptq import kernel
from zaya_tools.quantization.mixed import Chosen, choose, recipe_of, recipe_text
from zaya_tools.quantization.recipe import Recipe
from zaya_tools.quantization.scheme import GPTQ, IMATRIX, Observer

RECIPE = "recipe.yaml"
"""The file of an output that says what was chosen."""
TOKENS = 8192
"""Tokens on which damage is measured."""


@dataclass(frozen=True)
class Auto:
    """A chosen recipe, the file's text, and why."""

    recipe: Recipe
    text: str
    chosen: Chosen

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


def choose_recipe(
    source: str | Path, destination: str | Path, calibration: Calibration, *, size: int | None = None,
    bits: float | None = None, device: str = "auto", resume: bool = False, force: bool = False,
    reading: Reading | None = None, report: Report | None = None,
) -> Auto:  # fmt: skip
    """Choose a scheme for the attention and the experts of every block, for `size` bytes of tensors or `bits` a weight.

    The recipe rounds by GPTQ where `calibration` has data and llm-compressor is installed, else by the statistics.
    Raises a ZayaError for targets that make no sense or cannot be met, and where nothing is known of the inputs.
    """
    if (size is None) == (bits is None):
        raise ZayaError("auto needs a target", "give one of --target-size and --target-bits")
    plain = plan_quantization(source, "bf16", reading=reading)
    weights = Weights(plain.source, plain.found, DTYPES[calibration.dtype], choose_device(device))
    count = total(weights.architecture)
    target = size if size is not None else int((bits or 0) * count / 8)
    if calibration.statistics is None and calibration.choice is None:
        raise ZayaError(
            "recipe auto needs to know its inputs", "give --stats FILE, which `zaya calibrate` makes, or --data"
        )
    if calibration.choice is not None and calibration.choice.data == "-":
        raise ZayaError("auto reads its data twice, and standard input can be read once", "give a file to --data")
    folder = Path(calibration.tokenizer).expanduser() if calibration.tokenizer else plain.source.side_folder
    choice = calibration.choice or Choice()
    ids = sample(choice, folder, weights.architecture.vocab_size).ids
    few = ids[: max(1, TOKENS // choice.context)]
    record = {"statistics": str(calibration.statistics), "choice": asdict(choice), "tokens": few.numel()}
    facts = [__version__, torch.__version__, weights.device.type, source_files(plain.source.headers), record]
    say = report or (lambda _: None)
    target_folder = settle(destination)
    beside = target_folder.with_name(f"{target_folder.name}.auto")
    stamp = blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    with open_workspace(beside, stamp, resume=resume, force=force, every=calibration.every) as space:
        moments: Mapping[str, Moments]
        if calibration.statistics is not None:
            file = statistics_file(calibration.statistics)
            moments = load(file, weights.architecture, identity(plain.found)).moments
        else:
            passes = Pass(weights, weights.ends(), space, calibration.budget,
                          lambda done: say(Stage(done.stage, done.block, done.blocks)))  # fmt: skip
            moments = passes.measure(ids)[0]
        units = measure_units(
            weights, moments, few, budget=calibration.budget,
            report=lambda block, blocks: say(Stage("weighing", block, blocks)),
        )  # fmt: skip
    other = plain.plan.data_bytes - sum(unit.options[-1].nbytes for unit in units)
    chosen = choose(units, other, target)
    text = recipe_text(chosen, _observer(calibration), count)
    return Auto(recipe_of(text), text, chosen)


def _observer(calibration: Calibration) -> Observer:
    if calibration.choice is None:
        return IMATRIX
    try:
        kernel()
    except ZayaError:
        return IMATRIX
    return GPTQ


def explanation(auto: Auto) -> list[tuple[str, int, str, Unit, Option]]:
    """(role, block, scheme, the unit, the option) of every unit, the most harmed first."""
    rows = [
        (unit.role, unit.block, option.scheme or "full precision", unit, option)
        for unit, option in zip(auto.chosen.units, auto.chosen.options, strict=True)
    ]
    return sorted(rows, key=lambda row: -row[4].damage)
