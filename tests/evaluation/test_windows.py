from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_tools.data import TINY
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.windows import cut
from zaya_tools.model.weights import Weights

from .oracles import log_probabilities, text, tiny_in_transformers


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_tokens_are_scored_once_with_as_much_before_them_as_promised(data: st.DataObject) -> None:
    context = data.draw(st.integers(2, 20), "context")
    stride = data.draw(st.none() | st.integers(1, context), "stride")
    tokens = list(range(1, data.draw(st.integers(2, 90), "length") + 1))  # each its own position, and no padding
    windows = cut(tokens, context, stride)
    step = stride or context
    assert windows.ids.shape == windows.scored.shape
    assert windows.ids.shape[1] == context
    assert windows.ids.dtype == torch.int64

    scored: Counter[int] = Counter()
    for ids, marks in zip(windows.ids.tolist(), windows.scored.tolist(), strict=True):
        real = [token for token in ids if token]
        assert real == list(range(real[0], real[0] + len(real)))  # unbroken text
        assert ids == real + [0] * (context - len(real))  # padded at the end alone
        assert (real[0] - 1) % step == 0
        assert any(marks)
        for place, (token, mark) in enumerate(zip(ids, marks, strict=True)):
            if mark:
                assert token > 0
                assert place >= 1
                # All there is before it, or the overlap.
                assert place >= min(token - 1, context - step)
                scored[token] += 1
    assert set(scored.values()) <= {1}
    # Without an overlap, the first token of a window has nothing before it there.
    unseen = {1} if step < context else {token for token in tokens if (token - 1) % context == 0}
    assert set(tokens) - set(scored) == unseen
    assert windows.tokens == len(tokens) - len(unseen)


@pytest.mark.parametrize(("context", "stride"), [(1, None), (0, None), (8, 0), (8, 9), (8, -1)])
def test_impossible_windows_are_refused(context: int, stride: int | None) -> None:
    with pytest.raises(ZayaError, match="context"):
        cut([1, 2, 3], context, stride)


@pytest.mark.parametrize("tokens", [[], [5]])
def test_too_little_text_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ZayaError, match="too few"):
        cut(tokens, 8)


def sliding_loop(tokens: list[int], context: int, stride: int) -> float:
    """Perplexity as transformers' documentation computes it, window after window."""
    model = tiny_in_transformers()
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + context, len(tokens))
        log = log_probabilities(model, tokens[begin:end])
        for place in range(max(1, before - begin), end - begin):
            total -= log[place - 1, tokens[begin + place]].item()
            count += 1
        before = end
        if end == len(tokens):
            break
    return math.exp(total / count)


@pytest.mark.parametrize(
    ("length", "context", "stride"), [(400, 64, 64), (385, 64, 64), (300, 64, 24), (150, 200, 200)]
)
def test_perplexity_is_that_of_a_sliding_loop_in_transformers(length: int, context: int, stride: int) -> None:
    tokens = list(text()[:length])
    found = measure(Weights.open(Path(TINY)), cut(tokens, context, stride))
    assert found.perplexity.value == pytest.approx(sliding_loop(tokens, context, stride), rel=1e-5)
    assert found.perplexity.value < 8  # trained
