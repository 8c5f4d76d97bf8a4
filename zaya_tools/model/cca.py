"""Compressed Convolutional Attention's mixing of queries, keys and values (arXiv 2510.04476).

Projections come in and heads go out: the linear layers and the attention kernel belong to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.model.norm import inverse_length
from zaya_tools.model.packing import NULL_SLOT, Packing


class Projected(NamedTuple):
    """The projections of normed tokens, all of the compute dtype.

    `query` [..., query heads * d], `key` [..., kv heads * d], `current` and `delayed` [..., kv heads * d / 2];
    `delayed_zero` [kv heads * d / 2] is the delayed projection of a zero vector, which stands before the first token.
    """

    query: Tensor
    key: Tensor
    current: Tensor
    delayed: Tensor
    delayed_zero: Tensor


class Heads(NamedTuple):
    """float32 `query` [..., query heads, d] and `key` [..., kv heads, d]; `value`, like keys, in the compute dtype."""

    query: Tensor
    key: Tensor
    value: Tensor


def state_shapes(architecture: Architecture) -> tuple[tuple[int, int], tuple[int]]:
    """Shapes of what one request keeps a block: raw query/key history, and the last delayed value."""
    return (architecture.conv_channels, architecture.history), (architecture.value_half,)


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Their dtypes: the compute dtype, in which the projections come, so that saving loses nothing."""
    return dtype, dtype


@dataclass(frozen=True)
class Convolutions:
    """The depthwise and the grouped causal convolution, as the matrix products that compute them.

    `depthwise` [time0, channels] and its bias [channels] are float32; `grouped` [heads, time1 * d, d] (taps, then input
    channels, oldest tap first) and its bias [heads, 1, d] are in the compute dtype. Query heads come first.
    """

    depthwise: Tensor
    depthwise_bias: Tensor
    grouped: Tensor
    grouped_bias: Tensor

    @classmethod
    def of(
        cls, depthwise: Tensor, depthwise_bias: Tensor, grouped: Tensor, grouped_bias: Tensor, dtype: torch.dtype
    ) -> Convolutions:
        """From weights as conv1d takes them: depthwise [channels, 1, time0], grouped [channels, d, time1]."""
        channels, d, time1 = grouped.shape
        taps = grouped.view(channels // d, d, d, time1).permute(0, 3, 2, 1).reshape(-1, time1 * d, d)
        return cls(
            depthwise[:, 0].t().float().contiguous(),
            depthwise_bias.float(),
            taps.to(dtype),
            grouped_bias.view(-1, 1, d).to(dtype),
        )

    @property
    def history(self) -> int:
        """Vectors before a token that reach it."""
        return self.depthwise.shape[0] + self.grouped.shape[1] // self.grouped.shape[2] - 2

    def __call__(self, s: Tensor) -> Tensor:
        """Convolve s [batch, history + tokens, channels] of the compute dtype; gives [batch, tokens, heads, d]."""
        batch, rows, _ = s.shape
        heads, d = self.grouped.shape[0], self.grouped.shape[2]
        time0, time1 = self.depthwise.shape[0], self.grouped.shape[1] // d
        middle, tokens = rows - time0 + 1, rows - self.history
        # Accumulating the few depthwise taps in float32 rounds once, as a convolution kernel does.
        wide = s.float()
        mixed = torch.addcmul(self.depthwise_bias, wide[:, :middle], self.depthwise[0])
        for tap in range(1, time0):
            mixed.addcmul_(wide[:, tap : tap + middle], self.depthwise[tap])
        by_head = mixed.to(s.dtype).view(batch, middle, heads, d)
        windows = torch.cat([by_head[:, tap : tap + tokens] for tap in range(time1)], dim=-1)
        windows = windows.view(batch * tokens, heads, time1 * d).transpose(0, 1)
        out = torch.baddbmm(self.grouped_bias, windows, self.grouped)
        return out.view(heads, batch, tokens, d).permute(1, 2, 0, 3)


def _heads(query: Tensor, key: Tensor, convolved: Tensor) -> tuple[Tensor, Tensor]:
    """Add the residual paths: queries meet their key in the middle, keys the mean of the queries of their group."""
    d, kv_heads = convolved.shape[-1], key.shape[-1] // convolved.shape[-1]
    # In float32 and in place: between the projections and the attention kernel, numbers are rounded only once.
    grouped = query.float().view(*query.shape[:-1], kv_heads, -1, d)
    residual = (grouped + key.float().view(*key.shape[:-1], kv_heads, 1, d)).mul_(0.5)
    mean = residual.mean(dim=-2)
    query_heads = residual.flatten(-3, -2)
    return query_heads.add_(convolved[..., : query_heads.shape[-2], :]), mean.add_(convolved[..., -kv_heads:, :])


def mix_sequence(projected: Projected, convolutions: Convolutions) -> Heads:
    """Mix whole requests [batch, tokens], from their first token."""
    query, key, current, delayed, delayed_zero = projected
    n, width = convolutions.history, query.shape[-1]
    batch, tokens = query.shape[:2]
    s = query.new_empty(batch, n + tokens, width + key.shape[-1])
    s[:, :n] = 0
    s[:, n:, :width] = query
    s[:, n:, width:] = key
    queries, keys = _heads(query, key, convolutions(s))
    before = torch.cat([delayed_zero.expand(batch, 1, -1), delayed[:, :-1]], dim=1)
    return Heads(queries, keys, torch.cat([current, before], dim=-1).view(keys.shape))


def mix_packed(
    projected: Projected, convolutions: Convolutions, packing: Packing, history: Tensor, last_delayed: Tensor
) -> Heads:
    """Mix a packed batch of rows and update the state of its requests in place, without a host synchronisation.

    `history` [slots, channels, n] and `last_delayed` [slots, kv heads * d / 2] are the states, of any floating dtype.
    What a slot held before a request without state is never used, NaN included. Padding rows come out as numbers
    that mean nothing.
    """
    query, key, current, delayed, delayed_zero = projected
    mixing, delaying = packing.mixing, packing.delaying
    fresh = ~packing.has_state
    saved = history[packing.slots].to(query.dtype).masked_fill(fresh[:, None, None], 0)
    s = mixing.lay_out(saved.mT, (query, key))
    convolved = convolutions(s[None])[0][mixing.tokens - mixing.width]
    history[packing.slots] = s[mixing.kept].mT.to(history.dtype)

    first = torch.where(fresh[:, None], delayed_zero, last_delayed[packing.slots].to(delayed.dtype))
    values = delaying.lay_out(first[:, None], (delayed,))
    last_delayed[packing.slots] = values[delaying.kept[:, 0]].to(last_delayed.dtype)

    queries, keys = _heads(query, key, convolved)
    before = values[delaying.tokens - 1]
    return Heads(queries, keys, torch.cat([current, before], dim=-1).view(keys.shape))


def mix_decodes(
    projected: Projected, convolutions: Convolutions, slots: Tensor, history: Tensor, last_delayed: Tensor
) -> Heads:
    """`mix_packed` for one-token continuations alone: rows are requests, so no row has to look for its past.

    `slots` [rows] of any integer dtype; several rows, padding, may share NULL_SLOT.
    """
    query, key, current, delayed, _ = projected
    places = slots.long().clamp_min(NULL_SLOT)
    row = torch.cat([query, key], dim=-1)[:, None]
    s = torch.cat([history[places].to(query.dtype).mT, row], dim=1)
    before = last_delayed[places].to(delayed.dtype)
    history[places] = s[:, 1:].mT.to(history.dtype)
    last_delayed[places] = delayed.to(last_delayed.dtype)
    queries, keys = _heads(query, key, convolutions(s)[:, 0])
    return Heads(queries, keys, torch.cat([current, before], dim=-1).view(keys.shape))


def normalise(query: Tensor, key: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each head to length sqrt(d), keys times the float32 temperature [kv heads] of their head.

    query [..., query heads, d] and key [..., kv heads, d], float32, are overwritten.
    """
    root = query.shape[-1] ** 0.5
    query.mul_(inverse_length(query, 1.0, 1e-12).mul_(root))
    key.mul_(inverse_length(key, 1.0, 1e-12).mul_(temperature[:, None] * root))
    return query, key
