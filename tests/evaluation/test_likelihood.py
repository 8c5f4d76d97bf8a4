from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.synthetic import small, write_checkpoint
from zaya_tools.data import TINY
from zaya_tools.errors import LayoutError
from zaya_tools.evaluation import head
from zaya_tools.evaluation.likelihood import BINS, PERCENTILES, Likelihood, divergence, measure
from zaya_tools.evaluation.windows import Windows, cut
from zaya_tools.layouts.native import NATIVE
from zaya_tools.model import streaming
from zaya_tools.model.weights import Weights

from .oracles import text, tiny, transformers_of, write_tiny

CONTEXT, STRIDE, TOKENS = 64, 48, 700


def perturbed(name: str, tensor: Tensor) -> Tensor:
    """As a rough quantization would leave it."""
    if ".experts." not in name and not name.endswith("_proj.weight"):
        return tensor
    generator = torch.Generator().manual_seed(len(name))
    return (tensor.float() + 0.15 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)).to(
        tensor.dtype
    )


@lru_cache(maxsize=1)
def windows() -> Windows:
    return cut(text()[:TOKENS], CONTEXT, STRIDE)


@dataclass(frozen=True)
class Seen:
    """What transformers' own model does with the windows: over scored tokens, and block by block."""

    log: Tensor
    hidden: list[Tensor]
    choice: list[Tensor]


def seen(tensors: Mapping[str, Tensor]) -> Seen:
    model = transformers_of(tensors)
    a = tiny()[0]
    hidden: list[Tensor] = []
    choice: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: hidden.append(out[0].float()))
        biases = layer.mlp.gate.balancing_biases
        layer.mlp.gate.register_forward_hook(
            lambda _, __, out, b=biases: choice.append((out[0].softmax(-1) + b).argmax(-1).view(-1, CONTEXT))
        )
    with torch.no_grad():
        log = model(windows().ids, use_cache=False).logits.log_softmax(-1)
    assert len(hidden) == len(choice) == a.blocks
    return Seen(log, hidden, choice)


@lru_cache(maxsize=1)
def both() -> tuple[Seen, Seen]:
    tensors = tiny()[1]
    return seen({name: perturbed(name, tensor) for name, tensor in tensors.items()}), seen(tensors)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("changed"), perturbed)


@pytest.fixture(scope="module")
def found(changed: Path) -> Likelihood:
    return measure(Weights.open(changed), windows(), Weights.open(TINY))


def scored(rows: Tensor) -> Tensor:
    """Of predictions [windows, tokens, ...], those of scored tokens."""
    return rows[:, :-1][windows().scored[:, 1:]]


def targets() -> Tensor:
    return windows().ids[windows().scored]


def nats(log: Tensor) -> Tensor:
    return -scored(log).gather(-1, targets()[:, None])[:, 0].double()


def test_perplexities_and_their_ratio(found: Likelihood) -> None:
    mine, theirs = (nats(side.log).mean().exp().item() for side in both())
    assert found.tokens == windows().tokens == TOKENS - 1
    assert found.divergence is not None
    assert found.perplexity.value == pytest.approx(mine, rel=1e-5)
    assert found.divergence.reference_perplexity.value == pytest.approx(theirs, rel=1e-5)
    assert found.divergence.ratio.value == pytest.approx(mine / theirs, rel=1e-5)
    assert found.divergence.ratio.value > 1.005
    assert found.divergence.ratio.error < found.perplexity.error / 5


def test_divergence(found: Likelihood) -> None:
    mine, theirs = (scored(side.log).double() for side in both())
    kl = (theirs.exp() * (theirs - mine)).sum(-1)
    d = found.divergence
    assert d is not None
    assert d.kl.value == pytest.approx(kl.mean().item(), rel=1e-4)
    assert d.kl.value > 1e-3
    assert 0 < d.kl.error < d.kl.value
    assert d.maximum == pytest.approx(kl.max().item(), rel=1e-4)
    assert list(d.percentiles) == ["50", "90", "95", "99", "99.9"]
    for p in PERCENTILES:
        assert d.percentiles[f"{p:g}"] == pytest.approx(np.percentile(kl.numpy(), p), rel=1e-3, abs=1e-6)
    same = (mine.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    assert d.top1.value == pytest.approx(same, abs=1.5 / len(kl))
    assert 0.5 < same < 1
    assert sum(d.histogram) == len(kl)
    assert np.abs(np.cumsum(d.histogram) - [(kl.numpy() <= edge).sum() for edge in BINS[1:]]).max() <= 2


def test_blocks(found: Likelihood) -> None:
    mine, theirs = both()
    a, marks = tiny()[0], windows().scored
    assert [block.block for block in found.blocks] == list(range(a.blocks))
    disagreements = 0
    for block, figures in enumerate(found.blocks):
        counts = torch.bincount(mine.choice[block][marks], minlength=a.experts + 1)
        assert sum(figures.coverage) == windows().tokens
        assert (torch.tensor(figures.coverage) - counts).abs().max() <= 1
        same = (mine.choice[block] == theirs.choice[block])[marks].double().mean().item()
        assert figures.agreement == pytest.approx(same, abs=1.5 / windows().tokens)
        disagreements += same < 1
        gap = (mine.hidden[block] - theirs.hidden[block])[marks].double()
        assert figures.error == pytest.approx(
            (gap.norm() / theirs.hidden[block][marks].double().norm()).item(), rel=1e-3
        )
        assert figures.error
    assert disagreements
    errors = [figures.error or 0.0 for figures in found.blocks]
    assert max(errors) > 0.01


@pytest.mark.parametrize("layout", ["raw", "native"])
def test_identical_checkpoints_do_not_differ_at_all(tmp_path: Path, layout: str) -> None:
    """Whatever the layout and however they are read."""
    folder = TINY if layout == "raw" else write_tiny(tmp_path)
    same = measure(Weights.open(folder), windows(), Weights.open(TINY), budget=0)
    d = same.divergence
    assert d is not None
    assert (d.kl.value, d.kl.error, d.maximum) == (0, 0, 0)
    assert set(d.percentiles.values()) == {0.0}
    assert (d.ratio.value, d.ratio.error) == (1, 0)
    assert (d.top1.value, d.top1.error) == (1, 0)
    assert d.reference_perplexity == same.perplexity
    assert all((block.agreement, block.error) == (1, 0) for block in same.blocks)


def test_a_reference_changes_nothing_about_the_model(found: Likelihood, changed: Path) -> None:
    alone = measure(Weights.open(changed), windows())
    assert alone.divergence is None
    assert alone.perplexity == found.perplexity
    assert [b.coverage for b in alone.blocks] == [b.coverage for b in found.blocks]
    assert all(b.agreement is None and b.error is None for b in alone.blocks)


def test_neither_budget_nor_slices_change_the_figures(
    found: Likelihood, changed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "TOKENS", 2 * CONTEXT)
    monkeypatch.setattr("zaya_tools.evaluation.likelihood.TOKENS", 3 * CONTEXT)
    monkeypatch.setattr(head, "SLICE_BYTES", 4 * 3 * CONTEXT * 50)
    again = measure(Weights.open(changed), windows(), Weights.open(TINY), budget=0)
    assert found.divergence is not None
    assert again.divergence is not None
    assert again.perplexity.value == pytest.approx(found.perplexity.value, rel=1e-6)
    assert again.divergence.kl.value == pytest.approx(found.divergence.kl.value, rel=1e-4)
    assert [b.coverage for b in again.blocks] == [b.coverage for b in found.blocks]


def test_padding_of_the_last_window_counts_for_nothing() -> None:
    tokens = text()[:100]
    padded = cut(tokens, 64)
    assert padded.ids.shape == (2, 64)
    other = Windows(torch.where(padded.ids == 0, 7, padded.ids), padded.scored)
    weights = Weights.open(TINY)
    assert measure(weights, padded) == measure(weights, other)


def test_every_block_is_reported_as_it_is_done() -> None:
    done: list[int] = []
    weights = Weights.open(TINY)
    measure(weights, cut(text()[:100], 50), advance=done.append)
    measure(weights, cut(text()[:100], 50), weights, advance=done.append)
    assert done == [1] * 2 * tiny()[0].blocks


@pytest.mark.parametrize("field", ["blocks", "hidden_size", "experts", "vocab_size"])
def test_models_that_are_not_the_same_are_not_compared(tmp_path: Path, field: str) -> None:
    base = {"blocks": 2, "hidden_size": 32, "experts": 3, "vocab_size": 64}
    for name, extra in (("a", 0), ("b", 2)):
        write_checkpoint(tmp_path / name, NATIVE, small(**{**base, field: base[field] + extra}))
    model, reference = (Weights.open(tmp_path / name) for name in ("a", "b"))
    with pytest.raises(LayoutError, match=f"{field} = {base[field]}, the reference {base[field] + 2}"):
        measure(model, cut(list(range(20)), 10), reference)


@pytest.mark.filterwarnings("error")
def test_a_model_with_nan_gives_nan(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.down_proj"
    write_tiny(tmp_path, lambda n, t: t.fill_(torch.nan) if n == name else t)
    broken = measure(Weights.open(tmp_path), windows(), Weights.open(TINY))
    assert broken.divergence is not None
    for value in (broken.perplexity.value, broken.divergence.kl.value, broken.divergence.ratio.value):
        assert np.isnan(value)
    assert broken.blocks[1].error == 0
    assert np.isnan(broken.blocks[2].error or 0)


def test_divergences_beyond_the_histogram_are_in_its_last_bin() -> None:
    kl = np.array([0.0, 0.0, 1e-7, 0.5, 100.0])
    zeros = np.zeros(5)
    d = divergence(zeros, zeros, kl, zeros)
    assert sum(d.histogram) == 5
    assert d.histogram[0] == 3
    assert d.histogram[-1] == 1
    assert d.maximum == 100


def test_the_document_has_every_figure(found: Likelihood) -> None:
    document = found.as_dict()
    assert document["tokens"] == found.tokens
    assert set(document["kl"]) == {"mean", "percentiles", "max"}
    assert len(document["kl_histogram"]["edges"]) == len(document["kl_histogram"]["counts"]) + 1
    block = document["blocks"][0]
    assert len(block["expert_tokens"]) == tiny()[0].experts
    assert sum(block["expert_tokens"]) + block["skipped_tokens"] == found.tokens
