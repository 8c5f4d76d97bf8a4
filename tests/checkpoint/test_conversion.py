"""What convert writes: the same model under other names, complete, and readable by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import zaya_tools
from tests.checkpoint.support import model, tree
from tests.synthetic import GEOMETRIES, LAYOUTS, TORCH, read_tensors, same_bits, small, write_checkpoint
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.checkpoint.conversion import convert, plan_conversion
from zaya_tools.checkpoint.inspection import inspect
from zaya_tools.checkpoint.source import INDEX
from zaya_tools.dtypes import NAMES
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config
from zaya_tools.parameters import PROTECTED, Role, parameters

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    different = [name for name, tensor in expected.items() if not same_bits(found[name], tensor)]
    assert not different


def nothing_written(folder: Path, *sources: str) -> bool:
    return sorted(entry.name for entry in folder.iterdir()) == sorted(sources)


@pytest.mark.parametrize("layout", ["raw", "smoe", "native per expert"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_native_shards_hold_the_same_bits(tmp_path: Path, geometry: str, layout: str) -> None:
    architecture = small(**GEOMETRIES[geometry])
    write_checkpoint(tmp_path / "source", LAYOUTS[layout], architecture, shards=3)
    expected = write_checkpoint(tmp_path / "native", NATIVE, architecture)
    convert(tmp_path / "source", tmp_path / "out", max_shard_size=20_000)
    assert_same(read_tensors(tmp_path / "out"), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    fields = ("num_hidden_layers", "num_experts", "layer_types", "sliding_window", "tie_word_embeddings", "head_dim")
    assert {key: config[key] for key in fields} == {key: native_config(architecture)[key] for key in fields}


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_there_and_back_gives_the_same_bits(tmp_path: Path, geometry: str) -> None:
    architecture = small(**GEOMETRIES[geometry])
    before = write_checkpoint(tmp_path / "source", RAW, architecture, shards=2)
    convert(tmp_path / "source", tmp_path / "native", max_shard_size=20_000)
    convert(tmp_path / "native", tmp_path / "back", to="raw", max_shard_size=30_000)
    after = read_tensors(tmp_path / "back")
    biases = {name for name in before if name.endswith("balancing_biases")}
    assert biases
    for name in biases:
        assert after[name].dtype == torch.float32
        assert torch.equal(after[name], before[name].float())
    assert_same({name: t for name, t in after.items() if name not in biases},
                {name: t for name, t in before.items() if name not in biases})  # fmt: skip
    assert inspect(tmp_path / "back").architecture == inspect(tmp_path / "source").architecture


@pytest.mark.parametrize("limit", [1, 5_000, 40_000, "1GB"])
def test_shards_and_index(tmp_path: Path, limit: int | str) -> None:
    model(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", max_shard_size=limit)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    where: dict[str, str] = {}
    total = 0
    for name in files:
        with safe_open(tmp_path / "out" / name, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        where |= dict.fromkeys(tensors, name)
        size = sum(tensor.nbytes for tensor in tensors.values())
        total += size
        assert len(tensors) == 1 or isinstance(limit, str) or size <= limit
    assert index["weight_map"] == where
    assert list(index["weight_map"]) == sorted(where)
    assert index["metadata"]["total_size"] == total
    assert len(files) == {1: len(where), "1GB": 1}.get(limit, len(files))
    assert not inspect(tmp_path / "out").problems


@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("asked", ["keep", "bfloat16", "float16", "float32"])
def test_dtypes_and_protected_roles(tmp_path: Path, stored: str, asked: str) -> None:
    architecture = small()
    model(tmp_path / "source", dtype=stored)
    before = write_checkpoint(tmp_path / "native", NATIVE, architecture, dtype=stored)
    convert(tmp_path / "source", tmp_path / "out", dtype=asked)
    after = read_tensors(tmp_path / "out")
    requested = TORCH[stored if asked == "keep" else NAMES[asked]]
    seen = set()
    for parameter in parameters(architecture):
        found, original = after[parameter.name], before[parameter.name]
        if parameter.role is Role.BALANCING:
            expected = original.float()
        elif parameter.role in PROTECTED and requested != torch.float32:
            expected = original
        else:
            expected = original.to(requested)
        assert same_bits(found, expected), parameter.name
        if parameter.role in PROTECTED:
            assert torch.equal(found.double(), original.double()), "a protected value never changes"
        seen.add(parameter.role)
    assert seen >= PROTECTED
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == ("bfloat16" if asked == "keep" else asked)


def test_float32_protected_tensors_of_a_bfloat16_model_stay(tmp_path: Path) -> None:
    architecture = small()
    values = write_checkpoint(tmp_path / "plain", RAW, architecture)
    roles = ("temp", "conv_qk", "router", "res_scale", "norm")
    wide = {name: tensor.float() + 1e-5 for name, tensor in values.items() if any(role in name for role in roles)}
    model(tmp_path / "source", overrides=wide)
    for dtype in ("keep", "bfloat16", "float16"):
        convert(tmp_path / "source", tmp_path / dtype, dtype=dtype)
        kept = [tensor for tensor in read_tensors(tmp_path / dtype).values() if tensor.dtype == torch.float32]
        assert sum(tensor.numel() for tensor in kept) == sum(tensor.numel() for tensor in wide.values())
        total = sum(tensor.double().sum() for tensor in kept)
        assert float(total) == pytest.approx(float(sum(t.double().sum() for t in wide.values())), rel=1e-12)


def tied_model(folder: Path, *, tied: bool, head: str | None) -> None:
    """A model whose config says `tied`, and whose head is the embedding, something else, or absent."""
    architecture = small(tied=tied)
    embedding = model(folder / "plain", small())[EMBEDDING]
    stored = {"same": embedding.clone(), "different": embedding + 1, None: None}[head]
    overrides: dict[str, Tensor | None] = {EMBEDDING: embedding}
    if stored is not None or not tied:
        overrides[HEAD] = stored
    model(folder / "source", architecture, overrides=overrides, shards=2)


def test_tied_and_equal_is_dropped_and_said(tmp_path: Path) -> None:
    tied_model(tmp_path, tied=True, head="same")
    work = convert(tmp_path / "source", tmp_path / "out").conversion
    assert HEAD not in read_tensors(tmp_path / "out")
    assert "tied" in work.plan.drops[HEAD]
    assert HEAD in json.loads((tmp_path / "out" / "zaya_manifest.json").read_text())["dropped"]
    report = inspect(tmp_path / "source")
    assert report.convertible
    assert any(HEAD in note for note in report.notes)


def test_tied_and_different_is_an_error(tmp_path: Path) -> None:
    tied_model(tmp_path, tied=True, head="different")
    with pytest.raises(LayoutError, match=r"lm_head\.weight differs from the embedding although the config ties them"):
        convert(tmp_path / "source", tmp_path / "out")
    assert nothing_written(tmp_path, "plain", "source")


def test_untied_and_missing_is_an_error(tmp_path: Path) -> None:
    tied_model(tmp_path, tied=False, head=None)
    with pytest.raises(LayoutError, match=r"1 tensor is missing .*lm_head\.weight"):
        convert(tmp_path / "source", tmp_path / "out")
    assert nothing_written(tmp_path, "plain", "source")


@pytest.mark.parametrize("head", ["same", "different"])
def test_untied_and_present_is_kept(tmp_path: Path, head: str) -> None:
    tied_model(tmp_path, tied=False, head=head)
    convert(tmp_path / "source", tmp_path / "out")
    assert same_bits(read_tensors(tmp_path / "out")[HEAD], read_tensors(tmp_path / "source")[HEAD])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(("layout", "to"), [("native", "native"), ("raw", "raw")])
def test_a_model_that_is_there_already_writes_nothing(tmp_path: Path, layout: str, to: Any) -> None:
    write_checkpoint(tmp_path / "source", LAYOUTS[layout], small())
    with pytest.raises(LayoutError, match=f"source is already {to}; nothing was written") as caught:
        convert(tmp_path / "source", tmp_path / "out", to=to)
    assert caught.value.hint
    assert nothing_written(tmp_path, "source")


def test_the_same_layout_in_another_dtype_is_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", NATIVE, small())
    convert(tmp_path / "source", tmp_path / "out", dtype="float32")
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "out").values()} == {torch.float32}


def test_clamped_temperatures_are_baked_and_said(tmp_path: Path) -> None:
    architecture = small()
    config = raw_config(architecture) | {"clamp_temp": True}
    temp = torch.tensor([3.0], dtype=torch.bfloat16)
    model(tmp_path / "source", config=config, overrides={"model.layers.0.self_attn.qkv.temp": temp})
    work = convert(tmp_path / "source", tmp_path / "out").conversion
    after = read_tensors(tmp_path / "out")["model.layers.0.self_attn.qk_norm.temp"]
    assert after.dtype == torch.float32
    assert float(after) == pytest.approx(float(torch.tensor(2.0).exp()), rel=1e-7)
    assert any("baked" in note for note in work.notes)
    assert "clamp_temp" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gguf"}, "unknown layout 'gguf'"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"dtype": ""}, "unknown dtype ''"),
        ({"max_shard_size": "much"}, "'much' is not a size"),
        ({"max_shard_size": 0}, "'0' is not a size"),
        ({"max_shard_size": "-5GB"}, "'-5GB' is not a size"),
        ({"max_shard_size": "9" * 400 + "GB"}, "is not a size"),
        ({"workers": 0}, "0 workers cannot do anything"),
        ({"workers": -1}, "-1 workers cannot do anything"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    model(tmp_path / "source")
    with pytest.raises(ZayaError, match=message) as caught:
        convert(tmp_path / "source", tmp_path / "out", **options)
    assert caught.value.hint
    assert nothing_written(tmp_path, "source")


def test_a_missing_expert_stops_the_run_and_is_named(tmp_path: Path) -> None:
    gone = "model.layers.1.zaya_block.experts.local_experts.1.linear_fc2.weight"
    model(tmp_path / "source", overrides={gone: None})
    with pytest.raises(LayoutError, match="1 tensor is missing") as caught:
        convert(tmp_path / "source", tmp_path / "out")
    assert gone in caught.value.message
    assert nothing_written(tmp_path, "source")


def test_from_a_script(tmp_path: Path) -> None:
    model(tmp_path / "source")
    report = zaya_tools.inspect(str(tmp_path / "source"))
    assert report.convertible
    done: list[int] = []
    result = zaya_tools.convert(str(tmp_path / "source"), str(tmp_path / "out"), advance=done.append, workers=2)
    assert result.destination == tmp_path / "out"
    assert sum(done) == result.conversion.plan.read_bytes
    assert set(result.digests) == {shard.filename for shard in result.conversion.plan.shards}
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        zaya_tools.nothing_of_that_name  # noqa: B018


def test_planning_writes_nothing(tmp_path: Path) -> None:
    model(tmp_path / "source")
    before = tree(tmp_path)
    assert plan_conversion(tmp_path / "source").plan.shards
    assert tree(tmp_path) == before


def test_the_plan_says_what_will_be_written(tmp_path: Path) -> None:
    architecture: Architecture = small(blocks=3, experts=5, tied=False)
    model(tmp_path / "source", architecture)
    work = plan_conversion(tmp_path / "source", max_shard_size=30_000)
    convert(tmp_path / "source", tmp_path / "out", max_shard_size=30_000)
    written = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    assert written == {shard.filename: shard.nbytes for shard in work.plan.shards}
    assert work.plan.nbytes == sum(written.values())
