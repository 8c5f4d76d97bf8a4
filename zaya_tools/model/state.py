"""What a server keeps of its requests: key/value cache and CCA state a block, in slots that requests borrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.errors import ZayaError
from zaya_tools.model.cca import state_dtypes, state_shapes
from zaya_tools.model.packing import NULL_SLOT, Packing, pack


@dataclass(frozen=True)
class BlockState:
    """One block's state of all slots, the null slot first; every tensor is of the compute dtype.

    `keys` and `values` [slots + 1, kv heads, capacity, d]; `history` [slots + 1, channels, n] raw query/key vectors;
    `delayed` [slots + 1, kv heads * d / 2]. The router keeps nothing from one token to the next.
    """

    keys: Tensor
    values: Tensor
    history: Tensor
    delayed: Tensor


@dataclass(frozen=True)
class Prefill:
    """One chunk on the host: rows `start` to `stop` of the batch, after `past` tokens of the slot."""

    slot: int
    start: int
    stop: int
    past: int


@dataclass(frozen=True)
class Step:
    """One packed batch of T rows: `decodes` one-token continuations, padding among them, then prefill chunks.

    `slots` and `positions` [T] int64 say where each row's key and value go; `span` is the longest context of a decode.
    """

    packing: Packing
    slots: Tensor
    positions: Tensor
    decodes: int
    span: int
    prefills: tuple[Prefill, ...]


class State:
    """Slots for requests of up to `capacity` tokens, and how many tokens each holds."""

    def __init__(
        self, architecture: Architecture, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make zeroed state for `slots` requests beside the null slot; memory is taken at once."""
        a, rows = architecture, slots + 1
        cache = (rows, a.kv_heads, capacity, a.head_dim)
        history, delayed = ((rows, *shape) for shape in state_shapes(a))
        history_dtype, delayed_dtype = state_dtypes(dtype)
        self.capacity = capacity
        self.device = device
        self.blocks = tuple(
            BlockState(
                torch.zeros(cache, dtype=dtype, device=device),
                torch.zeros(cache, dtype=dtype, device=device),
                torch.zeros(history, dtype=history_dtype, device=device),
                torch.zeros(delayed, dtype=delayed_dtype, device=device),
            )
            for _ in range(a.blocks)
        )
        self._width = a.history
        self._free = list(range(slots, NULL_SLOT, -1))
        self._lengths: dict[int, int] = {}

    @property
    def free(self) -> int:
        """How many slots can be allocated."""
        return len(self._free)

    def length(self, slot: int) -> int:
        """Tokens that an allocated slot holds."""
        if slot not in self._lengths:
            raise ZayaError(f"slot {slot} is not allocated", "take slots from allocate(), and release them once")
        return self._lengths[slot]

    def allocate(self) -> int:
        """Borrow a slot for a new request. Raises ZayaError when none is free."""
        if not self._free:
            raise ZayaError("all request slots are in use", "release one, or make the state with more slots")
        slot = self._free.pop()
        self._lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back; its next request starts afresh."""
        used = self.length(slot)
        for block in self.blocks:
            # A decode reads its slot as far as the longest context of the batch. What it masks must at least be finite.
            block.keys[slot, :, :used] = 0
            block.values[slot, :, :used] = 0
        del self._lengths[slot]
        self._free.append(slot)

    def advance(self, chunks: Sequence[tuple[int, int]], padding: int = 0) -> Step:
        """Plan a step that feeds each (slot, number of tokens), and count those tokens as held.

        One-token continuations must come before all other chunks; `padding` rows follow them. No slot may come twice.
        Raises ZayaError for another order, an empty chunk, or a request that outgrows the capacity.
        """
        pasts = [self.length(slot) for slot, _ in chunks]
        self._check(chunks, pasts)
        single = [past > 0 and tokens == 1 for past, (_, tokens) in zip(pasts, chunks, strict=True)]
        count = sum(single)
        slots = [slot for slot, _ in chunks[:count]] + [NULL_SLOT] * padding
        positions = pasts[:count] + [0] * padding
        decodes, row, prefills = len(slots), len(slots), []
        for past, (slot, tokens) in zip(pasts[count:], chunks[count:], strict=True):
            prefills.append(Prefill(slot, row, row + tokens, past))
            slots += [slot] * tokens
            positions += range(past, past + tokens)
            row += tokens
        for slot, tokens in chunks:
            self._lengths[slot] += tokens
        offsets = [0, *(chunk.stop - decodes for chunk in prefills)]
        every_slot = self._tensor(slots)
        return Step(
            packing=pack(
                row,
                self._width,
                decode_slots=every_slot[:decodes],
                prefill_slots=self._tensor([chunk.slot for chunk in prefills]),
                prefill_offsets=self._tensor(offsets),
                prefill_has_state=self._tensor([chunk.past > 0 for chunk in prefills]),
            ),
            slots=every_slot,
            positions=self._tensor(positions),
            decodes=decodes,
            span=max(positions[:decodes], default=-1) + 1,
            prefills=tuple(prefills),
        )

    def _check(self, chunks: Sequence[tuple[int, int]], pasts: Sequence[int]) -> None:
        if len({slot for slot, _ in chunks}) < len(chunks):
            raise ZayaError("a slot comes twice in one step", "join its chunks")
        seen_prefill = False
        for past, (slot, tokens) in zip(pasts, chunks, strict=True):
            if tokens < 1:
                raise ZayaError(f"an empty chunk for slot {slot}", "leave the request out of the step")
            if past + tokens > self.capacity:
                raise ZayaError(
                    f"slot {slot} would hold {past + tokens:,} tokens, more than its {self.capacity:,}",
                    "make the state with a larger capacity",
                )
            prefill = past == 0 or tokens > 1
            if seen_prefill and not prefill:
                raise ZayaError(f"the decode of slot {slot} comes after a prefill chunk", "put decodes first")
            seen_prefill = seen_prefill or prefill

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
