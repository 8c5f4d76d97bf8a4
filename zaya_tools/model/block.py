"""One block: attention and MoE sublayers on the float32 residual stream, for whole sequences and for packed batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_tools.model.attention import attend, attend_decodes
from zaya_tools.model.cca import Convolutions, Projected, mix_packed, mix_sequence, normalise
from zaya_tools.model.experts import ExpertFunction, run_experts
from zaya_tools.model.linear import Linear
from zaya_tools.model.norm import ResidualScale, rms_norm
from zaya_tools.model.rotary import Rotary
from zaya_tools.model.router import RouterWeights, Routing, route
from zaya_tools.model.state import BlockState, Step


@dataclass(frozen=True)
class AttentionWeights:
    """CCA attention. `projections` gives query, key, current and delayed value side by side, of these `widths`.

    `delayed_zero` [kv heads * d / 2] is the delayed value of a zero vector, `temperature` [kv heads] is float32, and
    `window` is the number of tokens attended to, itself included, or None.
    """

    projections: Linear
    widths: tuple[int, int, int, int]
    delayed_zero: Tensor
    convolutions: Convolutions
    temperature: Tensor
    output: Linear
    window: int | None

    def project(self, x: Tensor) -> Projected:
        """Project x [..., hidden] of the compute dtype."""
        query, key, current, delayed = torch.split(self.projections(x), list(self.widths), dim=-1)
        return Projected(query, key, current, delayed, self.delayed_zero)


@dataclass(frozen=True)
class Block:
    """All weights of one block. Norms [hidden] are float32; `dtype` is that of activations (the compute dtype)."""

    attention_norm: Tensor
    attention: AttentionWeights
    attention_residual: ResidualScale
    moe_norm: Tensor
    router: RouterWeights
    experts: ExpertFunction
    expert_count: int
    moe_residual: ResidualScale
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True)
class BlockOutput:
    """`hidden` [..., hidden] float32 and `router_states` [..., router width] for the next block, and the routing."""

    hidden: Tensor
    router_states: Tensor
    routing: Routing


def sequence_attention(x: Tensor, weights: AttentionWeights, rotary: Rotary) -> Tensor:
    """Attend within each of the sequences x [batch, tokens, hidden], normed; gives the same shape."""
    query, key, value = mix_sequence(weights.project(x), weights.convolutions)
    query, key = normalise(query, key, weights.temperature)
    heads = (rotary(query, x.dtype).transpose(1, 2), rotary(key, x.dtype).transpose(1, 2), value.transpose(1, 2))
    return weights.output(attend(*heads, weights.window).transpose(1, 2).flatten(2))


def packed_attention(x: Tensor, weights: AttentionWeights, rotary: Rotary, step: Step, state: BlockState) -> Tensor:
    """Attend from the normed rows x [rows, hidden] of a step to their requests' cache, updating `state`; same shape."""
    projected = weights.project(x)
    query, key, value = mix_packed(projected, weights.convolutions, step.packing, state.history, state.delayed)
    query, key = normalise(query, key, weights.temperature)
    query = rotary(query, x.dtype)
    state.keys[step.slots, :, step.positions] = rotary(key, x.dtype)
    state.values[step.slots, :, step.positions] = value
    out = torch.empty_like(query)
    if step.decodes:
        slots, rows = step.slots[: step.decodes], slice(step.decodes)
        keys, values = state.keys[:, :, : step.span][slots], state.values[:, :, : step.span][slots]
        out[rows] = attend_decodes(query[rows], keys, values, step.positions[rows], weights.window)
    for chunk in step.prefills:
        held = chunk.past + chunk.stop - chunk.start
        queries = query[chunk.start : chunk.stop].transpose(0, 1)[None]
        keys, values = (cache[chunk.slot, :, :held][None] for cache in (state.keys, state.values))
        out[chunk.start : chunk.stop] = attend(queries, keys, values, weights.window)[0].transpose(0, 1)
    return weights.output(out.flatten(1))


def _run(hidden: Tensor, carried: Tensor | None, block: Block, attention: Callable[[Tensor], Tensor]) -> BlockOutput:
    normed = rms_norm(hidden, block.attention_norm, block.eps, block.dtype)
    hidden = block.attention_residual(attention(normed), hidden)
    normed = rms_norm(hidden, block.moe_norm, block.eps, block.dtype)
    routing, states = route(normed, carried, block.router)
    out = run_experts(normed, routing, block.experts, block.expert_count)
    return BlockOutput(block.moe_residual(out, hidden), states, routing)


def run_sequences(hidden: Tensor, carried: Tensor | None, block: Block, rotary: Rotary) -> BlockOutput:
    """Run a block over whole sequences from their first token.

    hidden [batch, tokens, hidden] float32 is left as it is; `carried` [batch, tokens, router width] comes from the
    previous block. Shorter sequences are padded at the end: nothing flows back from there.
    """
    return _run(hidden, carried, block, lambda x: sequence_attention(x, block.attention, rotary))


def run_packed(
    hidden: Tensor, carried: Tensor | None, block: Block, rotary: Rotary, *, step: Step, state: BlockState
) -> BlockOutput:
    """Run a block over the rows of a step, hidden [rows, hidden] float32, updating its `state` in place."""
    return _run(hidden, carried, block, lambda x: packed_attention(x, block.attention, rotary, step, state))
