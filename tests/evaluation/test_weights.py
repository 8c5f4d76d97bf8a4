"""Contents compared: sound conversions pass, one wrong bit does not, and numbers that are none are counted."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.evaluation.support import EXPERTS, SMALL, failing, native, sound, write_native, write_quantized
from tests.synthetic import (
    LAYOUTS,
    logical,
    small,
    split,
    write_checkpoint,
)
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.evaluation.units import all_units
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import parameters

pytestmark = pytest.mark.usefixtures("small_blocks")


# Nothing quantized


@pytest.mark.parametrize("mine", LAYOUTS)
@pytest.mark.parametrize("other", LAYOUTS)
def test_any_two_layouts_of_one_model_are_equal(tmp_path: Path, mine: str, other: str) -> None:
    for folder, name in ((tmp_path / "model", mine), (tmp_path / "reference", other)):
        write_checkpoint(folder, LAYOUTS[name], SMALL, shards=2)
    result = check_weights(tmp_path / "model", tmp_path / "reference")
    figures = sound(result)
    narrow = ("raw", "smoe", "megatron")
    biases = 2 if (mine in narrow) != (other in narrow) else 0
    assert (figures["equal"], figures["widened"] + figures["rounded"]) == (len(all_units(SMALL)) - biases, biases)


@pytest.mark.parametrize("fields", [{"attention_bias": True}, {"tied": False, "head_bias": True}, {"experts": 11}])
def test_optional_parameters_are_compared_too(tmp_path: Path, fields: dict[str, Any]) -> None:
    architecture = small(**fields)
    write_checkpoint(tmp_path / "raw", RAW, architecture)
    convert(tmp_path / "raw", tmp_path / "native")
    sound(check_weights(tmp_path / "native", tmp_path / "raw", workers=3), architecture)


def test_progress_covers_the_model(tmp_path: Path, raw: Path) -> None:
    write_native(tmp_path / "model", native())
    lock, done = threading.Lock(), [0]

    def advance(nbytes: int) -> None:
        with lock:
            done[0] += nbytes

    sound(check_weights(tmp_path / "model", raw, workers=2, advance=advance))
    assert done[0] == sum(tensor.nbytes for tensor in native().values())


@pytest.mark.parametrize("name", sorted(native())[::11])
def test_one_bit_anywhere_is_found(tmp_path: Path, raw: Path, name: str) -> None:
    tensors = native()
    flat = tensors[name].view(-1).view(torch.uint8)
    flat[-(flat.numel() // 3) - 1] ^= 1
    result = check_weights(write_native(tmp_path / "model", tensors), raw)
    assert failing(result, "differs from the reference").names == (name,)
    assert result.figures["different"] == 1


def test_minus_zero_is_not_zero_except_where_it_is_only_added(tmp_path: Path) -> None:
    name, biases = "model.layers.1.self_attn.qk_norm.temp", "model.layers.1.mlp.gate.balancing_biases"
    zeros = {name: torch.zeros(2, dtype=torch.bfloat16), biases: torch.zeros(5)}
    write_checkpoint(tmp_path / "reference", NATIVE, SMALL, overrides=zeros)
    write_checkpoint(tmp_path / "model", NATIVE, SMALL, overrides={key: -value for key, value in zeros.items()})
    assert failing(check_weights(tmp_path / "model", tmp_path / "reference")).names == (name,)


def test_wider_is_noted_and_rounded_is_warned_of(tmp_path: Path) -> None:
    values = logical(SMALL, dtype="F32")
    write_checkpoint(tmp_path / "raw", RAW, SMALL, dtype="F32")
    kept = {p.name for p in parameters(SMALL) if p.protected}
    tensors = {name: value if name in kept else value.bfloat16() for name, value in values.items()}
    write_native(tmp_path / "model", tensors, NATIVE)
    result = check_weights(tmp_path / "model", tmp_path / "raw")
    figures = sound(result)
    assert [finding.severity for finding in result.findings] == ["warn"]
    assert figures["rounded"] == len(result.findings[0].names) == len(all_units(SMALL)) - len(kept)
    assert figures["by_role"][0]["sqnr_db_min"] > 50
    wide = check_weights(tmp_path / "raw", tmp_path / "model")
    assert wide.figures["different"] == figures["rounded"]


def test_a_protected_parameter_must_not_be_rounded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw", RAW, SMALL, dtype="F32")
    name = "model.layers.0.mlp.gate.down_proj.weight"
    tensors = logical(SMALL, dtype="F32")
    write_native(tmp_path / "model", tensors | {name: tensors[name].bfloat16()}, NATIVE)
    assert failing(check_weights(tmp_path / "model", tmp_path / "raw"), "rounded").names == (name,)


def test_rounding_that_is_not_to_nearest_is_a_difference(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw", RAW, SMALL, dtype="F32")
    tensors = logical(SMALL, dtype="F32")
    cut = tensors["model.norm.weight"].view(torch.int32).bitwise_and(-65536).view(torch.float32).bfloat16()
    write_native(tmp_path / "model", tensors | {"model.norm.weight": cut}, NATIVE)
    assert failing(check_weights(tmp_path / "model", tmp_path / "raw"), "differs").names == ("model.norm.weight",)


def test_a_baked_clamp_is_recognised(tmp_path: Path) -> None:
    architecture = replace(SMALL, clamp_temp=True)
    write_checkpoint(tmp_path / "raw", RAW, architecture)
    convert(tmp_path / "raw", tmp_path / "native")
    result = check_weights(tmp_path / "native", tmp_path / "raw")
    assert sound(result)["baked"] == 2
    assert any("baked" in finding.message for finding in result.findings)
    # Left out, it is a difference.
    write_checkpoint(tmp_path / "plain", NATIVE, SMALL)
    names = failing(check_weights(tmp_path / "plain", tmp_path / "raw")).names
    assert names == tuple(f"model.layers.{block}.self_attn.qk_norm.temp" for block in (0, 1))


def test_another_model_is_not_compared(tmp_path: Path, raw: Path) -> None:
    write_checkpoint(tmp_path / "model", NATIVE, replace(SMALL, blocks=3, sliding=()))
    result = check_weights(tmp_path / "model", raw)
    assert "blocks = 3, the reference has 2" in failing(result, "nothing was compared").message
    assert result.figures["compared"] == 0


def test_a_missing_tensor_is_counted_and_named(tmp_path: Path, raw: Path) -> None:
    write_checkpoint(tmp_path / "model", NATIVE, SMALL, overrides={f"{EXPERTS}down_proj": None})
    result = check_weights(tmp_path / "model", raw)
    found = failing(result, "4 of 87 tensors could not be compared")
    assert found.names == tuple(f"{EXPERTS}{expert}.down_proj.weight" for expert in range(4))
    assert (result.figures["compared"], result.figures["not_compared"]) == (83, 4)


# Numbers that are none


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", [NATIVE, NATIVE_PER_EXPERT])
def test_a_weight_that_is_not_finite(tmp_path: Path, value: float, layout: Layout) -> None:
    values = logical(SMALL)
    values[f"{EXPERTS}gate_up_proj"][2, SMALL.expert_width + 40, 7] = value
    values[f"{EXPERTS}gate_up_proj"][2, SMALL.expert_width + 50, 3] = value
    write_native(tmp_path / "m", split(layout, SMALL, values), layout)
    write_native(tmp_path / "r", split(layout, SMALL, logical(SMALL)), layout)
    for reference in (None, tmp_path / "r", tmp_path / "m"):
        result = check_weights(tmp_path / "m", reference)
        found = failing(result, "NaN or infinity")
        assert found.names == (f"{EXPERTS}2.up_proj.weight",)
        assert "(2, the first at [40, 7])" in found.message
        assert result.figures["nonfinite_values"] == 2
        assert len(result.failures) == 1


def test_an_infinity_that_quantization_hid(tmp_path: Path) -> None:
    values = logical(SMALL)
    values[f"{EXPERTS}down_proj"][1, 9, 9] = math.inf
    write_native(tmp_path / "r", split(NATIVE, SMALL, values), NATIVE)
    result = check_weights(write_quantized(tmp_path / "m", "FP8_DYNAMIC"), tmp_path / "r")
    assert failing(result, "in the reference and finite").names == (f"{EXPERTS}1.down_proj.weight",)


def test_a_nan_among_quantized_numbers(tmp_path: Path, raw: Path) -> None:
    name = f"{EXPERTS}1.down_proj.weight"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8)[5, 6] = 0x7F

    write_quantized(tmp_path / "m", "FP8_DYNAMIC", edit=edit)
    for reference in (None, raw):
        found = failing(check_weights(tmp_path / "m", reference), "NaN or infinity")
        assert (found.names, "(1, the first at [5, 6])" in found.message) == ((name,), True)


@pytest.mark.parametrize("compared", [True, False])
def test_an_up_half_that_was_never_filled(tmp_path: Path, raw: Path, compared: bool) -> None:
    """Loaded without a word, and every expert's up half is still what the memory held."""
    tensors = native(NATIVE)
    tensors[f"{EXPERTS}gate_up_proj"][:, SMALL.expert_width :] = 0
    result = check_weights(write_native(tmp_path / "m", tensors, NATIVE), raw if compared else None)
    found = failing(result, "never filled")
    assert "block 1, expert 0, up" in found.message
    assert found.names == tuple(f"{EXPERTS}{expert}.up_proj.weight" for expert in range(4))


def test_without_a_reference_everything_is_scanned(tmp_path: Path) -> None:
    result = check_weights(write_quantized(tmp_path / "m", "NVFP4"), None)
    assert result.findings == ()
    assert (result.figures["scanned"], result.figures["compared"]) == (87, 0)
