"""`zaya inspect`: what it says, its exit codes, and its JSON."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.checkpoint.support import model, stamps, tree
from tests.cli.conftest import Zaya
from tests.synthetic import small, write_checkpoint
from zaya_tools.layouts.native import NATIVE
from zaya_tools.parameters import active, total

KEYS = [
    "name", "layout", "architecture", "files", "tensors", "bytes", "parameters", "held", "quantization", "missing",
    "surplus", "dropped", "problems", "notes", "warnings", "skip_class", "side_files", "complete", "convertible",
    "verdict",
]  # fmt: skip
GONE = "model.layers.1.zaya_block.experts.local_experts.2.linear_fc1.weight"
BIASES = "model.layers.1.zaya_block.router.balancing_biases"


def test_a_complete_checkpoint(zaya: Zaya, tmp_path: Path) -> None:
    model(tmp_path / "source", shards=2)
    result = zaya("inspect", tmp_path / "source")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "source: raw layout, 75 tensors in 2 files, 63.5 KB"
    assert "skip class: proven unreachable in all 2 blocks" in lines
    assert lines[-1] == "verdict: convert would write 67 native tensors"
    assert "\x1b" not in result.out, "no colours in a pipe"


def test_its_json(zaya: Zaya, tmp_path: Path) -> None:
    model(tmp_path / "source", shards=2)
    result = zaya("inspect", tmp_path / "source", "--json")
    assert (result.code, result.err) == (0, "")
    document = result.document()
    assert list(document) == KEYS
    assert document["layout"] == "raw"
    assert document["parameters"]["total"] == total(small())
    assert document["parameters"]["active_per_token"] == active(small())
    assert sum(entry["bytes"] for entry in document["held"]) == document["bytes"]
    assert (document["complete"], document["convertible"]) == (True, True)
    assert [block["state"] for block in document["skip_class"]] == ["unreachable (proven)"] * 2


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_incomplete_checkpoint_is_a_failed_verdict(zaya: Zaya, tmp_path: Path, options: list[str]) -> None:
    model(tmp_path / "source", overrides={GONE: None, "model.unknown": torch.zeros(2)})
    result = zaya("inspect", tmp_path / "source", *options)
    assert result.code == 1
    if options:
        document = result.document()
        assert GONE in document["missing"]
        assert (document["complete"], document["convertible"]) == (False, False)
        assert document["problems"]
    else:
        assert f"missing: {GONE}" in result.out
        assert "model.unknown" in result.out
        assert result.out.splitlines()[-1].startswith("verdict: incomplete")


def test_already_native_is_no_failure(zaya: Zaya, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", NATIVE, small())
    result = zaya("inspect", tmp_path / "source")
    assert result.code == 0
    assert "already native" in result.out.splitlines()[-1]
    document = zaya("inspect", tmp_path / "source", "--json").document()
    assert (document["complete"], document["convertible"]) == (True, False)


def test_a_reachable_skip_class_is_a_warning_on_stderr(zaya: Zaya, tmp_path: Path) -> None:
    model(tmp_path / "source", overrides={BIASES: torch.tensor([0.0, 0.1, 0.0, 0.5])})
    for options in ([], ["--json"]):
        result = zaya("inspect", tmp_path / "source", *options)
        assert result.code == 0
        (warning,) = result.err.splitlines()
        assert warning.startswith("warning: the skip class can be chosen in 1 of 2 blocks")
    assert result.document()["skip_class"][0]["state"] == "reachable"


def test_its_json_is_json_whatever_the_numbers(zaya: Zaya, tmp_path: Path) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        model(tmp_path / "source", overrides={BIASES: torch.tensor([bad, bad, bad, bad])})
        document = zaya("inspect", tmp_path / "source", "--json").document()
        assert document["skip_class"][0]["bias"] is None


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_cannot_be_read_is_an_error(zaya: Zaya, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "no safetensors files" in zaya("inspect", tmp_path / "empty", *options).error()[0]
    assert "does not exist" in zaya("inspect", tmp_path / "nowhere", *options).error()[0]
    assert "the hub cannot be reached" in zaya("inspect", "org/name", *options).error()[0]
    assert "is empty" in zaya("inspect", "", *options).error()[0]


def test_nothing_is_written(zaya: Zaya, tmp_path: Path) -> None:
    model(tmp_path / "source")
    before = tree(tmp_path), stamps(tmp_path)
    zaya("inspect", tmp_path / "source")
    assert (tree(tmp_path), stamps(tmp_path)) == before
