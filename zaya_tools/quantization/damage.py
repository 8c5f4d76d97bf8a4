"""What each part of a model suffers from each scheme: how far the model's words move when it alone is quantized.

A unit is the attention or the experts of one block, which is what vLLM can give a scheme of its own. Data go through
the model once. At every block each of its units is quantized alone, scheme by scheme. A copy of the states takes the
way through the first of them and goes on through the blocks after it as they are: its KL from the unchanged model at
the end is that scheme's damage. Damage grows with the square of a small error, so each other scheme has that KL times
the ratio of how far the two moved what the block gives. Weights are read once, whatever the number of units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.calibration.broken import explaining
from zaya_tools.calibration.observing import sites
from zaya_tools.calibration.run import check_finite
from zaya_tools.calibration.workspace import Workspace
from zaya_tools.dtypes import SIZES
from zaya_tools.errors import NonFiniteError
from zaya_tools.evaluation import head
from zaya_tools.model.block import Block
from zaya_tools.model.loading import build_block
from zaya_tools.model.streaming import BUDGET, Stream
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import Parameter, Role
from zaya_tools.quantization.resolve import divides, matrices, unfit
from zaya_tools.quantization.scheme import SCHEMES, Scheme
from zaya_tools.quantization.trial import Inputs, alone

CANDIDATES = ("int4", "int4-g32", "int8")
"""Schemes that are tried, beside full precision. INT8 and not FP8: its activations cost a fraction."""
ROLES = {"attention": Role.ATTENTION, "experts": Role.EXPERT}
STAGE = "weighing"
_UNITS, _FOUND = "chosen-units.json", "chosen-damages.json"

Report = Callable[[str, int, int], None]
"""Takes the stage, what was just done of it, and how many there are."""


@dataclass(frozen=True)
class Option:
    """A scheme by name (None: full precision), the bytes that a unit takes in it, and its damage in nats a token."""

    scheme: str | None
    nbytes: int
    damage: float


@dataclass(frozen=True)
class Unit:
    """The attention or the experts of one block, and what may be done to it, full precision last."""

    role: str
    block: int
    options: tuple[Option, ...]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Unit:
        """The unit that `asdict` made these plain values of."""
        return cls(value["role"], value["block"], tuple(Option(**option) for option in value["options"]))


@dataclass
class _Trial:
    """How far each scheme moved a unit's block, and the copy of the states that took the way through the first."""

    moved: list[float]
    states: Stream


def units_of(weights: Weights, tensor_parallel: int = 1) -> tuple[Unit, ...]:
    """The units of an unquantized model with the options that fit them; nothing is known of damages yet."""

    def fits(scheme: Scheme, parameter: Parameter) -> bool:
        return unfit(scheme, parameter) is None and divides(scheme, parameter, tensor_parallel)

    found = []
    for index in range(weights.architecture.blocks):
        for role in ROLES:
            chosen = _parameters(weights.architecture, index, role)
            fitting = [n for n in CANDIDATES if all(fits(SCHEMES[n], p) for p in chosen)]
            sizes = [sum(_nbytes(p, scheme, weights) for p in chosen) for scheme in (*map(SCHEMES.get, fitting), None)]
            options = zip((*fitting, None), sizes, strict=True)
            found.append(Unit(role, index, tuple(Option(name, nbytes, 0.0) for name, nbytes in options)))
    return tuple(found)


def measure_units(
    weights: Weights, units: Sequence[Unit], inputs: Inputs, ids: Tensor, space: Workspace, *, budget: int = BUDGET,
    report: Report | None = None,
) -> tuple[Unit, ...]:  # fmt: skip
    """The units with their damages on token ids [sequences, tokens].

    States, and damages once found, are kept in `space`: after a kill the same call goes on there and gives the same
    numbers. NonFiniteError, naming the block, for activations and damages that are not finite.
    """
    known = space.read(_UNITS)
    if known is None:
        weighed = _weigh(weights, units, inputs, ids, space, budget, report or (lambda *_: None))
        known = {"units": [asdict(unit) for unit in weighed]}
        space.write(_UNITS, known)
    space.forget_states(STAGE)
    return tuple(map(Unit.of, known["units"]))


def copies(units: Sequence[Unit]) -> int:
    """Copies of the states that measuring these units takes, at the most at a time."""
    return 3 + sum(len(unit.options) > 1 for unit in units)


def _weigh(
    weights: Weights, units: Sequence[Unit], inputs: Inputs, ids: Tensor, space: Workspace, budget: int, report: Report
) -> Iterator[Unit]:
    a = weights.architecture
    reference = Stream(weights, weights.ends(), ids, budget=budget // copies(units))
    trials: dict[int, _Trial] = {}
    done = -1
    record = space.saved(STAGE)
    if record is not None:
        trials = {int(number): _Trial(moved, reference.fork()) for number, moved in record["facts"]["moved"].items()}
        done = space.load_states(STAGE, _streams(reference, trials, inputs))
    for index in range(done + 1, a.blocks):
        with explaining(weights, index):
            tensors = weights.dense(index)
            plain = build_block(a, index, tensors, dtype=weights.dtype, device=weights.device, cast_experts=False)
            for trial in trials.values():
                trial.states.run(index, plain)
            before = reference.fork()
            reference.run(index, plain)
            for number, unit in enumerate(units):
                if unit.block == index and len(unit.options) > 1:
                    trials[number] = _tried(weights, unit, tensors, plain, inputs, before, reference)
            check_finite(reference, index)  # after what could name the expert
            inputs.advance(index, plain)
        _save(space, index, reference, trials, inputs)
        report(STAGE, index, a.blocks)
    found: dict[str, float] = space.read(_FOUND) or {}
    for order, (number, trial) in enumerate(trials.items()):
        if str(number) not in found:
            found[str(number)] = _divergence(trial.states, reference, weights, ids, units[number])
            space.write(_FOUND, found)
            _save(space, a.blocks - 1, reference, trials, inputs)
            report("comparing", order, len(trials))
    for number, unit in enumerate(units):
        damages = _damages(trials[number].moved, found[str(number)]) if number in trials else []
        options = zip(unit.options, [*damages, 0.0], strict=True)
        yield replace(unit, options=tuple(replace(option, damage=damage) for option, damage in options))


def _streams(reference: Stream, trials: Mapping[int, _Trial], inputs: Inputs) -> dict[str, Stream]:
    return {"reference": reference, **inputs.streams, **{str(n): trial.states for n, trial in trials.items()}}


def _save(space: Workspace, block: int, reference: Stream, trials: Mapping[int, _Trial], inputs: Inputs) -> None:
    facts = {"moved": {str(number): trial.moved for number, trial in trials.items()}}
    space.save_states(STAGE, block, _streams(reference, trials, inputs), facts=facts)


def _tried(
    weights: Weights, unit: Unit, tensors: Mapping[str, Tensor], plain: Block, inputs: Inputs, before: Stream,
    after: Stream,
) -> _Trial:  # fmt: skip
    """Quantize a unit alone by each scheme; `before` and `after` are the states around the block as it is."""
    a, index = weights.architecture, unit.block
    chosen = _parameters(a, index, unit.role)
    hessians = inputs.hessians(index, plain, chosen)
    moved: list[float] = []
    kept = None
    for name in (option.scheme for option in unit.options[:-1]):
        assert name is not None
        states = before.fork()
        states.run(index, alone(weights, index, tensors, chosen, SCHEMES[name], hessians, inputs.observer))
        moved.append(_distance(states, after))
        kept = kept or states
    assert kept is not None
    return _Trial(moved, kept)


def _distance(states: Stream, reference: Stream) -> float:
    """Mean square by which hidden states are apart."""
    total = 0.0
    for start in range(0, states.hidden.shape[0], states.step):
        stop = min(start + states.step, states.hidden.shape[0])
        mine, theirs = (s.hidden.read(start, stop) for s in (states, reference))
        total += float((mine - theirs).double().square().sum())
    return total / prod(states.hidden.shape)


def _damages(moved: Sequence[float], first: float) -> list[float]:
    """The damages of all schemes of a unit from that of the first."""
    return [first, *(first * other / moved[0] if moved[0] else 0.0 for other in moved[1:])]


def _parameters(a: Architecture, index: int, role: str) -> list[Parameter]:
    return [p for site in sites(a, index) for p in site if p.role is ROLES[role]]


def _nbytes(parameter: Parameter, scheme: Scheme | None, weights: Weights) -> int:
    bound = weights.found.bound[parameter.name][0]
    dtype = bound.tensor.dtype if bound.tensor is not None else "BF16"
    if scheme is None:
        return parameter.numel * SIZES[dtype]
    count, columns = matrices(parameter), parameter.shape[-1]
    rows = parameter.numel // columns // count
    return count * sum(prod(s.shape) * SIZES[s.dtype] for s in scheme.stored(rows, columns, dtype))


def _divergence(states: Stream, reference: Stream, weights: Weights, ids: Tensor, unit: Unit) -> float:
    """Mean KL from the reference's next-token distributions, over all tokens."""
    ends = weights.ends()
    total, count = 0.0, 0
    for start in range(0, len(ids), states.step):
        stop = min(start + states.step, len(ids))
        mine, theirs = (
            ends.finish(s.hidden.read(start, stop).to(weights.device)).flatten(0, 1) for s in (states, reference)
        )
        compared = head.compare(ends, mine, ends, theirs, ids[start:stop].flatten())
        total += float(compared.kl.double().sum())
        count += compared.kl.numel()
    if not math.isfinite(total):
        raise NonFiniteError(
            f"block {unit.block}: with its {unit.role} in {unit.options[0].scheme} the model overflows",
            "check the source with `zaya validate`, or give a recipe that leaves that block alone",
        )
    return total / count
