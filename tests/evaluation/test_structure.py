"""Whole and broken checkpoints, as headers and small tensors show them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evaluation.support import (
    EVERYTHING_ELSE,
    IGNORE,
    PRESETS,
    SMALL,
    check,
    failing,
    scheme_of,
)
from tests.synthetic import LAYOUTS, config_of, logical, small, split, write_checkpoint, write_tensors
from zaya_tools.architecture import native_config
from zaya_tools.errors import LayoutError, SourceError
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config
from zaya_tools.parameters import Role


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}, {"tied": False}, {"blocks": 1}])
def test_a_sound_checkpoint_has_no_failure(folder: Path, name: str, fields: dict[str, Any]) -> None:
    write_checkpoint(folder, LAYOUTS[name], small(**fields), shards=2)
    result = check_structure(folder, folder)
    assert result.failures == ()
    assert {finding.severity for finding in result.findings} <= {"note"}
    assert result.figures["missing"] == result.figures["surplus"] == 0
    json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_sound_quantized_checkpoint_has_no_failure(folder: Path, preset: str, stacked: bool) -> None:
    if stacked:
        result = check(folder, preset, layout=NATIVE, roles=(Role.EXPERT,), ignore=EVERYTHING_ELSE)
    else:
        result = check(folder, preset)
    assert [finding.message for finding in result.findings] == []
    experts = next(row for row in result.figures["quantized"] if row["role"] == "expert")
    assert experts == {"role": "expert", "quantized": 24, "of": 24}
    assert result.figures["range_use"]["min"] > 0.5
    json.dumps(result.as_dict(), allow_nan=False)


def test_a_quantized_raw_checkpoint_is_read_by_its_one_scheme(folder: Path) -> None:
    result = check(folder, "FP8_DYNAMIC", layout=RAW, roles=(Role.EXPERT,))
    assert result.failures == ()
    assert any("convert this checkpoint to native" in finding.message for finding in result.findings)
    assert result.figures["range_use"]["matrices"] == 16


def test_a_quantized_untied_head_is_sound(folder: Path) -> None:
    architecture = replace(SMALL, tied=False)
    roles = (Role.EXPERT, Role.ATTENTION, Role.HEAD)
    result = check(folder, "W8A8", architecture=architecture, roles=roles, ignore=IGNORE[1:])
    assert result.failures == ()


def test_what_the_library_itself_writes_is_sound(folder: Path) -> None:
    library = pytest.importorskip("llmcompressor")
    source = folder.parent / "native"
    write_checkpoint(source, NATIVE_PER_EXPERT, SMALL)
    ignore = [*IGNORE, "re:.*embed_tokens", "re:.*(norm|scale|temp|biases)$"]
    library.model_free_ptq(source, folder, scheme_of("W4A16"), ignore=ignore, device="cpu")
    result = check_structure(folder, source)
    assert [finding.message for finding in result.failures] == []
    assert result.figures["range_use"]["matrices"] == 34


# Complete, and nothing surplus


def test_a_config_of_another_layout_fails(folder: Path) -> None:
    write_checkpoint(folder, RAW, SMALL, config=native_config(SMALL))
    assert "config.json is not" in failing(check_structure(folder)).message
    write_checkpoint(folder, NATIVE, SMALL, config=raw_config(SMALL))
    assert "config.json is not" in failing(check_structure(folder)).message


def test_a_config_of_another_geometry_fails(folder: Path) -> None:
    write_checkpoint(folder, NATIVE, SMALL, config=native_config(replace(SMALL, experts=5)))
    assert "experts = 5, the tensors say 4" in failing(check_structure(folder)).message


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    for lost in sorted(split(LAYOUTS[name], SMALL, logical(SMALL)))[::17]:
        write_checkpoint(folder, LAYOUTS[name], SMALL, overrides={lost: None}, shards=2)
        assert lost in failing(check_structure(folder), "missing").names


def test_a_missing_expert_and_a_missing_half_layer_are_named(folder: Path) -> None:
    names = list(split(RAW, SMALL, logical(SMALL)))
    expert = [name for name in names if "model.layers.3" in name and ".local_experts.2." in name]
    half = [name for name in names if name.startswith("model.layers.1.")]
    for lost in (expert, half):
        write_checkpoint(folder, RAW, SMALL, overrides=dict.fromkeys(lost))
        assert set(failing(check_structure(folder), "missing").names) == set(lost)


def test_a_surplus_tensor_is_named(folder: Path) -> None:
    write_checkpoint(folder, NATIVE, SMALL, overrides={"model.layers.0.extra.weight": torch.zeros(2)})
    assert failing(check_structure(folder)).names == ("model.layers.0.extra.weight",)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.gate.router_mlp.fc1.bias"
    write_checkpoint(folder, NATIVE, SMALL, overrides={name: torch.zeros(9, dtype=torch.bfloat16)})
    assert name in failing(check_structure(folder), "shape").names


def test_a_tied_head_that_is_stored(folder: Path) -> None:
    embedding = logical(SMALL)["model.embed_tokens.weight"]
    write_checkpoint(folder, NATIVE, SMALL, overrides={"lm_head.weight": embedding})
    result = check_structure(folder)
    assert result.failures == ()
    assert [(f.severity, f.names) for f in result.findings] == [("warn", ("lm_head.weight",))]
    write_checkpoint(folder, NATIVE, SMALL, overrides={"lm_head.weight": embedding + 1})
    assert failing(check_structure(folder), "differs from the embedding").names == ("lm_head.weight",)


def test_an_untied_head_that_is_missing(folder: Path) -> None:
    architecture = replace(SMALL, tied=False)
    write_checkpoint(folder, NATIVE, architecture)
    assert check_structure(folder).failures == ()
    write_checkpoint(folder, NATIVE, architecture, overrides={"lm_head.weight": None})
    assert failing(check_structure(folder)).names == ("lm_head.weight",)


@pytest.mark.parametrize(("key", "value"), [("architectures", ["LlamaForCausalLM"]), ("model_type", "llama")])
def test_a_config_that_no_runtime_would_choose_the_class_by(folder: Path, key: str, value: Any) -> None:
    write_checkpoint(folder, NATIVE, SMALL, config={**native_config(SMALL), key: value})
    assert failing(check_structure(folder)).names == (key,)


def test_a_truncated_shard_fails(folder: Path) -> None:
    write_checkpoint(folder, NATIVE, SMALL)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors promises" in failing(check_structure(folder)).message


def test_a_folder_that_is_not_there_and_a_broken_reference_are_errors(folder: Path) -> None:
    with pytest.raises(SourceError):
        check_structure(folder)
    write_checkpoint(folder, NATIVE, SMALL)
    write_checkpoint(folder.parent / "broken", NATIVE, SMALL, overrides={"model.norm.weight": None})
    with pytest.raises(LayoutError):
        check_structure(folder, folder.parent / "broken")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.qk_norm.temp", "model.layers.1.mlp.gate.down_proj.weight",
                                  "model.layers.1.self_attn.qkv_proj.conv_qk_grouped.weight"])  # fmt: skip
def test_a_small_tensor_that_is_not_finite(folder: Path, name: str, value: float) -> None:
    tensor = logical(SMALL)[name]
    tensor.view(-1)[1] = value
    write_checkpoint(folder, NATIVE, SMALL, overrides={name: tensor})
    found = failing(check_structure(folder), "NaN or infinity")
    assert found.names == (name,)
    assert f"1 of {tensor.numel():,}, the first at element 1" in found.message


# Against a reference


@pytest.mark.parametrize("layout", [RAW, NATIVE])
def test_a_protected_parameter_in_a_narrower_dtype(folder: Path, layout: Any) -> None:
    reference = folder.parent / "reference"
    write_checkpoint(reference, layout, SMALL, dtype="F32")
    name = "model.layers.1.self_attn.qk_norm.temp"
    write_checkpoint(folder, NATIVE, SMALL, dtype="F32", overrides={name: logical(SMALL)[name]})
    assert failing(check_structure(folder, reference), "never loses precision").names == (name,)
    write_checkpoint(folder, NATIVE, SMALL, dtype="F32")
    assert check_structure(folder, reference).failures == ()


@pytest.mark.parametrize(("fields", "severity"), [({"rope_theta": 1e4}, "fail"), ({"eos_token": 5}, "warn")])
def test_a_geometry_that_is_not_the_references(folder: Path, fields: dict[str, Any], severity: str) -> None:
    reference = folder.parent / "reference"
    write_checkpoint(reference, RAW, SMALL)
    write_checkpoint(folder, NATIVE, replace(SMALL, **fields))
    result = check_structure(folder, reference)
    assert [(f.severity, f.names) for f in result.findings] == [(severity, tuple(fields))]


def test_tensors_that_loading_would_round_are_warned_of(folder: Path) -> None:
    write_checkpoint(folder, NATIVE, SMALL, dtype="F32", config=native_config(replace(SMALL, dtype="bfloat16")))
    found = check_structure(folder).findings
    assert [f.severity for f in found] == ["warn"]
    assert "model.embed_tokens.weight" in found[0].names


def test_half_precision_balancing_biases_are_warned_of(folder: Path) -> None:
    tensors = split(NATIVE, SMALL, logical(SMALL))
    write_tensors(folder, tensors, config_of(NATIVE, SMALL))
    assert [(f.severity, len(f.names)) for f in check_structure(folder).findings] == [("warn", 2)]
