"""`zaya validate`: its exit codes, and that wrong use is told apart from a failed verdict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from zaya_tools.cli.app import app
from zaya_tools.data import TINY
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.validation import Settings, validate

QUICK = ["--max-tokens", "300", "--context", "64", "--new-tokens", "4"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "copy"))


def test_an_equal_copy_passes_with_a_report(copy: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    found = CliRunner().invoke(
        app, ["validate", str(copy), "--reference", str(TINY), *QUICK, "--report", str(report), "--json"]
    )
    assert found.exit_code == 0
    document = json.loads(found.stdout)
    assert document["verdict"] == json.loads(report.read_text())["verdict"] == "PASS"
    assert document["checks"]["likelihood"]["figures"]["kl"]["mean"]["value"] == 0


def test_swapped_halves_of_one_expert_fail_by_name(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.3.zaya_block.experts.local_experts.5.linear_fc1.weight"
    gate, up = tensors[name].chunk(2)
    tensors[name] = torch.cat([up, gate])
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    found = CliRunner().invoke(app, ["validate", str(copy), "--reference", str(TINY), *QUICK, "--json"])
    assert found.exit_code == 1
    assert any("swap" in reason and "expert 5" in reason for reason in json.loads(found.stdout)["reasons"])


@pytest.mark.parametrize("name", ["config.json", "report.html", "model.md"])
def test_a_report_is_never_written_into_a_checkpoint(copy: Path, name: str) -> None:
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    with pytest.raises(ZayaError, match="into the checkpoint"):
        CliRunner().invoke(app, ["validate", str(copy), *QUICK, "--report", str(copy / name)], catch_exceptions=False)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(device="tpu"), "unknown device"),
        (Settings(device="meta"), "unknown device"),
        (Settings(dtype="float8"), "unknown dtype"),
        (Settings(engine="vroom"), "unknown engine"),
        (Settings(checks=("weight",)), "unknown check"),
        (Settings(limits={"min_top1": 2.0}), "min_top1"),
        (Settings(limits={"max_kl": -1.0}), "max_kl"),
        (Settings(limits={"max_perplexity_ratio": float("nan")}), "max_perplexity_ratio"),
    ],
)
def test_settings_that_make_no_sense_are_wrong_use(settings: Settings, message: str) -> None:
    with pytest.raises(ZayaError, match=message):
        validate(TINY, settings=settings)


def test_a_damaged_tokenizer_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ZayaError, match=r"tokenizer\.json cannot be read"):
        validate(copy)


def test_no_text_is_said(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ZayaError, match="gives 0 tokens"):
        validate(copy, settings=Settings(data=str(tmp_path / "empty.txt")))
