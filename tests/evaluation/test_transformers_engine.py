from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.model.support import BASE, random_ids, random_tensors
from tests.model.support import transformers_model as in_memory
from tests.synthetic import LAYOUTS, config_of, split, write_tensors
from zaya_tools.data import TINY
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.evaluation import likelihood, transformers_engine
from zaya_tools.evaluation.windows import cut
from zaya_tools.layouts.native import NATIVE
from zaya_tools.model.weights import Weights

from .oracles import log_probabilities, text, tiny, write_tiny


def write(folder: Path, changes: Mapping[str, Tensor | None] | None = None, layout: str = "native") -> Path:
    """A random model whose skip class is alive; None removes a tensor."""
    tensors = split(LAYOUTS[layout], BASE, random_tensors(BASE))
    for name, value in (changes or {}).items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    write_tensors(folder, tensors, config_of(LAYOUTS[layout], BASE))
    return folder


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_balancing_biases_are_as_stored(tmp_path: Path, dtype: torch.dtype, stored: torch.dtype) -> None:
    names = [name for name in random_tensors(BASE) if name.endswith("balancing_biases")]
    kept = {name: random_tensors(BASE)[name].to(stored) for name in names}
    model = transformers_engine.load(write(tmp_path, kept), dtype)
    buffers = dict(model.named_buffers())
    assert len(names) == BASE.blocks
    for name in names:
        assert buffers[name].dtype == torch.float32
        assert torch.equal(buffers[name], kept[name].float())
        assert buffers[name][-1] > -0.9  # which transformers would have made it
    assert not model.training
    assert model.dtype == dtype


def test_logits_are_those_of_the_weights_in_memory(tmp_path: Path) -> None:
    ids = random_ids(BASE, 2, 20)
    with torch.no_grad():
        found = transformers_engine.load(write(tmp_path))(ids, use_cache=False).logits
        expected = in_memory(BASE)(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # The random model skips: a lost skip bias is seen.
    biases = {n: t.clone() for n, t in random_tensors(BASE).items() if n.endswith("balancing_biases")}
    for bias in biases.values():
        bias[-1] = -1.0
    other = transformers_engine.load(write(tmp_path / "clobbered", biases))
    with torch.no_grad():
        assert (other(ids, use_cache=False).logits - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.norm.weight",
                                  "model.layers.2.mlp.gate.balancing_biases"])  # fmt: skip
def test_a_missing_tensor_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LayoutError, match=name.replace(".", r"\.")):
        transformers_engine.load(write(tmp_path, {name: None}))


def test_a_surplus_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.shared"):
        transformers_engine.load(write(tmp_path, {"model.layers.1.mlp.shared.weight": torch.zeros(2, 2)}))


@pytest.mark.parametrize("kind", ["missing_keys", "unexpected_keys", "mismatched_keys"])
def test_what_transformers_reports_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from transformers import ZayaForCausalLM

    report: dict[str, set[str]] = {key: set() for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    report[kind] = {"model.some.weight"}
    monkeypatch.setattr(ZayaForCausalLM, "from_pretrained", lambda *_, **__: (torch.nn.Linear(1, 1), report))
    with pytest.raises(LayoutError, match=r"did not load .* completely: model\.some\.weight"):
        transformers_engine.load(write(tmp_path))


@pytest.mark.parametrize("layout", ["raw", "smoe", "native per expert"])
def test_only_the_native_layout_is_loaded(tmp_path: Path, layout: str) -> None:
    """transformers would load the rest with random numbers in place of what it does not find."""
    with pytest.raises(LayoutError, match="transformers cannot load") as caught:
        transformers_engine.load(write(tmp_path, layout=layout))
    assert caught.value.hint == "use --engine stream"


def test_old_spellings_are_refused(tmp_path: Path) -> None:
    """We read them; transformers does not."""
    old: dict[str, Tensor | None] = {
        "model.final_norm.weight": random_tensors(BASE)["model.norm.weight"],
        "model.norm.weight": None,
    }
    folder = write(tmp_path, old)
    Weights.open(folder)
    with pytest.raises(LayoutError, match=r"model\.(final_)?norm\.weight"):
        transformers_engine.load(folder)


@pytest.mark.parametrize(("context", "stride"), [(64, None), (64, 40)])
def test_figures_are_those_of_the_streaming_engine(tmp_path: Path, context: int, stride: int | None) -> None:
    reference = write_tiny(tmp_path / "reference")
    model = write_tiny(tmp_path / "model", lambda n, t: t * 1.05 if n.endswith("o_proj.weight") else t)
    windows = cut(text()[:500], context, stride)
    found = transformers_engine.measure(model, windows, reference)
    streamed = likelihood.measure(Weights.open(model), windows, Weights.open(TINY))
    assert found.blocks == ()
    assert found.tokens == streamed.tokens
    assert found.divergence is not None
    assert streamed.divergence is not None
    for mine, theirs in (
        (found.perplexity, streamed.perplexity),
        (found.divergence.reference_perplexity, streamed.divergence.reference_perplexity),
        (found.divergence.ratio, streamed.divergence.ratio),
    ):
        assert mine.value == pytest.approx(theirs.value, rel=1e-5)
        assert mine.error == pytest.approx(theirs.error, rel=1e-2)
    assert found.divergence.kl.value == pytest.approx(streamed.divergence.kl.value, rel=1e-2)
    assert found.divergence.kl.value > 1e-6
    assert found.divergence.top1.value == pytest.approx(streamed.divergence.top1.value, abs=1.5 / found.tokens)
    alone = transformers_engine.measure(model, windows)
    assert alone.perplexity == found.perplexity
    assert alone.divergence is None


def test_perplexity_of_windows_side_by_side(tmp_path: Path) -> None:
    model = transformers_engine.load(write_tiny(tmp_path))
    tokens = text()[:150]  # two windows, and a rest
    nats = [
        -log_probabilities(model, tokens[start : start + 64])[place - 1, tokens[start + place]].item()
        for start in (0, 64)
        for place in range(1, 64)
    ]
    expected = math.exp(sum(nats) / len(nats))
    for batch in (1, 8):
        assert transformers_engine.perplexity(model, tokens, 64, batch) == pytest.approx(expected, rel=1e-5)
    for context in (1, 151):
        with pytest.raises(ZayaError):
            transformers_engine.perplexity(model, tokens, context)


def test_an_untied_head_is_loaded(tmp_path: Path) -> None:
    a = replace(tiny()[0], tied=False)
    head = torch.randn(a.vocab_size, a.hidden_size)
    write_tensors(tmp_path, {**tiny()[1], "lm_head.weight": head}, config_of(NATIVE, a))
    assert torch.equal(transformers_engine.load(tmp_path).lm_head.weight, head)
