from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import write_tensors
from zaya_tools.architecture import native_config
from zaya_tools.data import TINY
from zaya_tools.evaluation.findings import CheckResult
from zaya_tools.evaluation.generation import check_generation, generate
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.verdict import DEFAULTS, FULL, judge
from zaya_tools.evaluation.windows import cut
from zaya_tools.model import block as block_module
from zaya_tools.model.cca import mix_packed
from zaya_tools.model.weights import Weights

from .oracles import text, tiny, tiny_in_transformers, write_tiny

NEW = 20


def prompts(count: int = 3, length: int = 24) -> list[list[int]]:
    return [list(text()[start : start + length]) for start in range(0, 500 * count, 500)]


def check(folder: Path, reference: Path | None = None, dtype: torch.dtype = torch.float32) -> CheckResult:
    against = Weights.open(reference, dtype=dtype) if reference else None
    return check_generation(Weights.open(folder, dtype=dtype), prompts(), NEW, against)[0]


def messages(result: CheckResult) -> list[str]:
    return [finding.message for finding in result.failures]


@pytest.mark.parametrize("resident", [True, False], ids=["in memory", "read for every step"])
@pytest.mark.parametrize("length", [1, 3, 24])
def test_continuations_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch, resident: bool, length: int) -> None:
    monkeypatch.setattr(Weights, "fits", lambda _: resident)
    model, given = tiny_in_transformers(), prompts(length=length)
    with torch.no_grad():
        made = model.generate(
            torch.tensor(given), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    found = generate(Weights.open(TINY), given, NEW)
    assert [list(c.prompt) for c in found] == given
    assert [list(c.tokens) for c in found] == made[:, length:].tolist()
    for one, ids in zip(found, made, strict=True):
        with torch.no_grad():
            log = model(ids[None, :-1], use_cache=False).logits[0, length - 1 :].log_softmax(-1)
        assert one.gap < 1e-3
        assert one.entropy == pytest.approx(-(log.exp() * log).sum(-1).mean().item(), rel=1e-4)


def test_a_sound_model_passes() -> None:
    result = check(TINY, TINY)
    assert result.findings == ()
    assert result.figures["agreement"] == 1
    assert result.figures["largest_gap"] < 1e-3
    assert result.figures["prompts"] == 3
    assert result.figures["new_tokens"] == NEW
    assert result.figures["entropy"] == result.figures["reference_entropy"]


def test_bfloat16_rounds_and_passes() -> None:
    assert check(TINY, TINY, torch.bfloat16).findings == ()


Mix = Callable[..., Any]


def without_history(projected: Any, convolutions: Any, packing: Any, history: Tensor, delayed: Tensor) -> Any:
    """Neither the convolutions nor the delayed value reach back into the state."""
    forgetful = replace(packing, has_state=torch.zeros_like(packing.has_state))
    return mix_packed(projected, convolutions, forgetful, history, delayed)


def without_convolution_history(
    projected: Any, convolutions: Any, packing: Any, history: Tensor, delayed: Tensor
) -> Any:
    history.zero_()
    return mix_packed(projected, convolutions, packing, history, delayed)


def without_delayed_value(projected: Any, convolutions: Any, packing: Any, history: Tensor, delayed: Tensor) -> Any:
    delayed.zero_()
    return mix_packed(projected, convolutions, packing, history, delayed)


def never_saved(projected: Any, convolutions: Any, packing: Any, history: Tensor, delayed: Tensor) -> Any:
    return mix_packed(projected, convolutions, packing, history.clone(), delayed.clone())


def without_values(projected: Any, convolutions: Any, packing: Any, history: Tensor, delayed: Tensor) -> Any:
    """What goes to the cache is not what was computed."""
    heads = mix_packed(projected, convolutions, packing, history, delayed)
    return heads._replace(value=heads.value.flip(-1))


@pytest.mark.parametrize(
    "broken", [without_history, without_convolution_history, without_delayed_value, never_saved, without_values]
)
def test_a_broken_decode_state_fails_though_likelihoods_are_fine(monkeypatch: pytest.MonkeyPatch, broken: Mix) -> None:
    monkeypatch.setattr(block_module, "mix_packed", broken)
    (message,) = messages(check(TINY, TINY))  # the reference is no better: it is told by the full pass
    assert "the state is wrong" in message
    likelihood = measure(Weights.open(TINY), cut(text()[:300], 64), Weights.open(TINY))
    assert judge(likelihood, DEFAULTS[FULL], tiny()[0].vocab_size).failures == ()


def test_a_state_of_nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(projected: Any, convolutions: Any, packing: Any, history: Tensor, delayed: Tensor) -> Any:
        history.fill_(torch.nan)
        return mix_packed(projected, convolutions, packing, history, delayed)

    monkeypatch.setattr(block_module, "mix_packed", poisoned)
    assert any("the state is wrong" in message for message in messages(check(TINY)))


def test_a_model_that_only_guesses_fails(tmp_path: Path) -> None:
    write_tiny(tmp_path, lambda name, t: t * 0.01 if name == "model.norm.weight" else t)
    (message,) = messages(check(tmp_path))
    assert message.startswith("the model only guesses: 5.7")
    assert f"{math.log(tiny()[0].vocab_size):.2f} is uniform" in message


def test_a_model_that_repeats_itself_fails_where_its_reference_does_not(tmp_path: Path) -> None:
    architecture, tensors = tiny()
    biased = replace(architecture, head_bias=True)
    values = dict(tensors)
    values["model.norm.weight"] = torch.zeros_like(values["model.norm.weight"])
    values["lm_head.bias"] = torch.zeros(biased.vocab_size)
    values["lm_head.bias"][101] = 12.0
    write_tensors(tmp_path, values, native_config(biased))
    (message,) = messages(check(tmp_path, TINY))
    assert message.startswith("the model repeats itself (94% of its 4-token runs) where the reference does not (")
    # Alone, or beside one that does the same, repetition is a property of model and text.
    assert messages(check(tmp_path)) == []
    assert messages(check(tmp_path, tmp_path)) == []
    assert check(tmp_path).figures["repetition"] == pytest.approx(1 - 1 / (NEW - 3))
    assert 0 <= check(tmp_path, TINY).figures["agreement"] < 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_of_any_prompt_is_a_fault(tmp_path: Path, place: int) -> None:
    """Only one prompt meets the token whose embedding is broken."""
    architecture, tensors = tiny()
    values = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    values["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    values["model.embed_tokens.weight"][301] = torch.nan
    write_tensors(tmp_path, values, native_config(replace(architecture, tied=False)))
    given = prompts()
    assert not check_generation(Weights.open(tmp_path), given, 4)[0].failures
    given[place][-1] = 301
    result = check_generation(Weights.open(tmp_path), given, 4)[0]
    assert messages(result) == ["the logits of the continuations are not finite"]
    assert math.isnan(result.figures["largest_gap"])


def test_agreement_is_the_share_before_the_first_difference(tmp_path: Path) -> None:
    def noisy(name: str, tensor: Tensor) -> Tensor:
        if ".experts." not in name:
            return tensor
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
        return (tensor.float() + 0.3 * noise).to(tensor.dtype)

    write_tiny(tmp_path, noisy)
    result, mine, theirs = check_generation(Weights.open(tmp_path), prompts(), NEW, Weights.open(TINY))
    shares = []
    for one, other in zip(mine, theirs, strict=True):
        same = 0
        while same < NEW and one.tokens[same] == other.tokens[same]:
            same += 1
        shares.append(same / NEW)
    assert result.figures["agreement"] == pytest.approx(sum(shares) / len(shares))
    assert result.figures["agreement"] < 1
    assert not result.failures  # another model, but a sound one


@pytest.mark.parametrize("new", [1, 2, 3])
def test_continuations_too_short_to_repeat_themselves(new: int) -> None:
    result = check_generation(Weights.open(TINY), prompts(1), new, Weights.open(TINY))[0]
    assert result.figures["repetition"] == 0
    assert not result.failures
