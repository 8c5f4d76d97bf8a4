"""Everything that is out of its place is found and named by what it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.evaluation.support import PRESETS, SMALL, failing, native, write_native, write_quantized
from tests.synthetic import (
    small,
    write_checkpoint,
    write_tensors,
)
from zaya_tools.architecture import native_config
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW

E1 = "model.layers.1.mlp.experts."
QKV = "model.layers.1.self_attn.qkv_proj."


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "raw", RAW, SMALL, shards=3)
    return tmp_path / "raw"


def swap(tensors: dict[str, Tensor], first: str, second: str) -> None:
    """Swap two matrices with everything that belongs to them."""
    for name in [name for name in tensors if name.startswith((f"{first}.", f"{second}."))]:
        if name.startswith(f"{first}."):
            other = second + name.removeprefix(first)
            tensors[name], tensors[other] = tensors[other], tensors[name]


def test_halves_of_one_expert_swapped(tmp_path: Path, raw: Path) -> None:
    tensors = native()
    swap(tensors, f"{E1}2.gate_proj", f"{E1}2.up_proj")
    found = failing(check_weights(write_native(tmp_path / "m", tensors), raw))
    assert found.message == "block 1: the gate and up halves of expert 2 are swapped"
    assert set(found.names) == {f"{E1}2.gate_proj.weight", f"{E1}2.up_proj.weight"}


def test_halves_swapped_in_a_stack_and_in_raw(tmp_path: Path, raw: Path) -> None:
    for layout, name in ((NATIVE, f"{E1}gate_up_proj"),
                         (RAW, "model.layers.3.zaya_block.experts.local_experts.2.linear_fc1.weight")):  # fmt: skip
        tensors = native(layout)
        matrix = tensors[name][2] if layout is NATIVE else tensors[name]
        matrix.copy_(matrix.roll(SMALL.expert_width, 0))
        found = failing(check_weights(write_native(tmp_path / "m", tensors, layout), raw))
        assert found.message == "block 1: the gate and up halves of expert 2 are swapped"


@pytest.mark.parametrize("preset", PRESETS)
def test_halves_swapped_after_quantization(tmp_path: Path, raw: Path, preset: str) -> None:
    write_quantized(tmp_path / "m", preset, edit=lambda t: swap(t, f"{E1}1.gate_proj", f"{E1}1.up_proj"))
    found = failing(check_weights(tmp_path / "m", raw))
    assert found.message == "block 1: the gate and up halves of expert 1 are swapped"


def test_halves_swapped_everywhere(tmp_path: Path, raw: Path) -> None:
    tensors = native(NATIVE)
    for block in range(SMALL.blocks):
        name = f"model.layers.{block}.mlp.experts.gate_up_proj"
        tensors[name] = tensors[name].roll(SMALL.expert_width, 1)
    result = check_weights(write_native(tmp_path / "m", tensors, NATIVE), raw)
    assert [finding.message for finding in result.failures] == [
        f"block {block}: the gate and up halves of experts 0, 1, 2, 3 are swapped" for block in range(2)
    ]


@pytest.mark.parametrize("preset", ["", "FP8_DYNAMIC", "W4A16"])
def test_two_experts_swapped(tmp_path: Path, raw: Path, preset: str) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for half in ("gate", "up", "down"):
            swap(tensors, f"{E1}0.{half}_proj", f"{E1}3.{half}_proj")

    if preset:
        write_quantized(tmp_path / "m", preset, edit=edit)
    else:
        tensors = native()
        edit(tensors)
        write_native(tmp_path / "m", tensors)
    found = failing(check_weights(tmp_path / "m", raw))
    assert found.message == "block 1: experts 0 and 3 are swapped (gate, up, down)"
    assert len(found.names) == 6


def test_experts_in_another_order(tmp_path: Path, raw: Path) -> None:
    tensors = native(NATIVE)
    for name in (f"{E1}gate_up_proj", f"{E1}down_proj"):
        tensors[name] = tensors[name].roll(1, 0)
    result = check_weights(write_native(tmp_path / "m", tensors, NATIVE), raw)
    assert [finding.message for finding in result.failures] == [
        f"block 1: expert {expert} holds the values of block 1's expert {(expert - 1) % 4} (gate, up, down)"
        for expert in range(4)
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (f"{QKV}v_proj_current", f"{QKV}v_proj_delayed"),
        ("model.layers.1.mlp.gate.router_mlp.fc1", "model.layers.1.mlp.gate.router_mlp.fc2"),
        ("model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm"),
        ("model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
        ("model.layers.0.post_mlp_residual_scale", "model.layers.1.post_mlp_residual_scale"),
    ],
)
def test_modules_swapped(tmp_path: Path, raw: Path, first: str, second: str) -> None:
    tensors = native()
    swap(tensors, first, second)
    result = check_weights(write_native(tmp_path / "m", tensors), raw)
    assert result.failures
    for finding in result.failures:
        assert finding.message.endswith("are swapped")
        assert any(name.startswith(first) for name in finding.names)
        assert any(name.startswith(second) for name in finding.names)


def test_query_and_key_swapped_where_they_have_one_shape(tmp_path: Path) -> None:
    architecture = small(query_heads=2, kv_heads=2)
    write_checkpoint(tmp_path / "raw", RAW, architecture)
    tensors = native(NATIVE, architecture)
    swap(tensors, f"{QKV}q_proj", f"{QKV}k_proj")
    write_tensors(tmp_path / "m", tensors, native_config(architecture))
    message = failing(check_weights(tmp_path / "m", tmp_path / "raw")).message
    assert message == f"{QKV}q_proj.weight and {QKV}k_proj.weight are swapped"


def test_a_copy_in_place_of_another_expert(tmp_path: Path, raw: Path) -> None:
    tensors = native()
    tensors[f"{E1}0.down_proj.weight"] = tensors[f"{E1}1.down_proj.weight"].clone()
    found = failing(check_weights(write_native(tmp_path / "m", tensors), raw))
    assert found.message == "block 1, expert 0, down holds the values of block 1, expert 1, down"
