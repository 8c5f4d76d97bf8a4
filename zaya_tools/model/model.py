"""A whole ZAYA1 model in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.model.block import Block, run_packed, run_sequences
from zaya_tools.model.ends import Ends
from zaya_tools.model.loading import build_block, build_ends, check_surplus
from zaya_tools.model.rotary import rotaries
from zaya_tools.model.state import State, Step
from zaya_tools.parameters import BLOCK_PREFIX


@dataclass(frozen=True)
class ZayaModel:
    """Blocks between the ends. Activations are of the ends' compute dtype, the residual stream is float32."""

    architecture: Architecture
    ends: Ends
    blocks: Iterable[Block]

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        tensors: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ZayaModel:
        """From all tensors by native name, cast to `dtype`; those that already have it are shared, not copied.

        Raises LayoutError naming tensors that are missing, surplus or of the wrong shape.
        """
        check_surplus(architecture, tensors)
        ends = build_ends(architecture, tensors, dtype=dtype, device=device).cast()
        blocks = []
        for index in range(architecture.blocks):
            prefix = BLOCK_PREFIX.format(block=index)
            local = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            blocks.append(build_block(architecture, index, local, dtype=dtype, device=device))
        return cls(architecture, ends, tuple(blocks))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.ends.device

    def state(self, slots: int, capacity: int) -> State:
        """Empty serving state for `slots` requests of up to `capacity` tokens."""
        return State(self.architecture, slots, capacity, self.ends.dtype, self.device)

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        """Final normed states [batch, tokens, hidden], in the compute dtype, of token ids [batch, tokens] int64."""
        tables = rotaries(self.architecture, torch.arange(ids.shape[1], device=ids.device))
        hidden, carried = self.ends.embed(ids), None
        for block, sliding in zip(self.blocks, self.architecture.sliding, strict=True):
            out = run_sequences(hidden, carried, block, tables[sliding])
            hidden, carried = out.hidden, out.router_states
        return self.ends.finish(hidden)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary], in the compute dtype, of token ids [batch, tokens] int64, in one pass."""
        return self.ends.logits(self.hidden(ids))

    @torch.no_grad()
    def advance(self, ids: Tensor, step: Step, state: State) -> Tensor:
        """Final normed states [rows, hidden] of a step's token ids [rows] int64, padding included; updates `state`."""
        tables = rotaries(self.architecture, step.positions)
        hidden, carried = self.ends.embed(ids), None
        for block, sliding, held in zip(self.blocks, self.architecture.sliding, state.blocks, strict=True):
            out = run_packed(hidden, carried, block, tables[sliding], step=step, state=held)
            hidden, carried = out.hidden, out.router_states
        return self.ends.finish(hidden)
