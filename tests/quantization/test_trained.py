"""Quantizing straight from a trainer's checkpoint gives, byte for byte, what quantizing the raw export gives."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.support import no_leftovers, tree, use_blocks
from tests.checkpoint.trained import FILE, rewrite
from tests.megatron import State, save, trainer_state, write_distributed, write_run
from tests.quantization.support import geometry
from tests.synthetic import logical, write_checkpoint
from zaya_tools import Reading, quantize
from zaya_tools.architecture import native_config
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.errors import DestinationError, NonFiniteError, SourceError
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.layouts.raw import RAW
from zaya_tools.quantization import stream
from zaya_tools.quantization.conversion import plan_quantization

A = geometry(experts=4)
SIZE: dict[str, Any] = {"max_shard_size": 120_000}
FC1 = "decoder.layers.1.zaya_block.local_experts.3.linear_fc1.weight"


def prime_rl(folder: Path) -> None:
    """Experts as w1, w2 and w3 under native names: gate and up have to be put together first."""
    state: State = {}
    for name, tensor in logical(A).items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            state |= {name.replace("gate_up_proj", "w1"): gate.clone(), name.replace("gate_up_proj", "w3"): up.clone()}
        else:
            state[name.replace("experts.down_proj", "experts.w2")] = tensor
    save(folder / "model.pt", state)
    (folder / "config.json").write_text(json.dumps(native_config(A)))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "one rank": lambda folder: write_run(folder, A),
    "expert-parallel": lambda folder: write_run(folder, A, ep=2),
    "an expert a rank": lambda folder: write_run(folder, A, ep=4),
    "tensor-parallel": lambda folder: write_run(folder, A, tp=2),
    "every way": lambda folder: write_run(folder, A, tp=2, pp=2, ep=2),
    "torch_dist": lambda folder: write_distributed(folder / "iter_0000100", A),
    "prime-rl": prime_rl,
}


def place(folder: Path, kind: str) -> Path:
    """What to give to `quantize` of what WRITERS[kind] wrote in `folder`."""
    return {"torch_dist": folder / "iter_0000100", "prime-rl": folder / "model.pt"}.get(kind, folder)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "raw"
    write_checkpoint(folder, RAW, A)
    return folder


def model_files(folder: Path) -> dict[str, bytes]:
    """Everything that says what the model is; the manifest and the card name the source."""
    return {name: data for name, data in tree(folder).items() if name not in ("zaya_manifest.json", "README.md")}


@pytest.mark.parametrize("recipe", ["fp8", "int4", "nvfp4a16"])
@pytest.mark.parametrize("kind", WRITERS)
def test_the_files_are_those_of_the_raw_export(kind: str, recipe: str, raw: Path, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "run")
    before = tree(tmp_path / "run")
    quantize(raw, tmp_path / "expected", recipe, **SIZE)
    quantize(place(tmp_path / "run", kind), tmp_path / "out", recipe, **SIZE)
    written, expected = model_files(tmp_path / "out"), model_files(tmp_path / "expected")
    assert len(expected) > 4
    assert written == expected
    assert tree(tmp_path / "run") == before


@pytest.mark.parametrize("kind", ["expert-parallel", "every way", "torch_dist"])
def test_the_record_is_that_of_the_raw_export(kind: str, raw: Path, tmp_path: Path) -> None:
    """Names of the source aside: the same bytes were read, and the same was measured."""
    WRITERS[kind](tmp_path / "run")
    quantize(raw, tmp_path / "expected", "int4", **SIZE)
    quantize(place(tmp_path / "run", kind), tmp_path / "out", "int4", **SIZE)
    own, expected = (json.loads((tmp_path / name / "zaya_manifest.json").read_text()) for name in ("out", "expected"))
    for key in ("options", "recipe", "quantized", "architecture", "layout"):
        assert own[key] == expected[key], key
    digests = [
        sorted((part["bytes"], part["blake3"]) for parts in entry["source"]["tensors"].values() for part in parts)
        for entry in (own, expected)
    ]
    assert digests[0] == digests[1]
    assert own["source"]["layout"] == "megatron"
    assert any("optimizer and random state were not read" in note for note in own["notes"])
    assert str(tmp_path) not in json.dumps(own)


def test_stacked_experts_come_from_several_ranks(raw: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run", A, ep=2, tp=2)
    quantize(raw, tmp_path / "expected", "fp8-experts", expert_layout="stacked")
    quantize(tmp_path / "run", tmp_path / "out", "fp8-experts", expert_layout="stacked")
    assert model_files(tmp_path / "out") == model_files(tmp_path / "expected")
    assert check_weights(tmp_path / "out", tmp_path / "run").failures == ()


@pytest.mark.parametrize("kind", ["tensor-parallel", "torch_dist", "prime-rl"])
@pytest.mark.parametrize("slab", [512, 5000])
def test_slabs_that_end_inside_a_part(
    kind: str, slab: int, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[kind](tmp_path / "run")
    quantize(raw, tmp_path / "expected", "nvfp4a16")
    use_blocks(monkeypatch, 1024)
    monkeypatch.setattr(stream, "BLOCK", 1024)
    monkeypatch.setattr(stream, "SLAB", slab)
    quantize(place(tmp_path / "run", kind), tmp_path / "out", "nvfp4a16", workers=3)
    assert model_files(tmp_path / "out") == model_files(tmp_path / "expected")


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4a16", "bf16"])
def test_a_bad_number_in_a_part_is_named(recipe: str, tmp_path: Path) -> None:
    state = trainer_state(A)
    state[FC1][200, 5] = float("nan")  # of the second rank's up rows
    write_run(tmp_path / "run", A, state=state, tp=2)
    with pytest.raises(NonFiniteError) as caught:
        quantize(tmp_path / "run", tmp_path / "out", recipe)
    assert caught.value.message == (
        f"{FC1}: 1 value is NaN or infinite, the first at [200, 5] (in mp_rank_01/model_optim_rng.pt)"
    )
    assert no_leftovers(tmp_path)
    assert not (tmp_path / "out").exists()


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", A, ep=2)

    def change(state: dict[str, Any]) -> None:
        state["model"]["decoder.final_norm.weight"][3] += 1

    rewrite(run / "mp_rank_00_001" / FILE, change)
    with pytest.raises(SourceError, match=r"decoder\.final_norm\.weight differs between mp_rank_00_000 and"):
        quantize(tmp_path / "run", tmp_path / "out", "fp8")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    write_run(tmp_path / "run", A, ep=2, tp=2)
    quantize(tmp_path / "run", tmp_path / "expected", "int4", **SIZE)
    calls = 0

    def stop(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "run", tmp_path / "out", "int4", advance=stop, **SIZE)
    assert any((partial_folder(tmp_path / "out") / "output").iterdir())
    with pytest.raises(DestinationError, match="other options"):
        quantize(tmp_path / "run", tmp_path / "out", "int4", resume=True, reading=Reading(vocab_size=61), **SIZE)
    quantize(tmp_path / "run", tmp_path / "out", "int4", resume=True, **SIZE)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


@pytest.mark.parametrize("saved", ["torch", "torch_dist"])
def test_another_iteration_is_another_source(saved: str, tmp_path: Path) -> None:
    """Even where times, sizes and places of all tensors are equal, as in copies of two iterations."""
    run = tmp_path / "run"
    for seed, iteration in enumerate((100, 200)):
        state = trainer_state(A, seed=seed)
        if saved == "torch":
            write_run(run, A, state=state, iteration=iteration, optimizer=False)
        else:
            write_distributed(run / f"iter_{iteration:07d}", A, state, iteration=iteration)
    if saved == "torch_dist":  # where its folder is, and a random number, are all that torch notes of a save
        shutil.copy(run / "iter_0000100" / ".metadata", run / "iter_0000200" / ".metadata")
    for file in run.rglob("*"):
        os.utime(file, ns=(10**18, 10**18))
    first, second = Reading(iteration="100"), Reading(iteration="200")
    quantize(run, tmp_path / "out", "fp8", reading=first)
    assert quantize(run, tmp_path / "out", "fp8", reading=first, resume=True).already_complete
    with pytest.raises(DestinationError, match="already exists"):
        quantize(run, tmp_path / "out", "fp8", reading=second, resume=True)
    quantize(run, tmp_path / "out", "fp8", reading=second, force=True)
    quantize(run / "iter_0000200", tmp_path / "expected", "fp8")
    assert model_files(tmp_path / "out") == model_files(tmp_path / "expected")


def test_what_a_person_adds_is_used_and_recorded(tmp_path: Path) -> None:
    write_run(tmp_path / "run", A, ep=2)
    config, tokenizer = tmp_path / "more.json", tmp_path / "tokenizer"
    config.write_text(json.dumps({"eos_token_id": [1, 106]}))
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    reading = Reading("100", config, 61, tokenizer)
    work = plan_quantization(tmp_path / "run", "int4", reading=reading)
    assert (work.found.architecture.vocab_size, work.sides.copied) == (61, ("tokenizer.json",))
    quantize(tmp_path / "run", tmp_path / "out", "int4", reading=reading)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["vocab_size"], written["eos_token_id"]) == (61, [1, 106])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    options = json.loads((tmp_path / "out" / "zaya_manifest.json").read_text())["options"]
    assert options["vocab_size"] == 61
    assert len(options["config_blake3"]) == 64
    assert torch.equal(_rows(tmp_path / "out"), trainer_state(A)["embedding.word_embeddings.weight"][:61])


def _rows(folder: Path) -> torch.Tensor:
    from tests.synthetic import read_tensors

    return read_tensors(folder)["model.embed_tokens.weight"]
