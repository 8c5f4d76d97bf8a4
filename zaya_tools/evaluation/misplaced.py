"""Whose values a unit holds when they are not its own: swapped halves, permuted experts, neighbouring blocks.

Expert matrices are square, so a swap leaves every name, shape and count as it should be: only contents tell.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.comparison import Outcome, Side
from zaya_tools.evaluation.findings import Finding
from zaya_tools.evaluation.units import Unit, all_units

CHECK = "weights"
SAMPLE = 4
"""Rows of each unit that are compared: values of different matrices agree nowhere, so a few decide."""

ELSEWHERE = 256
"""Suspects that are looked for in other blocks too; where more are wrong, the first ones tell."""


def locate(suspects: Iterable[Outcome], model: Side, reference: Side) -> dict[Unit, Unit]:
    """For each suspect the unit of the reference whose values it holds; those that hold nobody's are absent.

    Looked at are units of the same role and shape, in the same block first, then those of the same place in others.
    """
    everything = all_units(reference.opened.found.architecture)
    by_block: dict[object, list[Unit]] = defaultdict(list)
    by_place: dict[object, list[Unit]] = defaultdict(list)
    for unit in everything:
        by_block[unit.parameter.block, unit.parameter.role, unit.rows, unit.columns].append(unit)
        by_place[_place(unit)].append(unit)

    @lru_cache(maxsize=2048)
    def sample(unit: Unit) -> Tensor | None:
        try:
            return reference.values(unit, 0, min(SAMPLE, unit.rows))
        except LayoutError:
            return None

    moves: dict[Unit, Unit] = {}
    for number, outcome in enumerate(suspects):
        unit = outcome.unit
        if outcome.zeros or outcome.bad is not None:
            continue
        mine = model.values(unit, 0, min(SAMPLE, unit.rows))
        near = by_block[unit.parameter.block, unit.parameter.role, unit.rows, unit.columns]
        groups = [near, by_place[_place(unit)]] if number < ELSEWHERE else [near]
        for group in groups:
            others = ((_sqnr(mine, values), other) for other in group
                      if other != unit and (values := sample(other)) is not None)  # fmt: skip
            best = max(others, key=lambda entry: entry[0], default=None)
            if best is not None and best[0] >= outcome.limit.fail:
                moves[unit] = best[1]
                break
    return moves


def _place(unit: Unit) -> tuple[object, ...]:
    return (unit.parameter.local, unit.expert, unit.half, unit.rows, unit.columns)


def _sqnr(values: Tensor, wanted: Tensor) -> float:
    signal, noise = wanted.double().square().sum(), (values.double() - wanted.double()).square().sum()
    if noise == 0:
        return float("inf") if signal > 0 else -300.0
    return float(10 * torch.log10(signal / noise)) if signal > 0 else -300.0


def describe(moves: Mapping[Unit, Unit]) -> Iterator[Finding]:
    """Moves in words: one finding for a swap of the same kind within a block, and one for each other move."""
    halves: dict[tuple[int | None, tuple[str, ...]], list[Unit]] = defaultdict(list)
    experts: dict[tuple[int | None, int, int], list[Unit]] = defaultdict(list)
    single: dict[tuple[object, ...], list[tuple[Unit, Unit]]] = defaultdict(list)
    told: set[Unit] = set()
    for unit, source in moves.items():
        block = unit.parameter.block
        same_block = block == source.parameter.block
        if moves.get(source) == unit:
            if source in told:
                continue
            told.add(unit)
            if same_block and unit.expert is not None and unit.expert == source.expert:
                halves[block, (unit.half or "", source.half or "")] += [unit, source]
                continue
            if same_block and unit.half is not None and unit.half == source.half:
                pair = sorted((unit.expert or 0, source.expert or 0))
                experts[block, pair[0], pair[1]] += [unit, source]
                continue
            names = (unit.name, source.name)
            yield Finding(CHECK, "fail", f"{unit.label} and {source.label} are swapped", names)
            continue
        key = (unit.expert, source.expert) if unit.half == source.half and unit.expert is not None else (unit,)
        single[block, source.parameter.block, *key].append((unit, source))
    for (block, (first, second)), units in halves.items():
        whose = [str(unit.expert) for unit in units[::2]]
        yield Finding(CHECK, "fail", f"block {block}: the {first} and {second} halves of "
                      f"{_experts(whose)} are swapped", tuple(unit.name for unit in units))  # fmt: skip
    for (block, low, high), units in experts.items():
        what = ", ".join(dict.fromkeys(str(unit.half) for unit in units))
        yield Finding(CHECK, "fail", f"block {block}: experts {low} and {high} are swapped ({what})",
                      tuple(unit.name for unit in units))  # fmt: skip
    for pairs in single.values():
        yield _held(pairs)


def _experts(numbers: list[str]) -> str:
    return f"expert {numbers[0]}" if len(numbers) == 1 else f"experts {', '.join(numbers)}"


def _held(pairs: list[tuple[Unit, Unit]]) -> Finding:
    unit, source = pairs[0]
    names = tuple(unit.name for unit, _ in pairs)
    if len(pairs) == 1:
        return Finding(CHECK, "fail", f"{unit.label} holds the values of {source.label}", names)
    what = ", ".join(str(unit.half) for unit, _ in pairs)
    return Finding(
        CHECK,
        "fail",
        f"block {unit.parameter.block}: expert {unit.expert} holds the values of block {source.parameter.block}'s "
        f"expert {source.expert} ({what})",
        names,
    )
