"""The whole way: a raw checkpoint, converted, in transformers, against an independent model of the raw layout."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layouts.by_hand import naive_native
from tests.reference.raw_model import raw_logits
from tests.reference.raw_random import example_configs, random_raw, raw_shape
from tests.synthetic import read_tensors, same_bits, small, split, write_checkpoint, write_tensors
from zaya_tools import convert
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config

CONFIGS = example_configs()
NAMES = sorted(CONFIGS)


@lru_cache(maxsize=64)
def tensors_of(name: str, skip_alive: bool = False) -> dict[str, Tensor]:
    return random_raw(CONFIGS[name], seed=len(name), skip_alive=skip_alive)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Raw folder and native folder of an example, made once."""
    made: dict[tuple[str, bool], tuple[Path, Path]] = {}

    def make(name: str, skip_alive: bool = False) -> tuple[Path, Path]:
        if (name, skip_alive) not in made:
            folder = tmp_path_factory.mktemp(name)
            write_tensors(folder / "raw", tensors_of(name, skip_alive), CONFIGS[name], shards=3)
            convert(folder / "raw", folder / "native", max_shard_size="40KB")
            made[name, skip_alive] = folder / "raw", folder / "native"
        return made[name, skip_alive]

    return make


def load(folder: Path, restore: bool = True) -> Any:
    from transformers import ZayaForCausalLM

    model, report = ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    if restore:
        stored = read_tensors(folder)
        buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("balancing_biases")}
        assert len(buffers) == model.config.num_hidden_layers
        for name, buffer in buffers.items():
            assert buffer.dtype == stored[name].dtype == torch.float32
            buffer.copy_(stored[name])
    return model.eval()


def some_ids(batch: int = 2, tokens: int = 24) -> Tensor:
    return torch.randint(0, 128, (batch, tokens), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=ids, use_cache=False).logits
    return result


@pytest.mark.parametrize("skip_alive", [False, True], ids=["skip dead", "skip alive"])
@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_what_the_raw_checkpoint_means(converted: Any, name: str, skip_alive: bool) -> None:
    _, native = converted(name, skip_alive)
    ids = some_ids()
    expected = raw_logits(CONFIGS[name], tensors_of(name, skip_alive), ids)
    found = logits(load(native), ids)
    assert expected.std() > 0.2
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["scalar", "smoe"])
def test_transformers_overwrites_the_skip_bias_so_that_restoring_it_matters(converted: Any, name: str) -> None:
    _, native = converted(name, True)
    stored, model = read_tensors(native), load(native, restore=False)
    biases = {key: buffer for key, buffer in model.named_buffers() if key.endswith("balancing_biases")}
    assert biases
    for key, buffer in biases.items():
        assert buffer[-1] == -1.0
        assert stored[key][-1] == pytest.approx(0.1, abs=1e-3)
        assert torch.equal(buffer[:-1], stored[key][:-1])
    ids = some_ids()
    expected = raw_logits(CONFIGS[name], tensors_of(name, True), ids)
    assert (logits(model, ids) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_bit_exact_against_a_conversion_in_memory(converted: Any, name: str) -> None:
    _, native = converted(name)
    shape = raw_shape(CONFIGS[name])
    expected = naive_native(tensors_of(name), shape.blocks, shape.experts)
    stored = read_tensors(native)
    assert stored.keys() == expected.keys()
    for key, tensor in stored.items():
        if CONFIGS[name].get("clamp_temp") and key.endswith("qk_norm.temp"):
            baked = torch.exp(expected[key].float().clamp(1e-7, 2))
            assert tensor.dtype == torch.float32
            assert torch.allclose(tensor, baked, rtol=1e-6, atol=0)
        else:
            assert same_bits(tensor, expected[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_same_bytes(converted: Any, name: str, tmp_path: Path) -> None:
    raw, native = converted(name)
    convert(native, tmp_path / "back", to="raw")
    before, back = read_tensors(raw), read_tensors(tmp_path / "back")
    before = {key.replace(".smoe_block.", ".zaya_block."): tensor for key, tensor in before.items()}
    assert back.keys() == before.keys()
    for key, tensor in before.items():
        if key.endswith("balancing_biases"):
            assert back[key].dtype == torch.float32
            assert torch.equal(back[key], tensor.float())
        elif not (CONFIGS[name].get("clamp_temp") and key.endswith(".temp")):
            assert same_bits(back[key], tensor), key
    # And again: what is native twice is the same files.
    convert(tmp_path / "back", tmp_path / "again", max_shard_size="40KB")
    assert {f.name: f.read_bytes() for f in (tmp_path / "again").glob("*.safetensors")} == {
        f.name: f.read_bytes() for f in native.glob("*.safetensors")
    }
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config == json.loads((native / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_way_back_means_the_same_model(converted: Any, name: str, tmp_path: Path) -> None:
    # The config that we write for the raw layout, read by the reference.
    _, native = converted(name, True)
    convert(native, tmp_path / "back", to="raw")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    ids = some_ids()
    expected = raw_logits(CONFIGS[name], tensors_of(name, True), ids)
    assert (raw_logits(config, read_tensors(tmp_path / "back"), ids) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_casting_to_a_wider_type_changes_nothing(tmp_path: Path, dtype: str) -> None:
    write_tensors(tmp_path / "raw", tensors_of("scalar"), CONFIGS["scalar"])
    convert(tmp_path / "raw", tmp_path / "native", dtype=dtype)
    stored = read_tensors(tmp_path / "native")
    kinds = {tensor.dtype for key, tensor in stored.items() if not key.endswith("balancing_biases")}
    assert kinds == {getattr(torch, dtype)}
    ids = some_ids()
    expected = raw_logits(CONFIGS["scalar"], tensors_of("scalar"), ids)
    assert (logits(load(tmp_path / "native"), ids) - expected).abs().max() < 1e-4


def test_protected_tensors_keep_their_bits_when_the_rest_is_cast(tmp_path: Path) -> None:
    raw = random_raw(CONFIGS["scalar"], seed=0, dtype=torch.float32)
    write_tensors(tmp_path / "raw", raw, CONFIGS["scalar"])
    convert(tmp_path / "raw", tmp_path / "native", dtype="bfloat16")
    shape = raw_shape(CONFIGS["scalar"])
    expected = naive_native(raw, shape.blocks, shape.experts)
    narrowed = ("embed_tokens.weight", "_proj.weight", "v_proj_current.weight", "v_proj_delayed.weight",
                "experts.gate_up_proj", "experts.down_proj")  # fmt: skip
    for key, tensor in read_tensors(tmp_path / "native").items():
        casts = key.endswith(narrowed) and ".gate." not in key
        assert same_bits(tensor, expected[key].bfloat16() if casts else expected[key]), key


def test_older_spellings_become_todays(converted: Any, tmp_path: Path) -> None:
    _, native = converted("scalar")
    stored = read_tensors(native)
    older = {
        key.replace("model.norm.", "model.final_norm.")
        .replace("router_mlp.norm.", "router_mlp.rmsnorm_eda.")
        .replace(".mlp.gate.", ".mlp.router."): tensor
        for key, tensor in stored.items()
    }
    assert older.keys() != stored.keys()
    write_tensors(tmp_path / "older", older, json.loads((native / "config.json").read_text()))
    convert(tmp_path / "older", tmp_path / "native")
    found = read_tensors(tmp_path / "native")
    assert found.keys() == stored.keys()
    assert all(same_bits(found[key], tensor) for key, tensor in stored.items())


def test_separate_experts_are_stacked(tmp_path: Path) -> None:
    architecture = small(experts=11)
    write_checkpoint(tmp_path / "separate", NATIVE_PER_EXPERT, architecture)
    convert(tmp_path / "separate", tmp_path / "native")
    expected = write_checkpoint(tmp_path / "stacked", NATIVE, architecture)
    found = read_tensors(tmp_path / "native")
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], tensor) for key, tensor in expected.items())


def test_separate_experts_go_back_to_the_raw_layout(tmp_path: Path) -> None:
    architecture = small(experts=11)
    write_checkpoint(tmp_path / "native", NATIVE_PER_EXPERT, architecture)
    convert(tmp_path / "native", tmp_path / "raw", to="raw")
    stacked = write_checkpoint(tmp_path / "stacked", NATIVE, architecture)
    expected = split(RAW, architecture, stacked)
    found = read_tensors(tmp_path / "raw")
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], tensor) for key, tensor in expected.items())
    config = json.loads((tmp_path / "raw" / "config.json").read_text())
    assert config == raw_config(architecture)
