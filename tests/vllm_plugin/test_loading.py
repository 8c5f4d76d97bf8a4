"""What vLLM loads without a word, and serves wrong, is an error with the plugin."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.support import Edit, drop, put, quantization_config, write_quantized
from tests.model.support import random_tensors
from tests.synthetic import LAYOUTS, config_of, split, write_tensors
from zaya_tools.architecture import native_config
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.vllm_engine import serve
from zaya_tools.evaluation.windows import cut
from zaya_tools.parameters import Role

from .engine import BASE, ask, geometry, prompts_of, running, streaming, write_random
from .test_quantized import SMALL

pytestmark = pytest.mark.vllm

PROJECTION = "model.layers.1.self_attn.o_proj"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"
Tensors = dict[str, torch.Tensor]


def refused(folder: Path, match: str) -> None:
    with pytest.raises(Exception, match=match), running(folder):
        pass


def write(folder: Path, edit: Callable[[Tensors], Any], **config: Any) -> Path:
    tensors = dict(random_tensors(BASE))
    edit(tensors)
    write_tensors(folder, tensors, {**native_config(BASE), **config})
    return folder


@pytest.mark.parametrize(
    "name",
    [
        f"{PROJECTION}.weight",
        "model.layers.0.mlp.gate.balancing_biases",
        "model.layers.2.mlp.experts.down_proj",
        "model.layers.1.self_attn.qkv_proj.conv_qk_grouped.bias",
        "model.norm.weight",
    ],
)
def test_a_missing_tensor(tmp_path: Path, name: str) -> None:
    refused(write(tmp_path, drop(name)), name.replace(".", r"\."))


def test_a_surplus_tensor(tmp_path: Path) -> None:
    folder = write(tmp_path, put("model.layers.1.mlp.shared.weight", torch.zeros(2, 2)))
    refused(folder, r"model\.layers\.1\.mlp\.shared\.weight")


def test_more_blocks_than_the_config_has(tmp_path: Path) -> None:
    layers = native_config(BASE)["layer_types"][:2]
    refused(write(tmp_path, lambda _: None, num_hidden_layers=2, layer_types=layers), "blocks = 2, the tensors say 3")


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    refused(write(tmp_path, put(f"{PROJECTION}.weight", torch.zeros(64, 1))), r"o_proj\.weight has shape \[64, 1\]")


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    embedding = random_tensors(BASE)["model.embed_tokens.weight"]
    refused(write(tmp_path / "other", put("lm_head.weight", embedding + 1)), "differs from the embedding")
    with running(write(tmp_path / "same", put("lm_head.weight", embedding.clone()))) as llm:
        (answer,) = ask(llm, prompts_of(BASE, 9))
    assert answer.gap(streaming(tmp_path / "same"))[0].max() < 1e-4


def test_the_raw_layout(tmp_path: Path) -> None:
    write_tensors(tmp_path, split(LAYOUTS["raw"], BASE, random_tensors(BASE)), config_of(LAYOUTS["native"], BASE))
    refused(tmp_path, "raw layout")


def in_full(name: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        rows, columns = tensors[f"{name}.weight"].shape
        del tensors[f"{name}.weight_scale"]
        tensors[f"{name}.weight"] = torch.zeros(rows, columns, dtype=torch.bfloat16)

    return edit


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (drop(f"{PROJECTION}.weight_scale"), r"o_proj\.weight_scale"),
        (drop(f"{EXPERT}.weight_scale"), r"experts\.2\.up_proj\.weight_scale"),
        (drop(f"{EXPERT}.weight"), r"experts\.2\.up_proj\.weight"),
        (in_full(EXPERT), r"experts\.2\.up_proj.* is not quantized as the other experts"),
        (in_full(PROJECTION), "o_proj"),
    ],
    ids=["a linear scale", "an expert's scale", "an expert's weight", "an expert in full", "a linear layer in full"],
)
def test_a_hole_in_a_quantized_checkpoint(tmp_path: Path, edit: Edit, match: str) -> None:
    refused(write_quantized(tmp_path, "FP8_DYNAMIC", architecture=SMALL, edit=edit), match)


def test_a_scale_of_zero(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[f"{EXPERT}.weight_scale"][3] = 0

    folder = write_quantized(tmp_path, "FP8_DYNAMIC", architecture=SMALL, edit=edit)
    refused(folder, r"experts\.2\.up_proj\.weight_scale is not finite and positive: 1 of 128 zero or negative")


def test_heads_without_kernels(tmp_path: Path) -> None:
    """Nothing is wrong with the checkpoint, so what `zaya validate --engine vllm` says of it has a hint."""
    folder = write_random(tmp_path, geometry(head_dim=16))
    message = "vLLM could not run .*: vLLM's CPU_ATTN has no kernels for heads of 16 channels, only of 32, 64"
    with pytest.raises(ZayaError, match=message) as caught:
        serve(folder, cut([1, 2, 3, 4], 4), [], 2, "float32", sys.executable)
    assert "without --engine vllm" in str(caught.value.hint)


def test_groups_of_another_size(tmp_path: Path) -> None:
    stated = quantization_config("W4A16")
    stated["config_groups"]["group_0"]["weights"]["group_size"] = 64
    folder = write_quantized(tmp_path, "W4A16", architecture=SMALL, config={"quantization_config": stated})
    refused(folder, r"weight_scale \(\w+ \[128, 4\], expected \w+ \[128, 2\]\)")


def test_a_config_that_leaves_the_experts_out(tmp_path: Path) -> None:
    folder = write_quantized(
        tmp_path, "FP8_DYNAMIC", architecture=SMALL, ignore=("lm_head", r"re:.*mlp\..*", r"re:.*conv_qk_.*")
    )
    refused(folder, "stored quantized though quantization_config does not say so")


def test_one_scale_tensor_for_both_halves_of_a_stack(tmp_path: Path) -> None:
    """Loaded by vLLM without a word, with the up half of every expert never filled."""

    def halve(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("gate_up_proj.weight_scale")]:
            tensors[name] = tensors[name][:, : SMALL.expert_width].contiguous()

    folder = write_quantized(
        tmp_path, "FP8_DYNAMIC", architecture=SMALL, layout=LAYOUTS["native"], roles=(Role.EXPERT,), edit=halve,
        ignore=(r"re:^(?!.*experts).*$",),
    )  # fmt: skip
    refused(folder, r"gate_up_proj\.weight_scale \(\w+ \[4, 128, 1\], expected \w+ \[4, 256, 1\]\)")


def test_one_scale_for_gate_and_up_fills_both(tmp_path: Path) -> None:
    """A scale an expert, shared by the halves of a fused matrix."""

    def share(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("gate_up_proj.weight_scale")]:
            weight = name.removesuffix(".weight_scale")
            values = tensors[weight].float() * tensors[name].float()
            scale = values.abs().amax(dim=(1, 2)) / 448
            tensors[weight] = (values / scale[:, None, None]).to(torch.float8_e4m3fn)
            tensors[name] = scale[:, None]
            down = name.replace("gate_up_proj", "down_proj")
            values = tensors[down.removesuffix(".weight_scale")].float() * tensors[down].float()
            scale = values.abs().amax(dim=(1, 2)) / 448
            tensors[down.removesuffix(".weight_scale")] = (values / scale[:, None, None]).to(torch.float8_e4m3fn)
            tensors[down] = scale[:, None]

    stated = quantization_config("FP8_DYNAMIC", (r"re:^(?!.*experts).*$",))
    stated["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    folder = write_quantized(
        tmp_path, "FP8_DYNAMIC", architecture=SMALL, layout=LAYOUTS["native"], roles=(Role.EXPERT,), edit=share,
        config={"quantization_config": stated},
    )  # fmt: skip
    with running(folder) as llm:
        answers = ask(llm, prompts_of(SMALL, 1, 20, 40))
    gaps = torch.cat([answer.gap(streaming(folder))[0] for answer in answers])
    assert gaps.median() < 1e-5
