from __future__ import annotations

import pytest
import torch

from zaya_tools.errors import ZayaError
from zaya_tools.model.state import State

from .support import BASE


def state(slots: int = 2, capacity: int = 4) -> State:
    return State(BASE, slots, capacity, torch.float32, torch.device("cpu"))


def test_slots_are_counted_and_come_back() -> None:
    held = state()
    first, second = held.allocate(), held.allocate()
    assert 0 not in (first, second)
    with pytest.raises(ZayaError, match="all request slots"):
        held.allocate()
    held.advance([(first, 3)])
    assert held.length(first) == 3
    held.release(first)
    assert held.length(held.allocate()) == 0
    with pytest.raises(ZayaError, match="not allocated"):
        held.length(0)


def test_released_cache_holds_nothing_that_could_spread() -> None:
    held = state()
    slot = held.allocate()
    held.advance([(slot, 3)])
    block = held.blocks[0]
    block.keys[slot, :, :3] = torch.nan
    block.values[slot, :, :3] = torch.inf
    held.release(slot)
    assert not block.keys.any()
    assert not block.values.any()


def test_a_refused_step_counts_no_token() -> None:
    held = state()
    first, second = held.allocate(), held.allocate()
    held.advance([(first, 2), (second, 1)])
    for chunks, reason in (
        ([(first, 1), (first, 1)], "twice"),
        ([(first, 0)], "empty"),
        ([(second, 1), (first, 3)], "more than its 4"),
        ([(first, 2), (second, 1)], "after a prefill"),
    ):
        with pytest.raises(ZayaError, match=reason):
            held.advance(chunks)
    assert (held.length(first), held.length(second)) == (2, 1)


def test_a_step_says_where_each_row_goes() -> None:
    held = state(3, 8)
    a, b, c = (held.allocate() for _ in range(3))
    held.advance([(a, 5), (b, 2)])
    step = held.advance([(a, 1), (b, 3), (c, 1)], padding=1)
    assert step.slots.tolist() == [a, 0, b, b, b, c]
    assert step.positions.tolist() == [5, 0, 2, 3, 4, 0]
    assert (step.decodes, step.span) == (2, 6)
    assert step.packing.has_state.tolist() == [True, True, True, False]
