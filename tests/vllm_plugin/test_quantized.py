"""Quantized checkpoints: loaded by vLLM's scheme matching, computed by its kernels or in torch where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.support import IGNORE, PRESETS, quantization_config, write_quantized
from tests.synthetic import LAYOUTS
from zaya_tools.model.quantized import int8_tokens
from zaya_tools.parameters import Role

from .engine import ask, geometry, model_of, prompts_of, running, streaming

pytestmark = pytest.mark.vllm

SMALL = geometry(blocks=2, hidden_size=128, expert_width=128, experts=4, router_width=16, dtype="bfloat16")
LENGTHS = (1, 2, 17, 40, 33, 60)

EMULATED_LINEAR = {"FP8", "FP8_BLOCK", "W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "NVFP4", "MXFP4A16"}
"""Presets whose linear layers no CPU kernel takes in float32."""


def typical_gap(folder: Path, dtype: str = "float32", **settings: Any) -> float:
    """The median difference to the block-by-block engine: rounding flips a router now and then, which gives a tail."""
    with running(folder, dtype=dtype, **settings) as llm:
        answers = ask(llm, prompts_of(SMALL, *LENGTHS))
    model = streaming(folder, getattr(torch, dtype))
    gaps = torch.cat([answer.gap(model)[0] for answer in answers])
    assert torch.isfinite(gaps).all()
    return gaps.median().item()


@pytest.mark.parametrize("preset", PRESETS)
def test_experts_one_by_one(tmp_path: Path, preset: str) -> None:
    folder = write_quantized(tmp_path, preset, architecture=SMALL)
    with running(folder) as llm:
        layer = model_of(llm).model.layers[1]
        assert type(layer.mlp.experts.routed_experts.quant_method).__name__ == "EmulatedExperts"
        emulated = type(layer.self_attn.o_proj).__name__ == "EmulatedLinear"
        assert emulated == (preset in EMULATED_LINEAR)
        answers = ask(llm, prompts_of(SMALL, *LENGTHS))
    model = streaming(folder)
    gaps = torch.cat([answer.gap(model)[0] for answer in answers])
    assert gaps.median() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_activations_are_rounded_as_the_kernel_rounds_them(dtype: torch.dtype) -> None:
    from vllm import _custom_ops as ops

    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 4, 64)[:, None]
    rows[5] = 0
    rows = rows.to(dtype)
    values, scales, _ = ops.onednn_scaled_int8_quant(rows)
    assert torch.equal(int8_tokens(rows), (values.float() * scales).to(dtype))


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8", "W4A16", "MXFP4A16", "NVFP4A16"])
def test_stacked_experts(tmp_path: Path, preset: str) -> None:
    """As the published FP8-Experts and MXFP4-Experts name them."""
    folder = write_quantized(
        tmp_path, preset, architecture=SMALL, layout=LAYOUTS["native"], roles=(Role.EXPERT,),
        ignore=(r"re:^(?!.*experts).*$",),
    )  # fmt: skip
    assert typical_gap(folder) < 1e-5


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "W4A16", "W8A8"])
def test_bfloat16(tmp_path: Path, preset: str) -> None:
    assert typical_gap(write_quantized(tmp_path, preset, architecture=SMALL), "bfloat16") < 0.05


@pytest.mark.parametrize("preset", ["W4A16", "FP8_DYNAMIC"])
def test_compiled(tmp_path: Path, preset: str) -> None:
    """The compiler sees neither what is emulated nor, on a CPU, an opaque layer of experts."""
    folder = write_quantized(tmp_path, preset, architecture=SMALL)
    assert typical_gap(folder, enforce_eager=False) < 1e-5


def test_experts_alone_with_a_target_pattern(tmp_path: Path) -> None:
    stated = quantization_config("FP8_DYNAMIC", IGNORE)
    stated["config_groups"]["group_0"]["targets"] = [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"]
    folder = write_quantized(
        tmp_path, "FP8_DYNAMIC", architecture=SMALL, roles=(Role.EXPERT,), config={"quantization_config": stated}
    )
    with running(folder) as llm:
        layer = model_of(llm).model.layers[0]
        assert type(layer.mlp.experts.routed_experts.quant_method).__name__ == "EmulatedExperts"
        assert layer.self_attn.o_proj.weight.dtype == torch.float32
    assert typical_gap(folder) < 1e-5
