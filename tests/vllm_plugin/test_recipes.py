"""Every recipe of `zaya quantize`, on the trained checkpoint, in the engine.

`int4-gptq` alone is not: llm-compressor's pins and vLLM's exclude each other. That its files have the form of
`int4-imatrix`'s is tested beside llm-compressor, in `test_forms.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from zaya_tools import calibrate
from zaya_tools.calibration.data import Choice
from zaya_tools.calibration.run import Settings
from zaya_tools.cli.app import main
from zaya_tools.data import TINY
from zaya_tools.evaluation.text import HELD_OUT, tokenize
from zaya_tools.quantization.recipe import recipe_names

from .engine import ask, running, streaming
from .forms import MIX, write_mix

pytestmark = pytest.mark.vllm

TYPICAL = {
    # Recipes whose kernels all compute in float32 on weights alone agree to rounding.
    "bf16": 1e-5, "int4": 1e-5, "int4-g32": 1e-5, "mxfp4": 1e-5, "nvfp4a16": 1e-5,
    # Activations in 8 bits: where two engines differ in the last bit of float32, rounding may go the other way.
    "fp8": 1e-3, "fp8-block": 1e-3, "fp8-experts": 1e-3, "int4-experts-fp8-attention": 1e-3, "int8": 1e-3,
}  # fmt: skip
"""Nats by which the median log-probability may differ from the block-by-block engine's in float32."""

LEARNT = {
    "int4-imatrix": 1e-5, "int4-awq": 1e-5, "fp8-static": 1e-3, "nvfp4": 1e-3, "int8-smooth": 1e-3, MIX: 1e-3,
}  # fmt: skip
"""The same of recipes that know the inputs, and of a mix of them by block as `--recipe auto` makes it."""


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("statistics") / "stats"
    calibrate(TINY, place, Settings(Choice(samples=12, context=128)))
    return place


def test_every_recipe_is_tried() -> None:
    assert {*TYPICAL, *LEARNT} - {MIX} == {*recipe_names()} - {"int4-gptq"}


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


@pytest.mark.parametrize("recipe", LEARNT)
def test_recipe_that_learns(recipe: str, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = str(write_mix(tmp_path)) if recipe == MIX else recipe
    folder = quantized(tmp_path / "model", monkeypatch, "--recipe", chosen, "--stats", str(statistics))
    assert typical_gap(folder) < LEARNT[recipe]


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4"])
def test_stacked_experts(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized(tmp_path / "model", monkeypatch, "--recipe", recipe, "--expert-layout", "stacked")
    assert typical_gap(folder) < TYPICAL[recipe]
