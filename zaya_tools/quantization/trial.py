"""A block of which one part is quantized, as vLLM would compute it, and what is known of its inputs for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.observing import sites
from zaya_tools.model.block import Block
from zaya_tools.model.experts import DenseExperts
from zaya_tools.model.linear import Linear
from zaya_tools.model.loading import build_block
from zaya_tools.model.streaming import Stream
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import Parameter, Role
from zaya_tools.quantization.fit import Task, fit, restored
from zaya_tools.quantization.hessian import sketched
from zaya_tools.quantization.inputs import gather
from zaya_tools.quantization.kernels import nearest
from zaya_tools.quantization.resolve import matrices
from zaya_tools.quantization.scheme import GPTQ, IMATRIX, Activations, Kind, Observer, Scheme

_TOP = {Kind.INT8: 127.0, Kind.FLOAT8: 448.0}


class Inputs(Protocol):
    """What is known of the inputs of a block, and how weights are rounded for them.

    `streams` are states that go along, by name; they are the caller's to keep and to put back.
    """

    @property
    def observer(self) -> Observer:
        """How weights are rounded."""

    @property
    def streams(self) -> Mapping[str, Stream]:
        """States that stand before the block that is asked for."""

    def hessians(self, index: int, plain: Block, chosen: Sequence[Parameter]) -> dict[str, Tensor]:
        """Second moments [matrices, columns, columns] of the inputs of some parameters of a block, by name."""

    def advance(self, index: int, plain: Block) -> None:
        """Go on to the block after this one."""


@dataclass(frozen=True)
class Recorded:
    """Inputs as the statistics of a calibration know them."""

    weights: Weights
    moments: Mapping[str, Moments]

    @property
    def observer(self) -> Observer:
        """Rounding for what statistics know."""
        return IMATRIX

    @property
    def streams(self) -> Mapping[str, Stream]:
        """None: all that is needed is in a file."""
        return {}

    def hessians(self, index: int, plain: Block, chosen: Sequence[Parameter]) -> dict[str, Tensor]:
        """From sketches."""
        found: dict[str, Tensor] = {}
        for number, site in enumerate(sites(self.weights.architecture, index)):
            if site[0] in chosen:
                known = self.moments[site[0].name]
                own = sketched(known, shared=number != 3, device=self.weights.device)
                found |= {parameter.name: own for parameter in site}
        return found

    def advance(self, index: int, plain: Block) -> None:
        """Nothing moves."""


@dataclass(frozen=True)
class Followed:
    """Inputs as data show them that run along, which GPTQ needs."""

    states: Stream

    @property
    def observer(self) -> Observer:
        """GPTQ."""
        return GPTQ

    @property
    def streams(self) -> Mapping[str, Stream]:
        """The states of all data."""
        return {"data": self.states}

    def hessians(self, index: int, plain: Block, chosen: Sequence[Parameter]) -> dict[str, Tensor]:
        """From runs of the block."""
        where = sites(self.states.architecture, index)
        found: dict[str, Tensor] = {}
        for number, site in enumerate(where):
            if site[0] in chosen:
                own = gather(self.states, index, plain, where, number).means(shared=number != 3)
                found |= {parameter.name: own for parameter in site}
        return found

    def advance(self, index: int, plain: Block) -> None:
        """Run the block."""
        self.states.run(index, plain)


def alone(
    weights: Weights, index: int, tensors: Mapping[str, Tensor], chosen: Sequence[Parameter], scheme: Scheme,
    hessians: Mapping[str, Tensor], observer: Observer,
) -> Block:  # fmt: skip
    """Block `index` of `tensors`, by native local name, with the parameters `chosen` in `scheme` and all else as is."""
    changed = dict(tensors)
    for parameter in chosen:
        weight = tensors[parameter.local]
        stacked = weight if weight.ndim == 3 else weight[None]
        task = Task(parameter.name, stacked, matrices(parameter) // len(stacked), scheme, observer, weight.dtype)
        stored = [made.tensors for made in fit(task, hessians[parameter.name])]
        changed[parameter.local] = restored(task, stored, weights.dtype).view(weight.shape)
    a = weights.architecture
    block = build_block(a, index, changed, dtype=weights.dtype, device=weights.device, cast_experts=False)
    return _rounding(block, chosen[0].role, scheme)


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


def _rounding(block: Block, role: Role, scheme: Scheme) -> Block:
    if scheme.activations is not Activations.TOKEN:
        return block
    if role is Role.EXPERT:
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
