from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from zaya_tools.calibration.balance import choose


@given(st.integers(1, 30), st.integers(1, 40), st.integers(1, 8), st.integers(0, 9))
def test_as_many_different_sequences_as_asked_for(samples: int, pool: int, experts: int, seed: int) -> None:
    counts = torch.randint(0, 9, (pool, experts), generator=torch.Generator().manual_seed(seed)).float()
    chosen = choose(counts, samples)
    assert len(set(chosen)) == len(chosen) == min(samples, pool)
    assert chosen == sorted(chosen)
    assert all(0 <= index < pool for index in chosen)


def test_sequences_that_feed_the_starved_expert_are_taken() -> None:
    counts = torch.full((200, 8), 10.0)
    counts[:, 7] = 0
    counts[::20, 7] = 5
    chosen = choose(counts, 10)
    assert chosen == list(range(0, 200, 20))


def test_an_expert_that_nothing_feeds_does_not_rule_the_choice() -> None:
    counts = torch.zeros(10, 3)
    counts[:, 0], counts[5:, 1] = 4, 4
    assert set(choose(counts, 4)) & set(range(5, 10))
