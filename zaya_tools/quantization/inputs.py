"""What goes into one site of a block right now: its Hessians, from a run of the block that stops where they are had."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zaya_tools.calibration.observing import See, Sites
from zaya_tools.errors import LayoutError
from zaya_tools.model.block import Block
from zaya_tools.model.experts import DenseExperts
from zaya_tools.model.streaming import Stream
from zaya_tools.parameters import Parameter, Role
from zaya_tools.quantization.hessian import Hessians


class _EnoughError(Exception):
    """What was wanted of this run of a block has been seen."""


@dataclass(frozen=True)
class _Last:
    """A layer that shows its inputs and ends the run."""

    see: See

    def __call__(self, x: Tensor) -> Tensor:
        self.see(0, x.flatten(0, -2))
        raise _EnoughError


@dataclass(frozen=True)
class _LastExperts:
    """Experts that show what goes into them, or into their down projections, and give nothing."""

    inner: DenseExperts
    see: See
    within: bool

    def __call__(self, expert: int, rows: Tensor) -> Tensor:
        self.see(expert, self.inner.inner(expert, rows) if self.within else rows)
        return torch.zeros_like(rows)


def gather(states: Stream, index: int, block: Block, where: Sites, site: int) -> Hessians:
    """Sums over all sequences of what goes into site number `site` of block `index`, as `block` computes now."""
    first = where[site][0]
    parts = first.shape[0] if first.role is Role.EXPERT else 1
    sums = Hessians(f"block {index}, input of {_named(where[site])}", parts, first.shape[-1], states.device)
    watched = _watched(block, site, sums.add)
    for _, _, run in states.chunks(index):
        try:
            run(watched)
        except _EnoughError:
            continue
    return sums


def _watched(block: Block, site: int, see: See) -> Block:
    attention = block.attention
    if site == 0:
        return replace(block, attention=replace(attention, projections=_Last(see)))
    if site == 1:
        return replace(block, attention=replace(attention, output=_Last(see)))
    if not isinstance(block.experts, DenseExperts):
        raise LayoutError("the checkpoint is quantized already", "quantize the one that it was made from")
    return replace(block, experts=_LastExperts(block.experts, see, within=site == 3))


def _named(site: tuple[Parameter, ...]) -> str:
    return "the attention projections" if len(site) > 1 else site[0].local.removesuffix(".weight").rpartition(".")[2]
