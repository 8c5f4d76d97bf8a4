"""What each part of a model suffers from each scheme: how far its output moves, and how far the model's words move.

A unit is the attention or the experts of one block, which is what vLLM can give a scheme of its own. Data go through
the model once. At every block each of its units is quantized alone and a copy of the states takes that way; all copies
then go through the blocks after it as they are. At the end each copy's KL from the unchanged model is the unit's
damage. Weights are read once, whatever the number of units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.observing import sites
from zaya_tools.dtypes import SIZES
from zaya_tools.evaluation import head
from zaya_tools.model.block import Block
from zaya_tools.model.experts import DenseExperts
from zaya_tools.model.linear import Linear
from zaya_tools.model.loading import build_block
from zaya_tools.model.streaming import BUDGET, Stream
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import Parameter, Role
from zaya_tools.quantization.fit import Task, fit, restored
from zaya_tools.quantization.hessian import sketched
from zaya_tools.quantization.kernels import nearest
from zaya_tools.quantization.resolve import matrices, unfit
from zaya_tools.quantization.scheme import IMATRIX, SCHEMES, Activations, Kind, Scheme

CANDIDATES = ("int4", "int4-g32", "int8")
"""Schemes that are tried, beside full precision. INT8 and not FP8: its activations cost a fraction."""
ROLES = {"attention": Role.ATTENTION, "experts": Role.EXPERT}
_TOP = {Kind.INT8: 127.0, Kind.FLOAT8: 448.0}

Report = Callable[[int, int], None]


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


@dataclass
class _Case:
    """A unit in one scheme: the copy of the states that went through it, and the relative error of its outputs."""

    scheme: Scheme
    states: Stream | None
    error: float


def measure_units(
    weights: Weights, moments: Mapping[str, Moments], ids: Tensor, *, budget: int = BUDGET, report: Report | None = None
) -> tuple[Unit, ...]:
    """The units of an unquantized model with their options, from token ids [sequences, tokens] and statistics.

    Schemes that leave activations alone are all measured by the first of them: damage grows with the square of a small
    error, so the others have its KL times the ratio of the errors.
    """
    a = weights.architecture
    ends = weights.ends()
    reference = Stream(weights, ends, ids, budget=budget // (1 + 4 * a.blocks))
    cases: dict[tuple[int, str], list[_Case]] = {}
    for index in range(a.blocks):
        tensors = weights.dense(index)
        plain = build_block(a, index, tensors, dtype=weights.dtype, device=weights.device, cast_experts=False)
        for own in cases.values():
            for case in own:
                if case.states is not None:
                    case.states.run(index, plain)
        for role in ROLES:
            cases[index, role] = _try_all(weights, index, role, tensors, moments, reference)
        reference.run(index, plain)
        if report is not None:
            report(index, a.blocks)
    units = []
    for (index, role), own in cases.items():
        chosen = _parameters(a, index, role)
        options = [
            Option(case.scheme.name, sum(_nbytes(p, case.scheme, weights) for p in chosen), damage)
            for case, damage in zip(own, _damages(own, reference, weights, ids), strict=True)
        ]
        units.append(Unit(role, index, (*options, Option(None, sum(_nbytes(p, None, weights) for p in chosen), 0.0))))
    return tuple(units)


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


def _try_all(
    weights: Weights, index: int, role: str, tensors: Mapping[str, Tensor], moments: Mapping[str, Moments],
    reference: Stream,
) -> list[_Case]:  # fmt: skip
    a = weights.architecture
    chosen = _parameters(a, index, role)
    schemes = [SCHEMES[name] for name in CANDIDATES if all(unfit(SCHEMES[name], p) is None for p in chosen)]
    found: list[_Case] = []
    for scheme in schemes:
        changed, error = _quantized(chosen, scheme, tensors, moments, weights)
        alone = scheme.activations is Activations.NONE
        measured = not alone or not any(case.scheme.activations is Activations.NONE for case in found)
        states = None
        if measured:
            states = reference.fork()
            own = {**tensors, **changed}
            block = build_block(a, index, own, dtype=weights.dtype, device=weights.device, cast_experts=False)
            states.run(index, _rounding(block, role, scheme))
        found.append(_Case(scheme, states, error))
    return found


def _quantized(
    chosen: list[Parameter], scheme: Scheme, tensors: Mapping[str, Tensor], moments: Mapping[str, Moments],
    weights: Weights,
) -> tuple[dict[str, Tensor], float]:  # fmt: skip
    """What parameters become, by native local name, and the mean relative square error of their outputs."""
    changed: dict[str, Tensor] = {}
    errors = []
    down = sites(weights.architecture, chosen[0].block or 0).down
    for parameter in chosen:
        weight = tensors[parameter.local]
        stacked = weight if weight.ndim == 3 else weight[None]
        known = moments[parameter.name]
        hessians = sketched(known, shared=parameter not in down, device=weights.device)
        parts = matrices(parameter) // len(stacked)
        task = Task(parameter.name, stacked, parts, scheme, IMATRIX, weight.dtype)
        became = restored(task, [made.tensors for made in fit(task, hessians)])
        gap = stacked.float() - became
        lost, whole = (float(((w @ hessians) * w).sum()) for w in (gap, stacked.float()))
        errors.append(lost / whole if whole else 0.0)
        changed[parameter.local] = became.view(weight.shape)
    return changed, sum(errors) / len(errors)


@dataclass(frozen=True)
class _RoundedInputs:
    """A layer whose inputs are rounded token by token, as kernels with dynamic scales do."""

    inner: Linear
    kind: Kind

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(_round(x, self.kind))


@dataclass(frozen=True)
class _RoundedExperts:
    inner: DenseExperts
    kind: Kind

    def __call__(self, expert: int, rows: Tensor) -> Tensor:
        middle = self.inner.inner(expert, _round(rows, self.kind))
        return self.inner.outer(expert, _round(middle, self.kind))


def _round(x: Tensor, kind: Kind) -> Tensor:
    values = x.float()
    scale = (values.abs().amax(-1, keepdim=True) / _TOP[kind]).clamp_min(torch.finfo(torch.float32).tiny)
    return (nearest(values / scale, kind) * scale).to(x.dtype)


def _rounding(block: Block, role: str, scheme: Scheme) -> Block:
    if scheme.activations is not Activations.TOKEN:
        return block
    if role == "experts":
        assert isinstance(block.experts, DenseExperts)
        return replace(block, experts=_RoundedExperts(block.experts, scheme.kind))
    attention = block.attention
    return replace(
        block,
        attention=replace(
            attention,
            projections=_RoundedInputs(attention.projections, scheme.kind),
            output=_RoundedInputs(attention.output, scheme.kind),
        ),
    )


def _damages(own: list[_Case], reference: Stream, weights: Weights, ids: Tensor) -> list[float]:
    direct = [_divergence(case.states, reference, weights, ids) if case.states is not None else None for case in own]
    measured = [(case, kl) for case, kl in zip(own, direct, strict=True) if kl is not None]
    alone = next(((case, kl) for case, kl in measured if case.scheme.activations is Activations.NONE), None)
    found = []
    for case, kl in zip(own, direct, strict=True):
        if kl is not None:
            found.append(kl)
        else:
            assert alone is not None
            found.append(alone[1] * case.error / alone[0].error if alone[0].error else 0.0)
    return found


def _divergence(states: Stream, reference: Stream, weights: Weights, ids: Tensor) -> float:
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
    return total / count
