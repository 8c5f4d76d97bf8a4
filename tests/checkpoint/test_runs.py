"""Runs and files: which iteration is meant, and what is added to what a checkpoint says of itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.support import SIDE_FILES
from tests.checkpoint.trained import FILE, A, ranks, refused, rewrite
from tests.megatron import (
    rank_state,
    save,
    trainer_args,
    trainer_state,
    write_distributed,
    write_ranks,
)
from tests.synthetic import read_tensors, small, write_checkpoint
from zaya_tools.architecture import native_config
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.inspection import inspect
from zaya_tools.checkpoint.opening import Reading
from zaya_tools.errors import ZayaError
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config


def seed_of(folder: Path) -> int:
    """Which of the models that `several` wrote was converted."""
    found = read_tensors(folder)["model.norm.weight"]
    return next(n for n in range(9) if torch.equal(found, trainer_state(A, seed=n)["decoder.final_norm.weight"]))


def several(folder: Path) -> Path:
    """A run with two iterations and a release, of three models."""
    for seed, (name, iteration) in enumerate({"iter_0000100": 100, "iter_0000200": 200, "release": 0}.items(), 1):
        write_ranks(folder / name, A, trainer_state(A, seed=seed), iteration=iteration, optimizer=False)
    (folder / "latest_checkpointed_iteration.txt").write_text("200")
    return folder


@pytest.mark.parametrize(
    ("iteration", "seed"), [(None, 2), ("latest", 2), ("200", 2), ("100", 1), ("0000100", 1), ("release", 3)]
)
def test_the_iteration_that_is_asked_for(tmp_path: Path, iteration: str | None, seed: int) -> None:
    convert(several(tmp_path / "run"), tmp_path / "out", reading=Reading(iteration=iteration))
    assert seed_of(tmp_path / "out") == seed


def test_the_tracker_may_say_release(tmp_path: Path) -> None:
    run = several(tmp_path / "run")
    (run / "latest_checkpointed_iteration.txt").write_text("release\n")
    convert(run, tmp_path / "out")
    assert seed_of(tmp_path / "out") == 3


@pytest.mark.parametrize("kind", ["iteration", "rank", "file"])
def test_one_iteration_or_one_file_is_enough(tmp_path: Path, kind: str) -> None:
    run = several(tmp_path / "run")
    place = {"iteration": run / "iter_0000100", "file": run / "iter_0000100" / "mp_rank_00" / FILE}.get(kind)
    if place is None:
        shutil.copytree(run / "iter_0000100", tmp_path / "alone")
        place = tmp_path / "alone"
    convert(place, tmp_path / "out")
    assert seed_of(tmp_path / "out") == 1


def test_a_run_of_exports(tmp_path: Path) -> None:
    # Exports of a run are kept like its checkpoints: iter_N folders of safetensors files.
    write_checkpoint(tmp_path / "run-hf" / "iter_0012600", RAW, A)
    found = inspect(tmp_path / "run-hf", Reading(iteration="12600"))
    assert (found.layout, found.complete) == ("raw", True)


@pytest.mark.parametrize(
    ("spoil", "iteration", "message"),
    [
        (lambda run: None, "300", "has no iter_0000300; there are iter_0000100, iter_0000200, release"),
        (lambda run: None, "last", "'last' is no iteration"),
        (lambda run: None, "-1", "'-1' is no iteration"),
        (lambda run: (run / "latest_checkpointed_iteration.txt").unlink(), None, "to say which iteration is the last"),
        (lambda run: (run / "latest_checkpointed_iteration.txt").write_text("7"), None, "has no iter_0000007"),
        (lambda run: (run / "latest_checkpointed_iteration.txt").write_text("../x"), None, "'../x', which is no itera"),
        (lambda run: shutil.move(run / "iter_0000100", run / "iter_0000101"), "101", "holds iteration 100"),
    ],
)
def test_iterations_that_are_not_there(
    tmp_path: Path, spoil: Callable[[Path], Any], iteration: str | None, message: str
) -> None:
    run = several(tmp_path / "run")
    spoil(run)
    refused(message, run, iteration=iteration)


def test_an_iteration_of_what_is_no_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw", RAW, A)
    refused("has no iterations to choose from", tmp_path / "raw", iteration="100")


def test_no_arguments(tmp_path: Path) -> None:
    place = ranks(tmp_path, ep=1)
    rewrite(place / "mp_rank_00" / FILE, lambda state: state.pop("args"))
    error = refused("mp_rank_00 has no saved arguments", place)
    assert "--config" in str(error.hint)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(raw_config(A)))
    convert(place, tmp_path / "given", reading=Reading(config=config))
    assert inspect(tmp_path / "given").architecture == inspect(place, Reading(config=config)).architecture


@pytest.mark.parametrize("style", ["raw", "native"])
@pytest.mark.parametrize("saved", ["torch", "torch_dist"])
def test_a_config_completes_the_arguments(tmp_path: Path, style: str, saved: str) -> None:
    a = small(experts=4, eos_token=(1, 106), norm_eps=1e-6)
    place = tmp_path / "iter_0000100"
    if saved == "torch":
        write_ranks(place, a, num_experts=None, norm_epsilon=None, layernorm_epsilon=None)
    else:
        args = trainer_args(a, num_experts=None, norm_epsilon=None, layernorm_epsilon=None)
        write_distributed(place, a, args=args)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(native_config(a) if style == "native" else raw_config(a)))
    convert(place, tmp_path / "out", reading=Reading(config=config))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**native_config(a), "dtype": "bfloat16"}


def test_a_few_keys_are_enough(tmp_path: Path) -> None:
    place = ranks(tmp_path, ep=1, rotary_base=None)
    refused("the run's config does not say rope_theta", place)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"rope_theta": 1e4, "eos_token_id": 106}))
    convert(place, tmp_path / "given", reading=Reading(config=config))
    written = json.loads((tmp_path / "given" / "config.json").read_text())
    assert written["rope_parameters"]["hybrid"]["rope_theta"] == 1e4
    assert written["eos_token_id"] == 106


def test_padded_rows(tmp_path: Path) -> None:
    whole = trainer_state(small(experts=4, tied=False))
    place = ranks(tmp_path, ep=1, state=whole, untie_embeddings_and_output_weights=True)
    work = convert(place, tmp_path / "out", reading=Reading(vocab_size=61)).conversion
    assert work.found.architecture.vocab_size == 61
    assert sum("dropped as padding" in note for note in work.notes) == 2
    found = read_tensors(tmp_path / "out")
    assert torch.equal(found["model.embed_tokens.weight"], whole["embedding.word_embeddings.weight"][:61])
    assert torch.equal(found["lm_head.weight"], whole["output_layer.weight"][:61])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 61
    again = convert(place, tmp_path / "out", resume=True, reading=Reading(vocab_size=61))
    assert again.already_complete
    shutil.rmtree(tmp_path / "out")
    for rows in (0, 65, -1):
        refused("does not fit", place, vocab_size=rows)


def test_padded_rows_of_ranks_and_replicas(tmp_path: Path) -> None:
    place = tmp_path / "iter_0000100"
    write_ranks(place, small(experts=4, query_heads=4, kv_heads=2), tp=2, ep=2, optimizer=False)
    work = convert(place, tmp_path / "out", reading=Reading(vocab_size=40)).conversion
    assert work.found.architecture.vocab_size == 40


def test_without_a_number_the_padding_is_kept(tmp_path: Path) -> None:
    place = ranks(tmp_path, ep=1)
    work = convert(place, tmp_path / "out").conversion
    assert work.found.architecture.vocab_size == 64


def test_the_tokenizer_is_the_runs_or_that_of_a_folder(tmp_path: Path) -> None:
    run, other = several(tmp_path / "run"), tmp_path / "tokenizer"
    other.mkdir()
    for name, content in SIDE_FILES.items():
        (run / name).write_bytes(content)
        (other / name).write_bytes(content + b" ")
    convert(run, tmp_path / "without")
    convert(run, tmp_path / "with", reading=Reading(tokenizer=other))
    for name, content in SIDE_FILES.items():
        assert (tmp_path / "without" / name).read_bytes() == content
        assert (tmp_path / "with" / name).read_bytes() == content + b" "
    refused("is no folder", run, tokenizer=tmp_path / "nowhere")


def test_a_destination_beside_a_file_is_fine_and_the_file_itself_is_not(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    save(file, rank_state(trainer_args(A), 1, [trainer_state(A)]))
    convert(file, tmp_path / "out")
    with pytest.raises(ZayaError, match="lie in one another"):
        convert(file, file)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(3), "holds a single tensor, not a state dict"),
        ([1, 2], "holds a list, not a state dict"),
        ({}, "holds no model"),
        ({"optimizer": {"state": torch.zeros(3)}}, r"holds no model \(optimizer\)"),
        ({"model0": {"a": torch.zeros(1)}, "model2": {}}, r"pipeline stages \[0, 2\]"),
        ({"a": torch.zeros(1), "module.a": torch.zeros(1)}, "one tensor under two names"),
        ({"a": torch.zeros(1)}, "has no saved arguments, and there is no config.json"),
        ({"a": torch.zeros(2, 3).T}, "is a view with strides"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "has the dtype"),
        ({"args": trainer_args(A), "model": {"a": torch.zeros(1)}}, "no ZAYA1 tensors"),
    ],
)
def test_files_without_a_model(tmp_path: Path, state: Any, message: str) -> None:
    save(tmp_path / "model.pt", state)
    with pytest.raises(ZayaError, match=message):
        convert(tmp_path / "model.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def read_so_far() -> int:
    """Bytes that this process has read from files, from the page cache too."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count what processes read")
@pytest.mark.parametrize("saved", ["torch", "torch_dist"])
def test_an_optimizer_six_times_the_model_is_not_read(tmp_path: Path, saved: str) -> None:
    a = small(hidden_size=128, query_heads=4, kv_heads=2, experts=8, expert_width=128, router_width=32, blocks=3)
    place = tmp_path / "iter_0000100"
    if saved == "torch":
        write_ranks(place, a)
    else:
        write_distributed(place, a)
    convert(place, tmp_path / "warm")  # imports are files too
    size = sum(tensor.nbytes for tensor in trainer_state(a).values())
    whole = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    assert whole > (6 if saved == "torch" else 2.5) * size
    before = read_so_far()
    convert(place, tmp_path / "out")
    assert read_so_far() - before < 1.3 * size
