from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import CONFIGS, LAYOUTS, config_of, small, split, write_checkpoint, write_tensors
from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.model.block import Block
from zaya_tools.model.experts import DenseExperts
from zaya_tools.model.model import ZayaModel
from zaya_tools.model.weights import TORCH, Weights, read_tensor
from zaya_tools.tensors import TensorInfo

from .support import BASE, GEOMETRIES, random_ids, random_tensors, transformers_model

DEEP = replace(BASE, blocks=6, sliding=(False,) * 6)
CHECKED = ("plain", "times 2 and 4, attention bias", "sliding", "untied head with bias")


def write(
    folder: Path, architecture: Architecture, layout: str = "native", dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """A checkpoint of a random model whose skip class is alive."""
    values = {name: tensor.to(dtype) for name, tensor in random_tensors(architecture).items()}
    stated = {**config_of(LAYOUTS[layout], architecture), **config}
    write_tensors(folder, split(LAYOUTS[layout], architecture, values), stated, shards=2)
    return folder


def model_of(weights: Weights) -> ZayaModel:
    return ZayaModel(weights.architecture, weights.ends(), weights)


def experts(block: Block) -> DenseExperts:
    assert isinstance(block.experts, DenseExperts)
    return block.experts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("geometry", CHECKED)
def test_every_layout_gives_the_logits_of_transformers(tmp_path: Path, layout: str, geometry: str) -> None:
    a = GEOMETRIES[geometry]
    weights = Weights.open(write(tmp_path, a, layout))
    ids = random_ids(a, 2, 20)
    with torch.no_grad():
        expected = transformers_model(a)(ids, use_cache=False).logits
    torch.testing.assert_close(model_of(weights).logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["raw", "smoe"])
def test_clamped_temperatures_are_baked(tmp_path: Path, layout: str) -> None:
    a = replace(BASE, kv_heads=4, query_heads=4)
    temperatures = torch.tensor([-0.5, 0.0, 0.75, 2.5])
    values = dict(random_tensors(a))
    stated = {**CONFIGS[layout](a), "clamp_temp": True}
    baked = dict(values)
    for name in [name for name in values if name.endswith(".temp")]:
        values[name] = temperatures
        # e^0 (nearly) for what is below the range, e^2 for what is above it.
        baked[name] = torch.tensor([1.0, 1.0, 2.1170000, 7.3890561])
    write_tensors(tmp_path, split(LAYOUTS[layout], a, values), stated)
    weights = Weights.open(tmp_path)
    assert not weights.architecture.clamp_temp
    ids = random_ids(a, 2, 20)
    torch.testing.assert_close(model_of(weights).logits(ids), ZayaModel.of(a, baked).logits(ids), atol=1e-4, rtol=0)


def test_what_is_stored_in_bfloat16_computes_in_float32(tmp_path: Path) -> None:
    ids = random_ids(BASE, 2, 20)
    rounded = {name: tensor.bfloat16().float() for name, tensor in random_tensors(BASE).items()}
    weights = Weights.open(write(tmp_path, BASE, "raw", torch.bfloat16))
    ours = model_of(weights).logits(ids)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, ZayaModel.of(BASE, rounded).logits(ids), atol=1e-5, rtol=0)


def test_bfloat16_computes_as_the_model_in_memory_does(tmp_path: Path) -> None:
    values = {name: t if name.endswith("biases") else t.bfloat16() for name, t in random_tensors(BASE).items()}
    write_tensors(tmp_path, values, config_of(NATIVE, BASE))
    ids = random_ids(BASE, 2, 20)
    ours = model_of(Weights.open(tmp_path, dtype=torch.bfloat16)).logits(ids)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, ZayaModel.of(BASE, values, dtype=torch.bfloat16).logits(ids))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_blocks_does_not_grow_with_depth(tmp_path: Path, layout: str) -> None:
    write_checkpoint(tmp_path, LAYOUTS[layout], small(blocks=7), dtype="F32")
    weights = Weights.open(tmp_path)
    places = [(experts(block).gate_up.data_ptr(), experts(block).down.data_ptr()) for block in weights]
    assert len(places) == 7
    assert len(set(places)) == 2
    assert all(place == places[index % 2] for index, place in enumerate(places))


def test_a_block_stays_as_it_is_while_the_next_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights.open(write(tmp_path, DEEP))
    kept = [experts(block).gate_up.clone() for block in weights.resident()]
    read = weights._block
    done = [Event() for _ in range(DEEP.blocks)]

    def signalling(index: int, *arguments: Any) -> Block:
        block = read(index, *arguments)
        done[index].set()
        return block

    monkeypatch.setattr(weights, "_block", signalling)
    for index, block in enumerate(weights):
        if index + 1 < DEEP.blocks:
            assert done[index + 1].wait(60)
        assert torch.equal(experts(block).gate_up, kept[index])
    for index, expected in enumerate(kept):
        assert torch.equal(expected, random_tensors(DEEP)[f"model.layers.{index}.mlp.experts.gate_up_proj"])


def test_resident_blocks_have_memory_of_their_own(tmp_path: Path) -> None:
    weights = Weights.open(write(tmp_path, DEEP))
    blocks = weights.resident()
    assert len({experts(block).down.data_ptr() for block in blocks}) == DEEP.blocks
    ids = random_ids(DEEP, 1, 12)
    together = ZayaModel(weights.architecture, weights.ends(), blocks)
    # More than once, and after blocks have been streamed from the same files.
    for _ in range(2):
        assert torch.equal(together.logits(ids), model_of(weights).logits(ids))


def test_blocks_can_be_left_and_begun_again(tmp_path: Path) -> None:
    weights = Weights.open(write(tmp_path, DEEP))
    started = weights.blocks()
    assert isinstance(started, Generator)
    first = experts(next(started)).down.clone()
    started.close()
    assert torch.equal(experts(next(weights.blocks())).down, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fits_counts_what_blocks_are_when_they_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    weights = Weights.open(write(tmp_path, DEEP, dtype=torch.bfloat16), dtype=dtype)
    stored = sum(tensor.nbytes for tensor in weights.source.tensors.values())
    needed = 2 * (stored * dtype.itemsize // 2)

    def free(nbytes: int) -> bool:
        lines = f"MemTotal:  1 kB\nMemAvailable:   {nbytes // 1024} kB\n"
        monkeypatch.setattr(Path, "read_text", lambda *_: lines)
        return weights.fits()

    assert free(needed + 2048)
    assert not free(needed - 2048)


def test_one_expert_of_another_dtype_is_named(tmp_path: Path) -> None:
    a = small()
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    odd = torch.zeros(a.expert_width, a.hidden_size, dtype=torch.float32)
    write_checkpoint(tmp_path, NATIVE_PER_EXPERT, a, overrides={name: odd})
    weights = Weights.open(tmp_path)
    with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.*BF16, F32"):
        list(weights)


def test_an_incomplete_checkpoint_is_not_opened(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NATIVE, small(), overrides={"model.layers.1.mlp.experts.down_proj": None})
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.mlp\.experts\.down_proj"):
        Weights.open(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, NATIVE, small())
    weights = Weights.open(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(ZayaError, match=r"model\.safetensors"):
        list(weights)


def test_the_head_of_a_tied_model_is_its_embedding(tmp_path: Path) -> None:
    ends = Weights.open(write(tmp_path, BASE, dtype=torch.bfloat16)).ends()
    assert ends.head is ends.embedding
    assert ends.embedding.dtype == torch.bfloat16  # as stored: only what is used of it is cast


@pytest.mark.parametrize("name", sorted(TORCH))
def test_tensors_are_read_as_stored_and_joined(tmp_path: Path, name: str) -> None:
    dtype = TORCH[name]
    data = [torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8) for n in (3, 4)]
    if dtype is torch.bool:
        data = [part % 2 for part in data]
    infos: list[TensorInfo] = []
    for number, part in enumerate(data):
        file = tmp_path / f"{number}.bin"
        file.write_bytes(b"\0" * 5 + bytes(part.tolist()))
        infos.append(TensorInfo(str(number), name, (len(part) // dtype.itemsize,), file, 5, len(part)))
    joined = read_tensor(infos, torch.empty(7, dtype=dtype))
    assert joined.dtype == dtype
    assert torch.equal(joined.view(torch.uint8), torch.cat(data))


def test_a_number_without_axes_is_read(tmp_path: Path) -> None:
    file = tmp_path / "scale.bin"
    file.write_bytes(torch.tensor(2.5).numpy().tobytes())
    out: Tensor = read_tensor([TensorInfo("scale", "F32", (), file, 0, 4)], torch.empty(()))
    assert out.item() == 2.5
