"""Quantized contents against a reference: every scheme reaches its SQNR, and what does not is named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.evaluation.support import (
    EXPERTS,
    PRESETS,
    SMALL,
    compress,
    failing,
    native,
    quantized_tensors,
    scheme_of,
    sound,
    write_quantized,
)
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.evaluation.comparison import limit
from zaya_tools.evaluation.stored import Decoder
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import Role

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_quantized_model_reaches_its_scheme(tmp_path: Path, raw: Path, preset: str) -> None:
    result = check_weights(write_quantized(tmp_path / "model", preset), raw)
    figures = sound(result)
    assert (figures["equal"], figures["widened"], figures["quantized"]) == (51, 2, 34)
    (limits,) = figures["limits"]
    for row in figures["by_role"]:
        assert limits["sqnr_db_min"] + 5 < row["sqnr_db_min"] < limits["sqnr_db_usual"] + 4
    assert len(figures["by_tensor"]) == 34
    assert {row["part"] for row in figures["by_block"] if row["role"] == "expert"} == {"gate", "up", "down"}


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8_BLOCK", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"])
@pytest.mark.parametrize("layout", [NATIVE, RAW], ids=["stacked", "raw"])
def test_other_layouts_give_the_same_figures(tmp_path: Path, raw: Path, preset: str, layout: Layout) -> None:
    """Halves of a fused matrix begin anywhere in its scales; NVFP4 shares its global scale, so all agree."""
    ignore = (r"re:.*self_attn.*",)
    write_quantized(tmp_path / "fused", preset, layout=layout, roles=(Role.EXPERT,), ignore=ignore)
    write_quantized(tmp_path / "split", preset, roles=(Role.EXPERT,), ignore=ignore)
    fused, apart = (check_weights(tmp_path / name, raw) for name in ("fused", "split"))
    assert sound(fused)["by_tensor"] == sound(apart)["by_tensor"]


def test_errors_are_those_of_the_definition(tmp_path: Path, raw: Path) -> None:
    result = check_weights(write_quantized(tmp_path / "model", "FP8_DYNAMIC"), raw)
    stored = quantized_tensors(SMALL, "FP8_DYNAMIC")
    name = f"{EXPERTS}3.up_proj"
    values = stored[f"{name}.weight"].double() * stored[f"{name}.weight_scale"].double()
    wanted = native()[f"{name}.weight"].double()
    row = next(row for row in result.figures["by_tensor"] if row["name"] == f"{name}.weight")
    noise = float((values - wanted).square().sum() / wanted.square().sum())
    assert row["relative_error"] == pytest.approx(math.sqrt(noise), rel=1e-4)
    assert row["sqnr_db"] == pytest.approx(-10 * math.log10(noise), abs=1e-3)
    assert (row["block"], row["expert"], row["part"]) == (1, 3, "up")


def test_two_copies_of_one_quantized_model_agree_exactly(tmp_path: Path) -> None:
    write_quantized(tmp_path / "raw", "FP8_DYNAMIC", layout=RAW, roles=(Role.EXPERT,))
    convert(tmp_path / "raw", tmp_path / "native")
    figures = sound(check_weights(tmp_path / "native", tmp_path / "raw"))
    assert figures["quantized"] == 24
    assert figures["by_tensor"] == []


def test_a_format_that_the_library_does_not_have(tmp_path: Path, raw: Path) -> None:
    write_quantized(tmp_path / "model", "W8A8")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["format"] = "marlin-24"
    config["quantization_config"]["config_groups"]["group_0"].pop("format", None)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    result = check_weights(tmp_path / "model", raw)
    assert "cannot be decoded as marlin-24" in failing(result, "34 of 87 tensors could not be compared").message


def test_a_scale_that_is_missing_is_not_skipped(tmp_path: Path, raw: Path) -> None:
    name = f"{EXPERTS}0.up_proj"
    write_quantized(tmp_path / "m", "FP8_DYNAMIC", edit=lambda t: t.__delitem__(f"{name}.weight_scale"))
    result = check_weights(tmp_path / "m", raw)
    assert failing(result, "could not be compared").names == (f"{name}.weight",)


@pytest.mark.parametrize("preset", PRESETS)
def test_another_models_expert_is_too_far_off(tmp_path: Path, raw: Path, preset: str) -> None:
    name = f"{EXPERTS}2.down_proj"
    other = compress(native()[f"{name}.weight"].flip(0).contiguous(), scheme_of(preset))

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors.update({f"{name}.{local}": tensor for local, tensor in other.items()})

    found = failing(check_weights(write_quantized(tmp_path / "m", preset, edit=edit), raw), "is too far from")
    assert found.names == (f"{name}.weight",)
    assert "block 1, expert 2, down (" in found.message


def test_one_wrong_row_is_found_in_a_good_matrix(tmp_path: Path, raw: Path) -> None:
    name = f"{EXPERTS}2.up_proj"

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}.weight_scale"][17] *= 1.75

    result = check_weights(write_quantized(tmp_path / "m", "W4A16", edit=edit), raw)
    found = failing(result, "rows that are not the reference's")
    assert "block 1, expert 2, up (1 of 64, the first is 17)" in found.message


# Limits


def _decoder(**weights: Any) -> Decoder:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return Decoder(QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights)), "any")


def _sqnr(values: np.ndarray[Any, Any], steps: Iterable[int]) -> float:
    """SQNR of rounding rows to integers by their largest value: the definition, in numpy."""
    low, high = steps
    scale = np.abs(values).max(-1, keepdims=True) / ((high - low) / 2)
    rounded = np.clip(np.round(values / scale), low, high) * scale
    return float(10 * np.log10((values**2).sum() / ((values - rounded) ** 2).sum()))


def test_limits_leave_room_for_outliers_and_none_for_strangers() -> None:
    random = np.random.default_rng(0)
    for bits, length in ((8, 2048), (4, 128), (3, 128)):
        steps = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        found = limit(_decoder(num_bits=bits, strategy="channel"))
        normal = _sqnr(random.standard_normal((64, length)), steps)
        heavy = _sqnr(random.standard_t(5, (64, length)), steps)
        assert found.usual - 2 < normal < found.usual + 3
        assert found.fail < heavy
        assert found.fail > 3  # what any other matrix reaches is -3 dB
