"""Checkpoints straight from the trainer become the same shards as the model's raw export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.megatron import (
    State,
    primus,
    rank_state,
    save,
    trainer_args,
    trainer_state,
    write_distributed,
    write_ranks,
    write_run,
)
from tests.reference.raw_model import raw_logits
from tests.synthetic import GEOMETRIES, read_tensors, same_bits, small, split, write_checkpoint
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.inspection import inspect
from zaya_tools.checkpoint.opening import Reading
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config

FOUR = {"experts": 4, "blocks": 4, "query_heads": 4, "kv_heads": 2}


def shards(folder: Path) -> dict[str, bytes]:
    """The output of a conversion that says what the model is: its shards, index and config."""
    names = [*sorted(file.name for file in folder.glob("*.safetensors")), "model.safetensors.index.json", "config.json"]
    return {name: (folder / name).read_bytes() for name in names}


def expected(tmp_path: Path, a: Architecture, dtype: str = "BF16", **options: Any) -> dict[str, bytes]:
    """What converting the raw export of the same model gives."""
    if not (tmp_path / "expected").exists():
        write_checkpoint(tmp_path / "raw", RAW, a, dtype=dtype)
        convert(tmp_path / "raw", tmp_path / "expected", max_shard_size=20_000, **options)
    return shards(tmp_path / "expected")


def converted(tmp_path: Path, source: Path, reading: Reading | None = None, **options: Any) -> dict[str, bytes]:
    convert(source, tmp_path / "out", max_shard_size=20_000, reading=reading, **options)
    return shards(tmp_path / "out")


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(
    "grid",
    [
        {},
        {"ep": 2},
        {"ep": 4},
        {"pp": 2},
        {"pp": 2, "ep": 2},
        {"pp": 2, "virtual": 2},
        {"pp": 3},
        {"tp": 2},
        {"tp": 2, "pp": 2, "ep": 2},
        {"prefix": "module."},
    ],
    ids=str,
)
def test_ranks_give_the_shards_of_the_raw_export(tmp_path: Path, grid: dict[str, Any], dtype: str) -> None:
    a = small(**FOUR, dtype="bfloat16" if dtype == "BF16" else "float32")
    write_run(tmp_path / "run", a, dtype=dtype, **grid)
    assert converted(tmp_path, tmp_path / "run") == expected(tmp_path, a, dtype)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_geometry_comes_from_the_saved_arguments(tmp_path: Path, geometry: str) -> None:
    a = small(**GEOMETRIES[geometry])
    write_run(tmp_path / "run", a)
    assert converted(tmp_path, tmp_path / "run") == expected(tmp_path, a)


@pytest.mark.parametrize("geometry", ["plain", "sliding", "untied", "one block"])
def test_a_distributed_checkpoint_gives_the_shards_of_the_raw_export(tmp_path: Path, geometry: str) -> None:
    a = small(**GEOMETRIES[geometry])
    write_distributed(tmp_path / "iter_0000100", a)
    assert converted(tmp_path, tmp_path / "iter_0000100") == expected(tmp_path, a)
    report = inspect(tmp_path / "iter_0000100")
    assert (report.layout, report.complete, report.convertible) == ("megatron", True, True)
    assert "of iteration 100" in report.notes[0]


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("container", [None, "model", "state_dict", "module."])
def test_state_dicts_with_a_config_beside_them(tmp_path: Path, name: str, container: str | None) -> None:
    a = small()
    raw = split(RAW, a, _logical(a))
    state: Any = {f"module.{key}": tensor for key, tensor in raw.items()} if container == "module." else raw
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw_config(a)))
    save(tmp_path / "source" / name, {container: state, "epoch": 3} if container in ("model", "state_dict") else state)
    assert converted(tmp_path, tmp_path / "source" / name) == expected(tmp_path, a)


def test_a_folder_of_several_state_dicts_is_one_model(tmp_path: Path) -> None:
    a = small()
    raw = list(split(RAW, a, _logical(a)).items())
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps(raw_config(a)))
    for number in range(3):
        save(tmp_path / "source" / f"pytorch_model-0000{number + 1}-of-00003.bin", dict(raw[number::3]))
    save(tmp_path / "source" / "optimizer.pt", {"state": torch.zeros(4)})
    assert converted(tmp_path, tmp_path / "source") == expected(tmp_path, a)


def _logical(a: Architecture) -> State:
    from tests.synthetic import logical

    return logical(a)


@pytest.mark.parametrize("matrices", ["fused", "three"])
@pytest.mark.parametrize("saved", ["state dict", "distributed"])
def test_prime_rls_layout(tmp_path: Path, matrices: str, saved: str) -> None:
    a = small(dtype="bfloat16")
    state: State = {}
    for name, tensor in _logical(a).items():
        old = name.replace("model.norm.", "model.final_norm.").replace(".mlp.gate.", ".mlp.router.")
        old = old.replace(".router_mlp.norm.", ".router_mlp.rmsnorm_eda.")
        if matrices == "three" and name.endswith("gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            state |= {old.replace("gate_up_proj", "w1"): gate.clone(), old.replace("gate_up_proj", "w3"): up.clone()}
        elif matrices == "three" and name.endswith("down_proj") and "experts" in name:
            state[old.replace("down_proj", "w2")] = tensor
        else:
            state[old] = tensor
    state["model.layers.0.mlp.tokens_per_expert"] = torch.zeros(a.experts)
    config = tmp_path / "native.json"
    config.write_text(json.dumps(native_config(a)))
    if saved == "distributed":
        from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

        app = {"app": {"model": state, "optimizers": {"state": {"exp_avg": torch.zeros(8)}}, "progress": {"step": 4}}}
        save_distributed(app, checkpoint_id=tmp_path / "step_4", no_dist=True)
        source = tmp_path / "step_4"
    else:
        source = tmp_path / "weights.pt"
        save(source, state)
    assert converted(tmp_path, source, Reading(config=config)) == expected(tmp_path, a)


def test_raw_names_under_decoder_are_read_too(tmp_path: Path) -> None:
    a = small()
    raw = split(RAW, a, _logical(a))
    state = {f"module.{name.replace('model.', 'decoder.', 1)}": tensor for name, tensor in raw.items()}
    save(tmp_path / "model.pt", rank_state(trainer_args(a), 5, [state]))
    assert converted(tmp_path, tmp_path / "model.pt") == expected(tmp_path, a)


def test_the_copy_of_the_embedding_in_the_last_stage_is_compared_and_dropped(tmp_path: Path) -> None:
    a = small(**FOUR)
    state = trainer_state(a)
    state["output_layer.weight"] = state["embedding.word_embeddings.weight"].clone()
    write_run(tmp_path / "run", a, state=state, pp=2)
    assert converted(tmp_path, tmp_path / "run") == expected(tmp_path, a)


def test_extra_state_is_dropped_with_a_reason(tmp_path: Path) -> None:
    a = small()
    state = trainer_state(a)
    state["decoder.layers.0.self_attn.linear_q._extra_state"] = torch.zeros(4, dtype=torch.uint8)
    write_run(tmp_path / "run", a, state=state)
    work = convert(tmp_path / "run", tmp_path / "out").conversion
    reasons = {name.rpartition(".")[2]: reason for name, reason in work.plan.drops.items()}
    assert reasons.keys() == {"_extra_state", "router_states_scale", "balance_m", "balance_v", "balance_step"}
    assert "kernels" in reasons["_extra_state"]
    assert "never use" in reasons["router_states_scale"]
    assert all("balancing optimiser" in reasons[f"balance_{kind}"] for kind in ("m", "v", "step"))


def test_logits_are_those_of_the_raw_model(tmp_path: Path) -> None:
    from transformers import ZayaForCausalLM

    a = small(**FOUR, dtype="float32", vocab_size=128)
    write_run(tmp_path / "run", a, dtype="F32", ep=2, pp=2)
    convert(tmp_path / "run", tmp_path / "out")
    ids = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(1))
    raw = split(RAW, a, {name: tensor.float() for name, tensor in _logical32(a).items()})
    wanted = raw_logits(raw_config(a), raw, ids)
    model: Any = ZayaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    stored = read_tensors(tmp_path / "out")
    for name, buffer in model.named_buffers():
        if name.endswith("balancing_biases"):
            buffer.copy_(stored[name])
    with torch.inference_mode():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    assert wanted.std() > 0.2
    assert (found - wanted).abs().max() < 1e-4


def _logical32(a: Architecture) -> State:
    from tests.synthetic import logical

    return logical(a, dtype="F32")


@pytest.mark.parametrize("geometry", ["plain", "sliding", "untied", "bias", "eleven experts"])
def test_there_and_back_is_bit_exact(tmp_path: Path, geometry: str) -> None:
    a = small(**GEOMETRIES[geometry])
    state = write_ranks(tmp_path / "run", a)
    convert(tmp_path / "run", tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "back", to="megatron")
    file = tmp_path / "back" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([type(trainer_args(a))]):
        back = torch.load(file, weights_only=True, mmap=True)
    assert (back["checkpoint_version"], back["iteration"]) == (3.0, 0)
    assert back["model"].keys() == state.keys()
    for name, tensor in state.items():
        found = back["model"][name]
        if name.endswith("balancing_biases"):
            assert torch.equal(found, tensor.float())
        elif name.rpartition(".")[2].startswith("balance_"):
            assert torch.equal(found, torch.zeros_like(tensor))
        else:
            assert same_bits(found, tensor), name
    convert(tmp_path / "back", tmp_path / "again")
    assert shards(tmp_path / "again") == shards(tmp_path / "native")
    assert inspect(tmp_path / "back").architecture == inspect(tmp_path / "native").architecture


def test_raw_to_megatron_and_back_gives_the_same_files(tmp_path: Path) -> None:
    a = small(clamp_temp=True)
    write_checkpoint(tmp_path / "raw", RAW, a)
    convert(tmp_path / "raw", tmp_path / "megatron", to="megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="raw")
    before, after = read_tensors(tmp_path / "raw"), read_tensors(tmp_path / "back")
    assert after.keys() == before.keys()
    assert all(same_bits(after[name], tensor) for name, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == raw_config(a)


def test_trainers_names(tmp_path: Path) -> None:
    # The names that the trainer's modules give, by hand.
    names = {primus(name) for name in split(RAW, small(blocks=1), _logical(small(blocks=1)))}
    assert {
        "embedding.word_embeddings.weight",
        "decoder.final_norm.weight",
        "decoder.res_scale.residual_bias",
        "decoder.layers.0.res_scale.hidden_states_scale",
        "decoder.layers.0.self_attn.linear_q.weight",
        "decoder.layers.0.self_attn.conv_qk.1.bias",
        "decoder.layers.0.self_attn.temp",
        "decoder.layers.0.self_attn.o_proj.weight",
        "decoder.layers.1.zaya_block.router.router_mlp.4.weight",
        "decoder.layers.1.zaya_block.router.balancing_biases",
        "decoder.layers.1.zaya_block.local_experts.2.linear_fc1.weight",
    } <= names
