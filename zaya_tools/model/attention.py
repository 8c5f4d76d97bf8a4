"""Causal attention with grouped heads: over whole sequences, and over a key/value cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_QUERIES_AT_A_TIME = 512


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
    )


def attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Attention of the last tokens of a sequence to all of it, scale 1/sqrt(d).

    query [batch, query heads, tokens, d] are the last tokens of key and value [batch, kv heads, past + tokens, d]. Each
    attends to itself and what came before, with a `window` to that many tokens at most, itself included. Gives
    [batch, query heads, tokens, d]. Memory for masks is bounded: queries go in chunks that see only the keys they need.
    """
    tokens, total = query.shape[2], key.shape[2]
    past = total - tokens
    reach = total if window is None else window
    if past == 0 and reach >= total:
        return _attend(query, key, value, None, causal=True)
    out = torch.empty_like(query)
    for start in range(0, tokens, _QUERIES_AT_A_TIME):
        stop = min(start + _QUERIES_AT_A_TIME, tokens)
        low, high = max(0, past + start + 1 - reach), past + stop
        positions = torch.arange(low, high, device=query.device)
        distance = torch.arange(past + start, high, device=query.device)[:, None] - positions
        mask = (distance >= 0) & (distance < reach)
        out[:, :, start:stop] = _attend(
            query[:, :, start:stop], key[:, :, low:high], value[:, :, low:high], mask, causal=False
        )
    return out


def attend_decodes(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Attention of one token a request, scale 1/sqrt(d).

    query [requests, query heads, d]; key and value [requests, kv heads, span, d] hold the requests from their position
    0, the query's own token included; positions [requests] int64 are the queries'. Gives [requests, query heads, d].
    """
    distance = positions[:, None] - torch.arange(key.shape[2], device=key.device)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    # Heads of a group share their keys, and a lone token needs no order: the group takes the place of the tokens.
    grouped = query.view(query.shape[0], key.shape[1], -1, query.shape[2])
    return _attend(grouped, key, value, mask[:, None, None], causal=False).flatten(1, 2)
