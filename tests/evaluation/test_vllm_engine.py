"""What `zaya validate --engine vllm` makes of vLLM's answers, and what it says where there is no vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluation.support import write_quantized
from tests.model.support import BASE, random_ids, random_tensors
from tests.synthetic import LAYOUTS, config_of, split, write_tensors
from zaya_tools.architecture import native_config
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.evaluation import vllm_engine
from zaya_tools.evaluation.likelihood import measure, score_tokens
from zaya_tools.evaluation.validation import Settings, validate
from zaya_tools.evaluation.verdict import DEFAULTS, FULL
from zaya_tools.evaluation.vllm_engine import NATIVE_MODULE, OURS, Served, judge, serve, typical
from zaya_tools.evaluation.windows import Windows, cut
from zaya_tools.model.weights import Weights

LIMITS = DEFAULTS[FULL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    write_tensors(place, random_tensors(BASE), native_config(BASE))
    return place


@pytest.fixture(scope="module")
def windows() -> Windows:
    # An overlap and a padded last window: not every token counts.
    return cut(random_ids(BASE, 77).tolist(), 20, 15)


@pytest.fixture(scope="module")
def right(folder: Path, windows: Windows) -> Served:
    """The answers of an engine without rounding."""
    weights = Weights.open(folder)
    logprobs, first = [], []
    for ids, row in zip(windows.ids, windows.scored, strict=True):
        own = ids[: int(row.nonzero().max()) + 1]
        whole = torch.arange(len(own)) > 0
        nll, top = score_tokens(weights, Windows(own[None], whole[None]))
        logprobs.append(-nll)
        first.append((top == own[1:].numpy()).astype(np.float64))
    return Served("0.32.0", f"{OURS}model.ZayaForCausalLM", tuple(logprobs), tuple(first), ())


def test_tokens_are_scored_as_the_likelihood_scores_them(folder: Path, windows: Windows) -> None:
    weights = Weights.open(folder)
    nll, top = score_tokens(weights, windows)
    assert len(nll) == len(top) == windows.tokens
    assert np.exp(nll.mean()) == measure(weights, windows).perplexity.value


def test_equal_answers_pass(folder: Path, windows: Windows, right: Served) -> None:
    found = judge(right, Weights.open(folder), windows, LIMITS, Weights.open(folder))
    assert not found.findings
    figures = found.figures
    assert figures["tokens"] == windows.tokens
    assert figures["stream_gap"]["max"] < 1e-5
    assert figures["stream_ratio"]["value"] == pytest.approx(1, abs=1e-6)
    assert figures["perplexity_ratio"]["value"] == pytest.approx(1, abs=1e-6)
    assert figures["stream_same_first"] == 1
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_native_class_is_trusted_too(folder: Path, windows: Windows, right: Served) -> None:
    native = replace(right, model_class=f"{NATIVE_MODULE}.ZayaForCausalLM")
    assert not judge(native, Weights.open(folder), windows, LIMITS).findings
    assert native.trusted
    assert not native.ours


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: replace(s, model_class="vllm.model_executor.models.transformers.moe.M"), "does not know ZAYA1"),
        (lambda s: replace(s, logprobs=(s.logprobs[0] * np.nan, *s.logprobs[1:])), "not finite"),
        (lambda s: replace(s, logprobs=tuple(row + 1e-3 for row in s.logprobs)), "0.001 nats from those"),
        # Few tokens far away leave the median where it was.
        (lambda s: replace(s, logprobs=(s.logprobs[0] - 0.5, *s.logprobs[1:])), "perplexity in vLLM is"),
    ],
    ids=["fallback", "nan", "shifted", "a few far away"],
)  # fmt: skip
def test_wrong_answers_fail(folder: Path, windows: Windows, right: Served, change: object, message: str) -> None:
    assert callable(change)
    found = judge(change(right), Weights.open(folder), windows, LIMITS)
    assert any(message in finding.message for finding in found.failures)


def test_a_worse_model_than_its_reference_fails(folder: Path, windows: Windows, right: Served, tmp_path: Path) -> None:
    tensors = {**random_tensors(BASE)}
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 0.01  # knows nothing, so is never surprised
    write_tensors(tmp_path, tensors, native_config(BASE))
    found = judge(right, Weights.open(folder), windows, LIMITS, Weights.open(tmp_path))
    assert any("times the reference's" in finding.message for finding in found.failures)


@pytest.mark.parametrize(("preset", "limit"), [("W4A16", 1e-4), ("FP8_DYNAMIC", 0.02)])
def test_only_rounded_activations_give_the_engines_more_room(tmp_path: Path, preset: str, limit: float) -> None:
    folder = write_quantized(tmp_path, preset)
    assert typical(Weights.open(folder)) == limit
    assert typical(Weights.open(folder, dtype=torch.bfloat16)) == 0.1


def test_a_raw_checkpoint_is_not_served(tmp_path: Path) -> None:
    raw = LAYOUTS["raw"]
    write_tensors(tmp_path, split(raw, BASE, random_tensors(BASE)), config_of(raw, BASE))
    with pytest.raises(LayoutError, match="raw layout, which vLLM cannot serve"):
        serve(tmp_path, cut([1, 2, 3, 4], 4), [], 2, "float32")


def test_the_interpreter_is_for_the_engine(folder: Path) -> None:
    with pytest.raises(ZayaError, match="an interpreter for vLLM"):
        validate(folder, settings=Settings(vllm_python="python3"))


def test_the_requests_are_what_is_scored(folder: Path, windows: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def answer(interpreter: str, request: dict[str, object], patience: float) -> dict[str, object]:
        asked.append({**request, "patience": patience})
        return {"vllm": "0.32.0", "model_class": "m", "logprobs": [], "ranked_first": [], "generated": [[5, 6]]}

    monkeypatch.setattr(vllm_engine, "check_interpreter", lambda python: python)
    monkeypatch.setattr(vllm_engine, "ask", answer)
    served = serve(folder, windows, [[1, 2]], 2, "bfloat16", patience=7.0)
    assert served.generated == ((5, 6),)
    lengths = [len(row) for row in asked[0]["windows"]]  # type: ignore[attr-defined]
    assert lengths == [20, 20, 20, 20, 17]
    assert asked[0]["dtype"] == "bfloat16"
    assert asked[0]["prompts"] == [[1, 2]]
    assert asked[0]["patience"] == 7
