"""Quantized outputs in transformers' ZayaForCausalLM, decompressed by compressed-tensors, against our own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.test_quantized import _served, median, model_of
from tests.quantization.support import DATA_FREE, LEARNING, geometry
from tests.synthetic import sliding, write_checkpoint
from zaya_tools import quantize
from zaya_tools.calibration.data import Choice
from zaya_tools.data import TINY
from zaya_tools.layouts.native import NATIVE
from zaya_tools.quantization.calibrated import Calibration

A = geometry(tied=False, dtype="float32", attention_bias=True, **sliding(2))
NOISE = 2e-5
ROUNDED = {"nvfp4a16": 2e-2}
"""The library gives NVFP4's three factors multiplied in bfloat16; ours are exact."""


@pytest.fixture
def linear_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are built with one linear layer a matrix of an expert, as their quantized tensors are stored."""
    pytest.importorskip("llmcompressor")
    from compressed_tensors.quantization.lifecycle import forward
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
    from transformers.models.zaya import modeling_zaya

    linear = LinearExperts2D.get_linear_experts_cls(modeling_zaya.ZayaExperts)
    build = modeling_zaya.ZayaSparseMoeBlock.__init__

    def with_linear_experts(block: Any, config: Any, *rest: Any, **options: Any) -> None:
        build(block, config, *rest, **options)
        block.experts = linear(config)

    monkeypatch.setattr(modeling_zaya.ZayaSparseMoeBlock, "__init__", with_linear_experts)
    monkeypatch.setattr(forward, "compute_dynamic_scales_and_zp", _served(forward.compute_dynamic_scales_and_zp))


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import CompressedTensorsConfig, ZayaForCausalLM

    model, report = ZayaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )  # fmt: skip
    assert {kind: list(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")} == {
        "missing_keys": [], "unexpected_keys": [], "mismatched_keys": [],
    }  # fmt: skip
    for parameter in model.parameters():  # FP4 comes out of the library in bfloat16
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    with torch.no_grad():
        found: Any = model.eval()(ids, use_cache=False).logits
    assert isinstance(found, torch.Tensor)
    return found


# Not nvfp4: its 4-bit activations turn the library's rounding of weights to bfloat16 into other experts.
@pytest.mark.parametrize("recipe", [name for name in LEARNING if name != "nvfp4"])
def test_logits_of_recipes_that_learn_agree(recipe: str, linear_experts: None, tmp_path: Path) -> None:
    """Smoothed weights, static activation scales, NVFP4 activations, GPTQ: all of it means the same there."""
    a = replace(A, vocab_size=320)
    write_checkpoint(tmp_path / "source", NATIVE, a, dtype="F32")
    given = Calibration(choice=Choice(samples=16, context=64), tokenizer=str(TINY))
    quantize(tmp_path / "source", tmp_path / "out", recipe, calibration=given)
    ids = torch.randint(0, a.vocab_size, (24, 4), generator=torch.Generator().manual_seed(5))
    ours, theirs = model_of(tmp_path / "out").logits(ids), logits(tmp_path / "out", ids)
    difference, lost = median(ours - theirs), median(ours - model_of(tmp_path / "source").logits(ids))
    assert difference < ROUNDED.get(recipe, NOISE)
    assert lost > 10 * difference


@pytest.mark.parametrize("recipe", [name for name in DATA_FREE if name != "bf16"])
def test_logits_agree(recipe: str, linear_experts: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", NATIVE, A, dtype="F32")
    quantize(tmp_path / "source", tmp_path / "out", recipe)
    ids = torch.randint(0, A.vocab_size, (24, 4), generator=torch.Generator().manual_seed(5))
    ours, theirs = model_of(tmp_path / "out").logits(ids), logits(tmp_path / "out", ids)
    # In the median: rounding noise moves an activation across a boundary now and then, or a token to another expert.
    difference = median(ours - theirs)
    assert difference < ROUNDED.get(recipe, NOISE)
    full = model_of(tmp_path / "source").logits(ids)
    assert median(ours - full) > 10 * difference, "quantization has to be seen in the logits"
