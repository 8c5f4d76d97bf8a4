from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zaya_tools.errors import ZayaError
from zaya_tools.model.model import ZayaModel
from zaya_tools.model.session import Session

from .support import GEOMETRIES, random_ids, random_model

CAPACITY, SLOTS = 24, 3
UNTIED = GEOMETRIES["untied head with bias"]


def one_pass(model: ZayaModel, ids: Tensor) -> Tensor:
    return model.hidden(ids[None])[0]


def feed_in_random_chunks(session: Session, prompts: list[Tensor], data: st.DataObject) -> list[Tensor]:
    """Serve all prompts in chunks and batches that hypothesis chooses; gives the states of each prompt's tokens."""
    waiting = list(enumerate(prompts))
    running: dict[int, tuple[int, int]] = {}
    outputs: list[list[Tensor]] = [[] for _ in prompts]
    while waiting or running:
        while waiting and session.state.free and (not running or data.draw(st.booleans(), "open")):
            number, _ = waiting.pop(0)
            running[session.open()] = (number, 0)
        slots = data.draw(st.lists(st.sampled_from(sorted(running)), min_size=1, unique=True), "slots")
        chunks = []
        for slot in slots:
            number, done = running[slot]
            left = len(prompts[number]) - done
            size = data.draw(st.one_of(st.just(1), st.integers(1, left)), "size")
            chunks.append((slot, prompts[number][done : done + size].tolist()))
            running[slot] = (number, done + size)
        padding = data.draw(st.integers(0, 2), "padding")
        for (slot, _), states in zip(chunks, session.step(chunks, padding=padding), strict=True):
            number, done = running[slot]
            outputs[number].append(states)
            if done == len(prompts[number]):
                session.close(slot)
                del running[slot]
    return [torch.cat(parts) for parts in outputs]


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(GEOMETRIES)),
    lengths=st.lists(st.one_of(st.integers(1, 4), st.integers(1, CAPACITY)), min_size=1, max_size=6),
    data=st.data(),
)
def test_any_split_into_chunks_gives_the_numbers_of_one_pass(
    name: str, lengths: list[int], data: st.DataObject
) -> None:
    model = random_model(GEOMETRIES[name])
    prompts = [random_ids(model.architecture, length, seed=i) for i, length in enumerate(lengths)]
    session = Session(model, SLOTS, CAPACITY)
    for block in session.state.blocks:
        # What a request does not own must never reach it.
        block.history.fill_(torch.nan)
        block.delayed.fill_(torch.nan)
    for states, prompt in zip(feed_in_random_chunks(session, prompts, data), prompts, strict=True):
        torch.testing.assert_close(states, one_pass(model, prompt), atol=1e-4, rtol=0)


class Counting(Session):
    fed: list[int]

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]], padding: int = 0) -> list[Tensor]:
        self.fed = [*getattr(self, "fed", []), sum(len(ids) for _, ids in chunks)]
        return super().step(chunks, padding)


def test_generation_is_the_greedy_continuation_of_full_passes() -> None:
    model = random_model(UNTIED)
    prompts = [random_ids(UNTIED, length, seed=length).tolist() for length in (1, 9, 2, 13, 5)]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    session = Counting(model, 2, CAPACITY)
    assert session.generate(prompts, 8, chunk=4) == expected
    assert max(session.fed) == 4
    assert session.state.free == 2

    stop = Counter(token for ids in expected for token in ids).most_common(1)[0][0]
    cut = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in expected]
    assert session.generate(prompts, 8, stop={stop}) == cut


def test_generation_refuses_what_cannot_fit() -> None:
    session = Session(random_model(UNTIED), 1, 8)
    assert len(session.generate([[1, 2, 3]], 6)[0]) == 6
    with pytest.raises(ZayaError, match="exceed the 8"):
        session.generate([[1, 2, 3]], 7)
    with pytest.raises(ZayaError, match="empty prompt"):
        session.generate([[]], 1)
