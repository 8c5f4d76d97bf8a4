from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zaya_tools.model.attention import attend, attend_decodes


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def by_hand(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    total, tokens = key.shape[2], query.shape[2]
    distance = torch.arange(total - tokens, total)[:, None] - torch.arange(total)
    hidden = (distance < 0) | (distance >= (window or total))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    attended: Tensor = scores.softmax(dim=-1) @ value
    return attended


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("past", "tokens"), [(0, 9), (7, 5), (0, 1100), (300, 600)])
@pytest.mark.parametrize("window", [None, 1, 6, 550])
def test_attend(past: int, tokens: int, window: int | None, kv_heads: int) -> None:
    query = heads(2, 4, tokens, 8)
    key, value = heads(2, kv_heads, past + tokens, 8), heads(2, kv_heads, past + tokens, 8) + 1
    torch.testing.assert_close(attend(query, key, value, window), by_hand(query, key, value, window))


@pytest.mark.parametrize("window", [None, 3])
def test_decodes_see_their_own_past_only(window: int | None) -> None:
    positions = torch.tensor([4, 0, 9])
    query, key, value = heads(3, 4, 8), heads(3, 2, 10, 8), heads(3, 2, 10, 8) + 1
    out = attend_decodes(query, key, value, positions, window)
    for i, last in enumerate(positions.tolist()):
        held = slice(i, i + 1), slice(None), slice(last + 1)
        expected = by_hand(query[i][None, :, None], key[held], value[held], window)
        torch.testing.assert_close(out[i], expected[0, :, 0])
