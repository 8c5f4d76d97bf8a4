from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zaya_tools.model.cca import (
    Heads,
    Projected,
    mix_decodes,
    mix_packed,
    mix_sequence,
    state_dtypes,
    state_shapes,
)
from zaya_tools.model.packing import Packing, pack

from .support import GEOMETRIES, random_model

A = GEOMETRIES["times 2 and 4, attention bias"]
WEIGHTS = tuple(random_model(A).blocks)[1].attention


def empty_states(slots: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    history, delayed = (torch.full((slots, *shape), torch.nan, dtype=dtype) for shape in state_shapes(A))
    return history, delayed


def projected(rows: int, seed: int = 0) -> Projected:
    return WEIGHTS.project(torch.randn(rows, A.hidden_size, generator=torch.Generator().manual_seed(seed)))


def rows_of(p: Projected, rows: slice | list[int]) -> Projected:
    return Projected(p.query[rows], p.key[rows], p.current[rows], p.delayed[rows], p.delayed_zero)


def whole(p: Projected) -> Heads:
    lead = Projected(p.query[None], p.key[None], p.current[None], p.delayed[None], p.delayed_zero)
    return Heads(*(t[0] for t in mix_sequence(lead, WEIGHTS.convolutions)))


def packing(rows: int, decode_slots: list[int], prefills: list[tuple[int, int, bool]]) -> Packing:
    """Prefills are (slot, tokens, has state). int32 throughout, as runtimes keep their metadata."""
    offsets = torch.tensor([0, *(tokens for _, tokens, _ in prefills)]).cumsum(0)
    return pack(
        rows,
        A.history,
        decode_slots=torch.tensor(decode_slots, dtype=torch.int32),
        prefill_slots=torch.tensor([slot for slot, _, _ in prefills], dtype=torch.int32),
        prefill_offsets=offsets.to(torch.int32),
        prefill_has_state=torch.tensor([has_state for _, _, has_state in prefills], dtype=torch.bool),
    )


def test_state_shapes_and_dtypes_follow_from_the_geometry() -> None:
    assert state_shapes(A) == ((6 * 8, 4), (8,))
    assert state_dtypes(torch.bfloat16) == (torch.bfloat16, torch.bfloat16)


def test_padding_rows_and_empty_chunks_touch_no_request() -> None:
    tokens = projected(9)
    expected = whole(tokens)
    history, delayed = empty_states(5)
    # The last slot is the one that an index of -1 would name.
    history[-1], delayed[-1] = 7, 7
    first = mix_packed(
        rows_of(tokens, slice(6)), WEIGHTS.convolutions, packing(6, [], [(2, 6, False)]), history, delayed
    )
    # A decode of slot 2, a padding decode, a new request in slot 3, an empty chunk of slot 1, three rows of nobody.
    rows = [6, 8, 0, 1, 8, 8, 8]
    batch = packing(7, [2, -1], [(3, 2, False), (1, 0, False)])
    second = mix_packed(rows_of(tokens, rows), WEIGHTS.convolutions, batch, history, delayed)
    kept = history[3].clone(), delayed[3].clone()
    mix_packed(rows_of(tokens, [8]), WEIGHTS.convolutions, packing(1, [], [(3, 0, True)]), history, delayed)
    # An empty chunk before the others owns no row of theirs.
    third = mix_packed(
        rows_of(tokens, [7, 8]), WEIGHTS.convolutions, packing(2, [], [(3, 0, True), (2, 2, True)]), history, delayed
    )
    assert (history[-1] == 7).all()
    assert (delayed[-1] == 7).all()
    assert torch.equal(history[3], kept[0])
    assert torch.equal(delayed[3], kept[1])
    for got, part in ((first, slice(0, 6)), (Heads(*(t[:1] for t in second)), slice(6, 7)), (third, slice(7, 9))):
        for mixed, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(mixed, wanted[part])
    for mixed, wanted in zip(second, expected, strict=True):
        torch.testing.assert_close(mixed[2:4], wanted[:2])


def test_decodes_alone_are_what_a_packed_batch_makes_of_them() -> None:
    tokens, length = projected(18), 6
    requests = (2, 4, 1)
    states = empty_states(6)
    prefills = packing(18, [], [(slot, length, False) for slot in requests])
    mix_packed(tokens, WEIGHTS.convolutions, prefills, *states)
    others = tuple(state.clone() for state in states)
    # Two rows of padding share the null slot, one of them as an index that names none.
    slots = [4, 0, 2, 1, -1]
    more = projected(5, seed=1)
    packed = mix_packed(more, WEIGHTS.convolutions, packing(5, slots, []), *states)
    alone = mix_decodes(more, WEIGHTS.convolutions, torch.tensor(slots, dtype=torch.int32), *others)
    for got, wanted in zip(alone, packed, strict=True):
        torch.testing.assert_close(got[[0, 2, 3]], wanted[[0, 2, 3]], rtol=0, atol=1e-6)
    for mine, wanted in zip(others, states, strict=True):
        assert torch.equal(mine[1:].nan_to_num(7.0), wanted[1:].nan_to_num(7.0))


def test_state_of_another_dtype_is_cast_both_ways() -> None:
    tokens = projected(8)
    history, delayed = empty_states(2, torch.float64)
    parts = [
        mix_packed(rows_of(tokens, rows), WEIGHTS.convolutions, batch, history, delayed)
        for rows, batch in (
            (slice(0, 3), packing(3, [], [(1, 3, False)])),
            (slice(3, 4), packing(1, [1], [])),
            (slice(4, 8), packing(4, [], [(1, 4, True)])),
        )
    ]
    for index, wanted in enumerate(whole(tokens)):
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), wanted)


def test_nothing_waits_for_the_device() -> None:
    # A fake tensor has no values: whatever needs one on the host raises.
    metadata = torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([0, 5]), torch.tensor([True])
    tensors = projected(7)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        decode_slots, prefill_slots, offsets, has_state = (mode.from_tensor(t) for t in metadata)
        batch = pack(
            7,
            A.history,
            decode_slots=decode_slots,
            prefill_slots=prefill_slots,
            prefill_offsets=offsets,
            prefill_has_state=has_state,
        )
        fake = Projected(*(mode.from_tensor(t) for t in tensors))
        history, delayed = (mode.from_tensor(t) for t in empty_states(4))
        query, _, _ = mix_packed(fake, WEIGHTS.convolutions, batch, history, delayed)
    assert query.shape == (7, A.query_heads, A.head_dim)
