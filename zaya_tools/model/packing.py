"""Where each row of a packed batch finds what came before it, as index tensors.

A packed batch is many requests in one tensor: one-token continuations (decodes) first, then prefill chunks. To convolve
all of them at once, each request's rows are laid out behind its own history. Every row then sees what it would see in
one pass, however short its chunk, and the last rows of a request, wherever they came from, are its next history.
Nothing here waits for the device: shapes depend on the numbers of rows and requests alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NULL_SLOT = 0
"""The state slot of padding rows: written, never read by a request."""


@dataclass(frozen=True)
class Span:
    """One layout of T rows behind R histories of `width` rows each; all int64.

    `tokens` [T], `saved` [R, width] and `kept` [R, width] index the laid out T + R * width rows: the batch's own rows,
    the saved histories and the next histories.
    """

    width: int
    tokens: Tensor
    saved: Tensor
    kept: Tensor

    def lay_out(self, saved: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        """Histories [R, width, channels] and rows [T, channels], in column parts, as one [T + R * width, channels]."""
        rows, channels = self.tokens.shape[0] + self.saved.numel(), saved.shape[-1]
        laid = saved.new_empty(rows, channels)
        laid[self.saved.flatten()] = saved.flatten(0, 1)
        start = 0
        for part in parts:
            laid[:, start : start + part.shape[-1]].index_copy_(0, self.tokens, part)
            start += part.shape[-1]
        return laid


@dataclass(frozen=True)
class Packing:
    """A packed batch of T rows and R requests, padding included.

    `slots` [R] int64 are state slots, `has_state` [R] bool says whether a request continues one. `mixing` lays out the
    raw query/key vectors, `delaying` the delayed values (a history of one row).
    """

    slots: Tensor
    has_state: Tensor
    mixing: Span
    delaying: Span


def _span(width: int, owner: Tensor, starts: Tensor, ends: Tensor) -> Span:
    request = torch.arange(starts.shape[0], device=starts.device)
    offset = torch.arange(width, device=starts.device)
    rows = torch.arange(owner.shape[0], device=starts.device)
    return Span(
        width=width,
        tokens=rows + (owner + 1) * width,
        saved=(starts + request * width)[:, None] + offset,
        kept=(ends + request * width)[:, None] + offset,
    )


def pack(
    rows: int,
    history: int,
    *,
    decode_slots: Tensor,
    prefill_slots: Tensor,
    prefill_offsets: Tensor,
    prefill_has_state: Tensor,
) -> Packing:
    """Index tensors of a batch of `rows` rows with at least one request, for convolutions that see `history` rows back.

    `decode_slots` [D] own the first D rows, one each. Prefill chunk i of P owns the rows `prefill_offsets[i]` to
    `prefill_offsets[i + 1]` ([P + 1], counted from row D) and continues the state of its slot where
    `prefill_has_state` [P] is true. A decode with a negative slot is padding and is given NULL_SLOT; rows after the
    last request are padding too. Integers may be int32 or int64. All tensors are on one device, as are the results.
    """
    decodes, device = decode_slots.shape[0], decode_slots.device
    decode_rows = torch.arange(decodes, device=device)
    offsets = prefill_offsets.long() + decodes
    starts = torch.cat([decode_rows, offsets[:-1]])
    ends = torch.cat([decode_rows + 1, offsets[1:]])
    # The owner of a row is the last request that starts at or before it, so an empty chunk owns none.
    owner = torch.searchsorted(starts, torch.arange(rows, device=device), right=True) - 1
    return Packing(
        slots=torch.cat([decode_slots.long(), prefill_slots.long()]).clamp_min(NULL_SLOT),
        has_state=torch.cat([torch.ones_like(decode_rows, dtype=torch.bool), prefill_has_state.bool()]),
        mixing=_span(history, owner, starts, ends),
        delaying=_span(1, owner, starts, ends),
    )
