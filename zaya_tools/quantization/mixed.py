"""Mixed precision under a budget: which unit gets which scheme, so that the model is least harmed at a given size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import yaml

from zaya_tools.errors import ZayaError
from zaya_tools.quantization.damage import Option, Unit
from zaya_tools.quantization.recipe import AUTO, Recipe, parse_recipe
from zaya_tools.quantization.scheme import Observer

_STEPS, _EXACT = 1 << 13, 1 << 17


@dataclass(frozen=True)
class Chosen:
    """The option of every unit, the bytes that the checkpoint has with them, and the sum of their damages."""

    units: tuple[Unit, ...]
    options: tuple[Option, ...]
    nbytes: int
    damage: float


def choose(units: Sequence[Unit], other: int, target: int) -> Chosen:
    """The options with the least sum of damages in at most `target` bytes, of which `other` are not the units'.

    Damages of small errors in different places add up nearly. A multiple-choice knapsack, solved by dynamic
    programming over the room between the smallest and the largest choice, in steps that divide all sizes where those
    are few enough; else sizes are rounded up to 8,192 steps, so that the target is kept. ZayaError where even the
    smallest options are too large together.
    """
    least = [min(option.nbytes for option in unit.options) for unit in units]
    room = target - other - sum(least)
    if room < 0:
        raise ZayaError(
            f"the smallest checkpoint of these schemes has {other + sum(least):,} bytes, {target:,} are asked for",
            "raise --target-size or --target-bits",
        )
    costs = [option.nbytes - low for unit, low in zip(units, least, strict=True) for option in unit.options]
    most = sum(max(option.nbytes for option in unit.options) - low for unit, low in zip(units, least, strict=True))
    room = min(room, most)
    step = gcd(*costs) or 1
    if room // step > _EXACT:
        # Where everything fits, rounding up must not be what keeps something out.
        room += len(units) * -(-room // _STEPS) if room == most else 0
        step = -(-room // _STEPS)
    width = room // step + 1
    best = np.zeros(width)
    picks = []
    for unit, low in zip(units, least, strict=True):
        after = np.full(width, np.inf)
        pick = np.zeros(width, dtype=np.int64)
        for number, option in enumerate(unit.options):
            cost = -(-(option.nbytes - low) // step)
            if cost >= width:
                continue
            tried = np.full(width, np.inf)
            tried[cost:] = best[: width - cost] + option.damage
            better = tried < after
            after[better], pick[better] = tried[better], number
        best = after
        picks.append(pick)
    place = width - 1
    options: list[Option] = []
    for unit, low, pick in zip(reversed(units), reversed(least), reversed(picks), strict=True):
        option = unit.options[int(pick[place])]
        options.insert(0, option)
        place -= -(-(option.nbytes - low) // step)
    nbytes = other + sum(option.nbytes for option in options)
    return Chosen(tuple(units), tuple(options), nbytes, sum(option.damage for option in options))


def recipe_text(chosen: Chosen, observer: Observer, parameters: int) -> str:
    """The choice as a recipe file: YAML that `zaya quantize --recipe` takes."""
    bits = 8 * chosen.nbytes / parameters
    rules = []
    for role in dict.fromkeys(unit.role for unit in chosen.units):
        own: dict[str, list[int]] = {}
        for unit, option in zip(chosen.units, chosen.options, strict=True):
            if unit.role == role and option.scheme is not None:
                own.setdefault(option.scheme, []).append(unit.block)
        rules += [{"role": role, "scheme": scheme, "blocks": _ranges(blocks)} for scheme, blocks in own.items()]
    document = {
        "name": AUTO,
        "description": f"Chosen block by block for {bits:.2f} bits a weight by what each scheme costs there.",
        "runs_on": "vLLM on Turing and newer.",
        "observer": observer,
        "rules": rules,
    }
    return yaml.safe_dump(document, sort_keys=False, width=120)


def recipe_of(text: str) -> Recipe:
    """The recipe that a text of `recipe_text` is."""
    return parse_recipe(text, AUTO)


def _ranges(blocks: Sequence[int]) -> list[str]:
    found: list[list[int]] = []
    for block in sorted(blocks):
        if found and block == found[-1][1] + 1:
            found[-1][1] = block
        else:
            found.append([block, block])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]
