"""What config.json says about quantization against the tensors; sound quantized checkpoints show nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.evaluation.support import (
    EVERYTHING_ELSE,
    EXPERTS,
    GATE,
    IGNORE,
    PRESETS,
    SMALL,
    UP,
    check,
    drop,
    failing,
    put,
    quantized_tensors,
    write_quantized,
)
from tests.synthetic import write_checkpoint
from zaya_tools.evaluation.opened import Opened, open_model
from zaya_tools.evaluation.quantized import form_faults
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import Role


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def test_one_scale_tensor_for_both_halves_of_a_stack_fails(folder: Path) -> None:
    """Loaded without a word, and every expert's up half is never filled."""
    name = f"{EXPERTS}gate_up_proj.weight_scale"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:, : SMALL.expert_width].contiguous()

    result = check(folder, "FP8_DYNAMIC", edit, layout=NATIVE, roles=(Role.EXPERT,), ignore=EVERYTHING_ELSE)
    assert failing(result, "form of the scheme").names == (name,)


@pytest.mark.parametrize("preset", PRESETS)
def test_form_faults_are_what_cannot_be_served(folder: Path, preset: str) -> None:
    def faults(**options: Any) -> list[str]:
        opened = open_model(write_quantized(folder, preset, **options), "structure")
        assert isinstance(opened, Opened)
        return [finding.message for finding in form_faults(opened)]

    assert faults() == []
    # A router that the config would quantize is no fault here: nothing that serves it asks.
    assert faults(ignore=("lm_head", r"re:.*conv_qk_.*")) == []
    scale = f"{GATE}.weight_scale"
    assert any(scale in message for message in faults(edit=put(scale, torch.ones(3, 3))))
    left_out = faults(ignore=(*IGNORE, r"re:.*experts\.2\..*"))
    assert any("does not say so" in message for message in left_out)
    missing = faults(config={"quantization_config": None})
    assert any("no quantization_config" in message for message in missing)


def test_experts_that_the_recipe_missed(folder: Path) -> None:
    result = check(folder, "FP8_DYNAMIC", roles=(Role.ATTENTION,), ignore=(*IGNORE, r"re:.*mlp\.experts\..*"))
    found = failing(result, "0 of 24 matrices of the role 'expert' are quantized")
    assert f"{GATE}" in found.names
    assert len(found.names) == 24
    allowed = check_structure(folder, quantized=frozenset())
    assert allowed.failures == ()


def test_an_ignore_entry_that_no_module_has(folder: Path) -> None:
    strangers = ("re:.*ruoter.*", "model.layers.0.self_attn.qkv.linear_q", "re:mlp")
    result = check(folder, "FP8_DYNAMIC", ignore=(*IGNORE, *strangers))
    assert failing(result, "3 of 6 ignore entries").names == strangers


def test_an_ignore_list_that_lets_the_router_through(folder: Path) -> None:
    result = check(folder, "FP8_DYNAMIC", ignore=("lm_head", r"re:.*mlp\.gate$"))
    found = failing(result, "never quantized")
    assert "model.layers.0.mlp.gate.router_mlp.fc1" in found.names
    result = check(folder, "FP8_DYNAMIC", ignore=IGNORE[1:])
    assert failing(result, "never quantized").names == ("lm_head",)


def test_a_quantized_router_is_named(folder: Path) -> None:
    name = "model.layers.0.mlp.gate.router_mlp.fc1"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = torch.ones(8, 1, dtype=torch.bfloat16)

    assert failing(check(folder, "FP8_DYNAMIC", edit), "role 'router'").names == (f"{name}.weight",)


def test_one_expert_left_in_full_precision(folder: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{GATE}.weight_scale"]
        tensors[f"{GATE}.weight"] = tensors[f"{GATE}.weight"].to(torch.bfloat16)

    assert failing(check(folder, "FP8_DYNAMIC", edit), "though quantization_config quantizes").names == (GATE,)


def test_a_module_quantized_against_the_config(folder: Path) -> None:
    result = check(folder, "FP8_DYNAMIC", ignore=(*IGNORE, GATE))
    assert failing(result, "does not say so").names == (GATE,)


def test_no_quantization_config_at_all(folder: Path) -> None:
    result = check(folder, "FP8_DYNAMIC", config={"quantization_config": None})
    assert f"{GATE}.weight" in failing(result, "no quantization_config").names


@pytest.mark.parametrize("stated", [{"quant_method": "gptq"}, {"config_groups": {"g": {"targets": 3}}}, 7])
def test_a_quantization_config_that_cannot_be_read(folder: Path, stated: Any) -> None:
    assert "quantization_config" in failing(check(folder, "W8A8", config={"quantization_config": stated})).message


def test_a_config_of_another_scheme_than_the_tensors(folder: Path) -> None:
    other = json.loads((write_quantized(folder, "W8A8") / "config.json").read_text())["quantization_config"]
    found = failing(check(folder, "FP8_DYNAMIC", config={"quantization_config": other}), "form of the scheme")
    assert f"{GATE}.weight" in found.names


def test_a_wrong_group_size(folder: Path) -> None:
    write_quantized(folder, "W4A16")
    stated = json.loads((folder / "config.json").read_text())
    stated["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(stated))
    assert f"{GATE}.weight_scale" in failing(check_structure(folder), "form of the scheme").names
    stated["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 48
    (folder / "config.json").write_text(json.dumps(stated))
    assert "groups of 48 do not divide 64 columns" in failing(check_structure(folder), "48").message


def test_two_schemes_in_one_expert_layer(folder: Path) -> None:
    write_quantized(folder, "W8A8")
    stated = json.loads((folder / "config.json").read_text())
    groups = stated["quantization_config"]["config_groups"]
    groups["group_1"] = {**groups["group_0"], "targets": [UP], "input_activations": None}
    (folder / "config.json").write_text(json.dumps(stated))
    assert failing(check_structure(folder), "another scheme").names == (UP,)


def test_null_keys_are_warned_of(folder: Path) -> None:
    write_quantized(folder, "W8A8")
    stated = json.loads((folder / "config.json").read_text())
    stated["quantization_config"]["config_groups"]["group_0"]["weights"]["zp_dtype"] = None
    (folder / "config.json").write_text(json.dumps(stated))
    assert [(f.severity, f.names) for f in check_structure(folder).findings] == [("warn", ("zp_dtype",))]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_tensor_that_a_scheme_needs_is_missed(folder: Path, preset: str) -> None:
    names = quantized_tensors(SMALL, preset)
    for suffix in sorted({name.rpartition(".")[2] for name in names if name.startswith(f"{GATE}.")}):
        result = check(folder, preset, drop(f"{GATE}.{suffix}"))
        assert any(f"{GATE}.{suffix}" in finding.names for finding in result.failures), suffix


_DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32, torch.uint16)


def _break(tensors: dict[str, Tensor], random_: random.Random) -> None:
    name = random_.choice(sorted(name for name in tensors if "experts" in name or "self_attn" in name))
    tensor = tensors[name]
    kind = random_.choice(("drop", "dtype", "shape", "flat"))
    if kind == "drop":
        del tensors[name]
    elif kind == "dtype":
        tensors[name] = tensor.float().to(random_.choice([dtype for dtype in _DTYPES if dtype != tensor.dtype]))
    elif kind == "shape":
        tensors[name] = tensor[:-1]
    else:
        tensors[name] = tensor.reshape(-1) if tensor.dim() > 1 else tensor.reshape(1, -1)


@pytest.mark.parametrize("seed", range(24))
def test_no_way_of_being_broken_crashes_a_check(folder: Path, seed: int) -> None:
    write_checkpoint(folder.parent / "raw", RAW, SMALL)
    random_ = random.Random(seed)
    layout, ignore, roles = random_.choice(
        ((NATIVE_PER_EXPERT, IGNORE, (Role.EXPERT, Role.ATTENTION)), (NATIVE, EVERYTHING_ELSE, (Role.EXPERT,)))
    )
    preset = random_.choice(("FP8_DYNAMIC", "W4A16_ASYM", "NVFP4"))
    edit = lambda tensors: _break(tensors, random_)  # noqa: E731
    write_quantized(folder, preset, layout=layout, ignore=ignore, roles=roles, edit=edit)
    structure, weights = check_structure(folder), check_weights(folder, folder.parent / "raw")
    json.dumps([structure.as_dict(), weights.as_dict()], allow_nan=False)
