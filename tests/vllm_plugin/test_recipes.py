"""Every recipe of `zaya quantize`, on the trained checkpoint, in the engine."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from zaya_tools.cli.app import main
from zaya_tools.data import TINY
from zaya_tools.evaluation.text import HELD_OUT, tokenize

from .engine import ask, running, streaming

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("zaya_tools.cli.quantize") is None, reason="there is no `zaya quantize` here"),
]

TYPICAL = {
    # Recipes whose kernels all compute in float32 on weights alone agree to rounding.
    "bf16": 1e-5, "int4": 1e-5, "int4-g32": 1e-5, "mxfp4": 1e-5, "nvfp4a16": 1e-5,
    # Activations in 8 bits: where two engines differ in the last bit of float32, rounding may go the other way.
    "fp8": 1e-3, "fp8-block": 1e-3, "fp8-experts": 1e-3, "int4-experts-fp8-attention": 1e-3, "int8": 1e-3,
}  # fmt: skip
"""Nats by which the median log-probability may differ from the block-by-block engine's in float32."""


def quantized(place: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    monkeypatch.setattr(sys, "argv", ["zaya", "quantize", str(TINY), str(place), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    return place


def typical_gap(folder: Path) -> float:
    tokens = tokenize(TINY, HELD_OUT, 600)
    prompts = [tokens[start : start + 90] for start in range(0, 600, 100)]
    with running(folder) as llm:
        answers = ask(llm, prompts)
    model = streaming(folder)
    return torch.cat([answer.gap(model)[0] for answer in answers]).median().item()


@pytest.mark.parametrize("recipe", TYPICAL)
def test_recipe(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized(tmp_path / "model", monkeypatch, "--recipe", recipe)
    assert typical_gap(folder) < TYPICAL[recipe]


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4"])
def test_stacked_experts(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized(tmp_path / "model", monkeypatch, "--recipe", recipe, "--expert-layout", "stacked")
    assert typical_gap(folder) < TYPICAL[recipe]
