"""`zaya recipe` from outside: what it lists, shows and explains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.support import ROOT, stamps
from tests.cli.conftest import Zaya
from tests.synthetic import LAYOUTS, small, write_checkpoint
from zaya_tools.layouts.raw import RAW
from zaya_tools.quantization.recipe import recipe_names

MINE = """
name: mine
description: one of mine
extends: int4
rules:
  - {role: attention, projections: k_proj, scheme: none}
  - {role: experts, blocks: 1-, scheme: {kind: int4, group: 32}, observer: minmax}
"""
SMALL = small(hidden_size=128, expert_width=128, query_heads=4, kv_heads=2, head_dim=32)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return path


def rows(text: str) -> list[list[str]]:
    """The cells of every table, row by row."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def test_list(zaya: Zaya) -> None:
    result = zaya("recipe", "list")
    assert (result.code, result.err) == (0, "")
    assert [row[0] for row in rows(result.out) if row[0]] == list(recipe_names())
    assert "vLLM on Turing and newer (Marlin kernels)." in result.out
    document = zaya("recipe", "list", "--json").document()
    assert [recipe["name"] for recipe in document["recipes"]] == list(recipe_names())
    assert set(document["recipes"][0]) == {"name", "description", "runs_on", "extends", "rules"}


def test_list_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['zaya', 'recipe', 'list']\n"
        "from zaya_tools.cli.app import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'compressed_tensors', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_show(zaya: Zaya, mine: Path) -> None:
    result = zaya("recipe", "show", mine)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "mine: one of mine"
    assert lines[1] == "does not say where it runs"
    assert lines[2] == f"read from {mine}, extends int4"
    assert rows(result.out) == [
        ["1", "experts", "all", "all", "int4", "mse"],
        ["2", "attention", "all", "all", "int4", "mse"],
        ["3", "attention", "all", "k_proj", "none", "-"],
        ["4", "experts", "1-", "all", "int4-g32", "minmax"],
    ]
    assert lines[-1].startswith("where several match: one that names projections before one that does not")
    document = zaya("recipe", "show", mine, "--json").document()
    assert document["extends"] == "int4"
    assert document["rules"][3] == {
        "role": "experts", "blocks": "1-", "projections": None, "scheme": "int4-g32", "observer": "minmax",
        "recipe": "mine",
    }  # fmt: skip
    assert "no rules: everything keeps full precision" in zaya("recipe", "show", "bf16").out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain(zaya: Zaya, tmp_path: Path, mine: Path, layout: str) -> None:
    write_checkpoint(tmp_path / "model", LAYOUTS[layout], SMALL)
    before = stamps(tmp_path / "model")
    result = zaya("recipe", "explain", mine, tmp_path / "model")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "mine on model: experts 18/18, attention 8/10, embedding 0/1 matrices quantized"
    assert lines[-1] == "largest tensor-parallel size 1"
    table = {(row[0], row[1]): row[2:] for row in rows(result.out)}
    assert table["0", "mlp.experts.0-2.gate_proj"] == ["128 x 128", "int4", "mse", "rule 1: experts: int4"]
    assert table["1", "mlp.experts.0-2.gate_proj"] == [
        "128 x 128", "int4-g32", "minmax", "rule 4: experts, blocks 1-: int4-g32",
    ]  # fmt: skip
    assert table["0-1", "self_attn.qkv_proj.k_proj"][1:] == ["none", "-", "rule 3: attention (k_proj): none"]
    assert table["0-1", "mlp.gate.router_mlp.fc1"] == ["router", "a rounded router sends tokens to other experts"]
    assert table["-", "model.embed_tokens"][-1] == "tied to the output head: always full precision"
    assert stamps(tmp_path / "model") == before

    document = zaya("recipe", "explain", mine, tmp_path / "model", "--json").document()
    assert document["quantized"]["experts"] == {"quantized": 18, "of": 18}
    assert document["max_tensor_parallel"] == 1
    assert [rule["decided"] for rule in document["rules"]] == [9, 8, 2, 9]
    modules = {(m["block"], m["module"]): m for m in document["modules"]}
    assert modules[1, "mlp.experts.0-2.down_proj"]["rule"] == 4
    assert (modules[0, "mlp.gate.down_proj"]["protected"], modules[0, "mlp.gate.down_proj"]["scheme"]) == (True, "none")
    assert len(modules) == len(document["modules"])


def test_explain_of_a_model_that_is_not_whole(zaya: Zaya, tmp_path: Path) -> None:
    name = "model.layers.1.zaya_block.experts.local_experts.2.linear_fc1.weight"
    write_checkpoint(tmp_path / "model", RAW, SMALL, overrides={name: None})
    result = zaya("recipe", "explain", "fp8", tmp_path / "model")
    assert result.code == 0
    assert result.err == "warning: model is incomplete or inconsistent: `zaya inspect` says how\n"
    assert result.out.startswith("fp8 on model: experts 18/18")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_errors(zaya: Zaya, tmp_path: Path, mine: Path, options: list[str]) -> None:
    message, hint = zaya("recipe", "show", "int5", *options).error()
    assert "there is no recipe 'int5'" in message
    assert "zaya recipe list" in hint
    write_checkpoint(tmp_path / "model", RAW, small())
    message, hint = zaya("recipe", "explain", "int4", tmp_path / "model", *options).error()
    assert (
        "rule `attention: int4` does not fit model.layers.0.self_attn.qkv_proj.q_proj.weight: its 32 columns" in message
    )
    assert "int4-g32" in hint
    mine.write_text(MINE.replace("role: attention", "role: ruoter"))
    message, hint = zaya("recipe", "explain", mine, tmp_path / "model", *options).error()
    assert "'ruoter' speaks of the role 'router', which never loses precision" in message
    message, _ = zaya("recipe", "explain", "fp8", tmp_path / "nothing", *options).error()
    assert "nothing" in message
