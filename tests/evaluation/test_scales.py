"""Scales that cannot be true, and those that can."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.evaluation.support import (
    GATE,
    PRESETS,
    UP,
    Edit,
    check,
    failing,
    put,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.mark.parametrize("value", [0.0, 3e32, -1.0, math.nan, math.inf])
def test_a_garbage_input_scale_is_named(folder: Path, value: float) -> None:
    name = f"{GATE}.input_scale"
    assert any(name in f.names for f in check(folder, "FP8", put(name, value)).failures)


@pytest.mark.parametrize(("preset", "suffix"), [("FP8", "input_scale"), ("NVFP4", "weight_global_scale"),
                                                ("NVFP4", "input_global_scale")])  # fmt: skip
def test_gate_and_up_with_different_shared_scales(folder: Path, preset: str, suffix: str) -> None:
    found = failing(
        check(folder, preset, put(f"{UP}.{suffix}", 0.03 if preset == "FP8" else 250.0)), "gate and up differs"
    )
    assert found.names == (f"{UP}.{suffix}",)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_broken_weight_scale_is_named(folder: Path, preset: str) -> None:
    name = f"{GATE}.weight_scale"
    for value in (math.nan, 0.0):
        if preset == "MXFP4A16":
            value = 255  # noqa: PLW2901
        assert failing(check(folder, preset, put(name, value)), "is not finite and positive").names == (name,)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("factor", [1 / 4096, 4096.0])
def test_scales_of_an_impossible_size(folder: Path, preset: str, factor: float) -> None:
    suffix = "weight_global_scale" if preset.startswith("NVFP4") else "weight_scale"
    name = f"{GATE}.{suffix}"

    def edit(tensors: dict[str, Tensor]) -> None:
        scale = tensors[name]
        exponent = 12 if factor > 1 else -12
        tensors[name] = scale + exponent if scale.dtype is torch.uint8 else (scale.float() * factor).to(scale.dtype)

    failures = check(folder, preset, edit).failures
    assert any(f.message.startswith("1 scale is of an impossible size") for f in failures)


def test_one_row_with_a_huge_scale(folder: Path) -> None:
    name = f"{GATE}.weight_scale"
    assert failing(check(folder, "FP8_DYNAMIC", put(name, 10.0, 5)), "impossible size").names == (name,)


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "W8A8", "FP8_BLOCK", "W4A16"])
def test_scales_that_leave_the_range_idle_or_overfull(folder: Path, preset: str) -> None:
    def requantized(factor: float) -> Edit:
        def edit(tensors: dict[str, Tensor]) -> None:
            if preset == "W4A16":
                from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

                levels = unpack_from_int32(tensors[f"{GATE}.weight_packed"], 4, torch.Size([64, 64])).float()
                levels = (levels * factor).round().clamp(-8, 7).to(torch.int8)
                tensors[f"{GATE}.weight_packed"] = pack_to_int32(levels, 4)
                return
            weight = tensors[f"{GATE}.weight"]
            top = 448 if weight.dtype is torch.float8_e4m3fn else 127
            levels = (weight.float() * factor).clamp(-top, top)
            tensors[f"{GATE}.weight"] = (levels.round() if top == 127 else levels).to(weight.dtype)

        return edit

    assert GATE in failing(check(folder, preset, requantized(1 / 8)), "scale is too large").names[0]
    assert GATE in failing(check(folder, preset, requantized(20.0)), "scale is too small").names[0]


def test_a_wrong_weight_shape(folder: Path) -> None:
    name = f"{GATE}.weight_shape"
    assert failing(check(folder, "W4A16", put(name, 32, 1)), "weight_shape").names == (name,)


def test_an_all_zero_row_and_matrix_are_no_fault(folder: Path) -> None:
    for preset in ("FP8_DYNAMIC", "W8A8"):

        def edit(tensors: dict[str, Tensor]) -> None:
            tensors[f"{GATE}.weight"][3] = 0
            tensors[f"{UP}.weight"].zero_()

        assert check(folder, preset, edit).failures == ()
