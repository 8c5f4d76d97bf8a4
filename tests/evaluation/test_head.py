from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zaya_tools.evaluation import head
from zaya_tools.model.ends import Ends


def ends_of(logits: Tensor, bias: Tensor | None = None) -> Ends:
    """A head whose logits, for the unit vectors as states, are these [rows, vocabulary], to the last bit."""
    nothing = torch.zeros(logits.shape[0])
    return Ends(
        embedding=logits.T, scale=nothing, bias=nothing, norm=nothing, head=logits.T, head_bias=bias, eps=1e-5,
        dtype=torch.float32,
    )  # fmt: skip


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    return lambda entries, rows: monkeypatch.setattr(head, "SLICE_BYTES", 4 * rows * entries)


def truth(logits: Tensor, other: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(nats of targets, KL(other || logits), nats of targets under other), all at once in float64."""
    log, wanted = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(log, wanted, reduction="none", log_target=True).sum(-1)
    return (-log.gather(-1, targets[:, None])[:, 0], kl, -wanted.gather(-1, targets[:, None])[:, 0])


@st.composite
def logit_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = draw(st.integers(1, 5)), draw(st.integers(1, 23))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    size = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4]))
    logits = torch.randn(rows, vocabulary, generator=generator) * size
    if draw(st.booleans()):
        logits = logits.round(decimals=-1) if size > 30 else logits.round()  # ties
    if draw(st.booleans()):
        logits = logits.clamp(-1e4, 1e4) + draw(st.sampled_from([-1e4, 1e4]))
    near = draw(st.sampled_from([0.0, 1e-3, 1.0, 1e4]))
    other = logits + near * torch.randn(rows, vocabulary, generator=generator)
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return logits, other, targets


@settings(max_examples=300, deadline=None)
@given(case=logit_rows(), entries=st.integers(1, 30))
def test_slices_give_what_the_whole_vocabulary_does(case: tuple[Tensor, Tensor, Tensor], entries: int) -> None:
    logits, other, targets = case
    nll, kl, wanted = truth(logits, other, targets)
    states = torch.eye(len(targets))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "SLICE_BYTES", 4 * len(targets) * entries)
        alone = head.score(ends_of(logits), states, targets)
        both = head.compare(ends_of(logits), states, ends_of(other), states, targets)
    assert torch.equal(alone.nll, both.model.nll)
    torch.testing.assert_close(alone.nll.double(), nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both.reference.nll.double(), wanted, rtol=1e-5, atol=1e-5)
    # A divergence is a difference of numbers of this size.
    scale = 1 + (logits - other).abs().amax(-1).double()
    torch.testing.assert_close(both.kl.double() / scale, kl / scale, rtol=0, atol=1e-5)
    assert (both.kl >= 0).all()
    # The first of equals, as argmax has it.
    assert torch.equal(both.model.top, logits.argmax(-1))
    assert torch.equal(alone.top, logits.argmax(-1))
    assert torch.equal(both.reference.top, other.argmax(-1))


@settings(max_examples=100, deadline=None)
@given(case=logit_rows(), entries=st.integers(1, 30))
def test_identical_models_diverge_by_exactly_nothing(case: tuple[Tensor, Tensor, Tensor], entries: int) -> None:
    logits, _, targets = case
    states = torch.eye(len(targets))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "SLICE_BYTES", 4 * len(targets) * entries)
        both = head.compare(ends_of(logits), states, ends_of(logits.clone()), states, targets)
    assert torch.equal(both.kl, torch.zeros(len(targets)))
    assert torch.equal(both.model.nll, both.reference.nll)


def test_small_divergences_are_not_lost_beside_large_logits() -> None:
    """What is common to all logits of a row changes nothing."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 500, generator=generator).mul(64).round().div(64)  # exact next to 1e4
    other = base + torch.randn(4, 500, generator=generator).mul(64).round().div(64) * 0.125
    targets, states = torch.arange(4), torch.eye(4)
    near = head.compare(ends_of(base), states, ends_of(other), states, targets)
    far = head.compare(ends_of(base + 8192), states, ends_of(other + 8192), states, targets)
    torch.testing.assert_close(far.kl, near.kl, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(far.model.nll, near.model.nll, rtol=1e-6, atol=1e-6)


def test_a_bias_of_the_head_counts(sliced: Callable[[int, int], None]) -> None:
    sliced(3, 2)
    logits, bias = torch.randn(2, 10, generator=torch.Generator().manual_seed(1)), torch.linspace(-3, 3, 10)
    targets, states = torch.tensor([0, 9]), torch.eye(2)
    found = head.compare(ends_of(logits, bias), states, ends_of(logits), states, targets)
    nll, kl, _ = truth(logits + bias, logits, targets)
    torch.testing.assert_close(found.model.nll.double(), nll, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.kl.double(), kl, rtol=1e-4, atol=1e-6)


def test_slices_bound_what_is_held(sliced: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(7, 4)
    logits = torch.randn(4, 100)
    held: list[int] = []
    whole = Ends.logits

    def logits_of(self: Ends, finished: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        part = whole(self, finished, start, stop)
        held.append(part.shape[-1])
        return part

    monkeypatch.setattr(Ends, "logits", logits_of)
    head.score(ends_of(logits), torch.eye(4), torch.zeros(4, dtype=torch.int64))
    assert max(held) == 7
    assert sum(held) == 100


def test_nan_is_not_swallowed() -> None:
    logits = torch.randn(2, 10)
    broken = logits.clone()
    broken[0, 3] = torch.nan
    states, targets = torch.eye(2), torch.tensor([1, 1])
    # Through an identity, NaN would reach every row; a row of its own keeps it there.
    found = head.compare(ends_of(broken[:1]), states[:1, :1], ends_of(logits[:1]), states[:1, :1], targets[:1])
    assert found.kl.isnan().all()
    assert found.model.nll.isnan().all()
    assert found.reference.nll.isfinite().all()


def test_no_rows_are_no_error() -> None:
    none = torch.empty(0, dtype=torch.int64)
    found = head.compare(
        ends_of(torch.randn(2, 5)), torch.empty(0, 2), ends_of(torch.randn(2, 5)), torch.empty(0, 2), none
    )
    assert found.kl.shape == found.model.nll.shape == (0,)
