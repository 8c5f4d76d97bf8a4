"""`zaya inspect` and `zaya convert` of what trainers save, from outside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import SIDE_FILES, tree
from tests.cli.conftest import Zaya
from tests.megatron import save, trainer_args, trainer_state, write_distributed, write_run
from tests.synthetic import small
from zaya_tools.layouts.raw_config import raw_config


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", small(experts=4), ep=2)
    (tmp_path / "run" / "tokenizer.json").write_bytes(SIDE_FILES["tokenizer.json"])
    (tmp_path / "run" / "events.log").write_text("x")
    return tmp_path / "run"


def test_a_run_is_inspected(zaya: Zaya, run: Path) -> None:
    result = zaya("inspect", run)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("run: megatron layout, 86 tensors in 2 files, ")
    assert "note: 2 ranks of iteration 100; optimizer and random state were not read" in lines
    padding = "the embedding has 64 rows for a vocabulary of 61: the padding is kept (--vocab-size 61 drops it)"
    assert f"note: {padding}" in lines
    assert any("does not say its special tokens" in line for line in lines)
    dropped = [line for line in lines if line.startswith("would be dropped: ")]
    assert dropped == [
        "would be dropped: decoder.layers.1.zaya_block.router.balance_m and 5 more (--json lists all): "
        "state of the trainer's balancing optimiser",
        "would be dropped: decoder.layers.1.zaya_block.router.router_states_scale: "
        "the first router has no earlier state to scale; trainers allocate it and never use it",
    ]
    assert lines[-1] == "verdict: convert would write 67 native tensors"


def test_a_run_is_converted(zaya: Zaya, run: Path, tmp_path: Path) -> None:
    before = tree(run)
    result = zaya("convert", run, tmp_path / "out", "--iteration", "100", "--json")
    assert (result.code, result.err) == (0, "")
    document = result.document()
    assert (document["from"], document["to"], document["tensors"]) == ("megatron", "native", 67)
    assert document["side_files"]["copied"] == ["tokenizer.json"]
    assert document["side_files"]["left"] == ["events.log"]
    assert len(document["dropped"]) == 7
    assert tree(run) == before


def test_the_options_of_a_run(zaya: Zaya, run: Path, tmp_path: Path) -> None:
    tokenizer, config = tmp_path / "tokenizer", tmp_path / "more.json"
    tokenizer.mkdir()
    for name, content in SIDE_FILES.items():
        (tokenizer / name).write_bytes(content)
    config.write_text(json.dumps({"eos_token_id": [1, 106]}))
    options = ["--config", config, "--vocab-size", "61", "--tokenizer", tokenizer]
    result = zaya("convert", run, tmp_path / "out", *options)
    assert (result.code, result.err) == (0, "")
    assert "note: the last 3 rows of embedding.word_embeddings.weight were dropped as padding" in result.out
    assert "padding is kept" not in result.out
    assert "special tokens" not in result.out
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in SIDE_FILES.items())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["vocab_size"], written["eos_token_id"]) == (61, [1, 106])
    assert zaya("inspect", run, "--config", config, "--vocab-size", "61").code == 0
    # Another config is another conversion, whatever else is equal.
    config.write_text(json.dumps({"eos_token_id": 2}))
    assert "already exists" in zaya("convert", run, tmp_path / "out", *options, "--resume").error()[0]


def test_a_run_is_quantized(zaya: Zaya, run: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    config = tmp_path / "more.json"
    config.write_text(json.dumps({"eos_token_id": 106}))
    chosen = ["--iteration", "100", "--vocab-size", "61", "--config", config, "--tokenizer", tokenizer]
    before = tree(run)
    result = zaya("quantize", run, tmp_path / "out", "--recipe", "int8", *chosen, "--json")
    assert (result.code, result.err) == (0, "")
    document = result.document()
    assert (document["from"], document["to"], document["side_files"]["copied"]) == (
        "megatron",
        "native",
        ["tokenizer.json"],
    )
    assert any("were dropped as padding (--vocab-size)" in note for note in document["notes"])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["vocab_size"], written["eos_token_id"]) == (61, 106)
    assert tree(run) == before
    again = zaya("quantize", run, tmp_path / "out", "--recipe", "int8", *chosen, "--resume", "--json").document()
    assert again["already_complete"]
    assert again["quantized"] == document["quantized"]
    refusal = zaya("quantize", run, tmp_path / "out", "--recipe", "int8", "--iteration", "100", "--resume").error()
    assert "already exists" in refusal[0]


def test_a_recipe_is_explained_on_a_run(zaya: Zaya, run: Path) -> None:
    document = zaya("recipe", "explain", "int8", run, "--json").document()
    assert document["model"] == "run"
    schemes = [entry["scheme"] for entry in document["modules"] if entry["role"] == "expert"]
    assert schemes
    assert set(schemes) == {"int8"}


def test_the_way_back(zaya: Zaya, run: Path, tmp_path: Path) -> None:
    assert zaya("convert", run, tmp_path / "native").code == 0
    planned = zaya("convert", tmp_path / "native", tmp_path / "back", "--to", "megatron", "--dry-run")
    assert planned.code == 0
    assert "release/mp_rank_00/model_optim_rng.pt" in planned.out
    assert not (tmp_path / "back").exists()
    result = zaya("convert", tmp_path / "native", tmp_path / "back", "--to", "megatron")
    assert (result.code, result.err) == (0, "")
    assert "as when training begins" in result.out
    report = zaya("inspect", tmp_path / "back", "--iteration", "release", "--json").document()
    assert (report["layout"], report["complete"]) == ("megatron", True)


def test_other_kinds_are_inspected(zaya: Zaya, tmp_path: Path) -> None:
    a = small()
    write_distributed(tmp_path / "iter_0000100", a)
    save(tmp_path / "model.pt", {"args": trainer_args(a), "iteration": 3, "model": trainer_state(a)})
    for place in (tmp_path / "iter_0000100", tmp_path / "model.pt"):
        report = zaya("inspect", place, "--json").document()
        assert (report["layout"], report["complete"], report["convertible"]) == ("megatron", True, True)
        assert report["name"] == place.name
        assert report["side_files"]["left"] == (["metadata.json"] if place.is_dir() else ["iter_0000100"])


class Bomb:
    """Pickles as a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ZAYA_TEST_MARKER",)


def test_a_hostile_file_is_one_line_and_a_hint(zaya: Zaya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model.pt", {"args": trainer_args(small()), "model": Bomb()})
    before = tree(tmp_path)
    for command in (
        ["inspect", "model.pt"],
        ["convert", "model.pt", "out"],
        ["convert", "model.pt", "out", "--dry-run"],
        ["quantize", "model.pt", "out"],
        ["recipe", "explain", "fp8", "model.pt"],
    ):
        message, hint = zaya(*command).error()
        assert message.startswith("model.pt: the pickle asks for posix.system, which is neither tensor data")
        assert "torch.save" in hint
    assert tree(tmp_path) == before


def test_wrong_options_are_named(zaya: Zaya, run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("[")
    (tmp_path / "config.json").write_text(json.dumps(raw_config(small(experts=8))))
    for options, message in (
        (["--iteration", "7"], "has no iter_0000007"),
        (["--config", tmp_path / "nothing.json"], "no nothing.json"),
        (["--config", tmp_path / "bad.json"], "bad.json is not valid JSON"),
        (["--config", tmp_path / "config.json"], "does not fit 8 experts over 2 ranks"),
        (["--vocab-size", "1000"], "--vocab-size 1,000 does not fit"),
        (["--tokenizer", tmp_path / "nothing"], "is no folder"),
    ):
        for command in ("convert", "quantize"):
            assert message in zaya(command, run, tmp_path / "out", *options).error()[0]
    assert not (tmp_path / "out").exists()
