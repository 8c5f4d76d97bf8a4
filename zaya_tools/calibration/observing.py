"""A block that computes as ever and lets what goes into its quantizable layers be seen on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.calibration.moments import OVERFLOW, Gathering, Moments
from zaya_tools.errors import LayoutError, NonFiniteError
from zaya_tools.model.block import Block
from zaya_tools.model.experts import DenseExperts
from zaya_tools.model.linear import Linear
from zaya_tools.parameters import Parameter, Role, parameters

See = Callable[[int, Tensor], None]
"""(part, its inputs [rows, width]): the part is the expert, 0 where there is one layer."""


class Sites(NamedTuple):
    """Where inputs can be seen, and which parameters share them: two in attention, two in the experts."""

    projections: tuple[Parameter, ...]
    output: tuple[Parameter, ...]
    gate_up: tuple[Parameter, ...]
    down: tuple[Parameter, ...]


def sites(architecture: Architecture, block: int) -> Sites:
    """The sites of a block, from the table: its matrices in the roles that can be quantized."""
    found: dict[str, list[Parameter]] = {"qkv_proj": [], "o_proj": [], "gate_up_proj": [], "down_proj": []}
    for parameter in parameters(architecture):
        if parameter.block != block or parameter.role not in (Role.ATTENTION, Role.EXPERT) or len(parameter.shape) < 2:
            continue
        found[next(part for part in parameter.local.split(".") if part in found)].append(parameter)
    return Sites(*(tuple(group) for group in found.values()))


@dataclass(frozen=True)
class Seen:
    """A linear layer whose inputs are shown before it computes."""

    inner: Linear
    see: See

    def __call__(self, x: Tensor) -> Tensor:
        """What the layer gives."""
        self.see(0, x.flatten(0, -2))
        return self.inner(x)


@dataclass(frozen=True)
class SeenExperts:
    """Experts whose inputs, and inner activations, are shown on the way. What they give is checked to be finite."""

    inner: DenseExperts
    outer: See
    within: See
    name: str

    def __call__(self, expert: int, rows: Tensor) -> Tensor:
        """What the expert gives."""
        self.outer(expert, rows)
        middle = self.inner.inner(expert, rows)
        self.within(expert, middle)
        out = self.inner.outer(expert, middle)
        if not bool(out.abs().amax().isfinite()):
            raise NonFiniteError(f"{self.name}, expert {expert}: its output is NaN or infinite", OVERFLOW)
        return out


class Entropy:
    """The router's last layer, whose softmax is measured: the mean entropy of a token's choice, in nats."""

    def __init__(self, inner: Linear) -> None:
        self._inner = inner
        self._sum, self._count = 0.0, 0

    def __call__(self, x: Tensor) -> Tensor:
        """What the layer gives."""
        logits = self._inner(x)
        logs = logits.float().log_softmax(-1)
        self._sum -= float((logs.exp() * logs).sum(dtype=torch.float64))
        self._count += logits.shape[:-1].numel()
        return logits

    @property
    def mean(self) -> float:
        """Nats a token; 0 before there was one."""
        return self._sum / max(1, self._count)


class Observer:
    """Gathers the moments of one block, by parameter."""

    def __init__(self, architecture: Architecture, index: int, block: Block, device: torch.device) -> None:
        experts = block.experts
        if not isinstance(experts, DenseExperts):
            raise LayoutError("the checkpoint is quantized already", "calibrate the one that it was made from")
        self._sites = sites(architecture, index)
        self._gathered = [
            Gathering(f"block {index}, input of {_shared(site)}", _parts(site[0]), site[0].shape[-1], device)
            for site in self._sites
        ]
        projections, output, gate_up, down = self._gathered
        self._entropy = Entropy(block.router.out)
        self.block = replace(
            block,
            attention=replace(
                block.attention,
                projections=Seen(block.attention.projections, projections.add),
                output=Seen(block.attention.output, output.add),
            ),
            router=replace(block.router, out=self._entropy),
            experts=SeenExperts(experts, gate_up.add, down.add, f"block {index}"),
        )

    @property
    def entropy(self) -> float:
        """The router's mean entropy, nats a token."""
        return self._entropy.mean

    def moments(self) -> dict[str, Moments]:
        """What was gathered, by parameter name; parameters that share an input share it here."""
        found: dict[str, Moments] = {}
        for site, gathered in zip(self._sites, self._gathered, strict=True):
            found |= dict.fromkeys((parameter.name for parameter in site), gathered.moments())
        return found


def _parts(parameter: Parameter) -> int:
    return parameter.shape[0] if parameter.role is Role.EXPERT else 1


def _shared(site: tuple[Parameter, ...]) -> str:
    return "the attention projections" if len(site) > 1 else site[0].local.removesuffix(".weight").rpartition(".")[2]
