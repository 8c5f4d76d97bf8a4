"""`zaya quantize`: what it prints, its exit codes, and that wrong use leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.checkpoint.support import tree
from tests.cli.conftest import Zaya
from zaya_tools.data import TINY


@pytest.mark.parametrize("recipe", ["fp8", "int4-experts-fp8-attention"])
def test_json_is_one_document_that_counts_everything(zaya: Zaya, recipe: str, tmp_path: Path) -> None:
    found = zaya("quantize", TINY, tmp_path / "out", "--recipe", recipe, "--json")
    assert found.code == 0
    document = found.document()
    assert document["written"]
    roles = {entry["role"]: entry for entry in document["sizes"]["roles"]}
    assert (roles["expert"]["quantized"], roles["expert"]["of"]) == (96, 96)
    assert (roles["attention projection"]["quantized"], roles["attention projection"]["of"]) == (20, 20)
    assert len(document["quantized"]) == 116
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert 0 < written - document["sizes"]["bytes_after"] < 100_000
    assert document["sizes"]["bits_per_weight"] == pytest.approx(
        8 * document["sizes"]["bytes_after"] / 1_937_260, abs=1e-3
    )


def test_text_says_how_much_and_what_suffered_most(zaya: Zaya, tmp_path: Path) -> None:
    found = zaya("quantize", TINY, tmp_path / "out", "--recipe", "int4")
    assert found.code == 0
    for text in ("96/96", "20/20", "as it is (protected)", "bits per weight", "relative error of a weight"):
        assert text in found.out


def test_dry_run_writes_nothing_and_tells_the_sizes_that_come_true(zaya: Zaya, tmp_path: Path) -> None:
    dry = zaya("quantize", TINY, tmp_path / "out", "--recipe", "int8", "--dry-run", "--json").document()
    assert list(tmp_path.iterdir()) == []
    done = zaya("quantize", TINY, tmp_path / "out", "--recipe", "int8", "--json").document()
    assert (dry["written"], done["written"]) == (False, True)
    for key in ("sizes", "recipe", "shards", "bytes"):
        assert dry[key] == done[key]
    text = zaya("quantize", TINY, tmp_path / "other", "--recipe", "int8", "--dry-run").out
    assert "matrices matched" in text
    assert "largest tensor-parallel size" in text


def test_resuming_what_is_complete_says_so(zaya: Zaya, tmp_path: Path) -> None:
    zaya("quantize", TINY, tmp_path / "out")
    before = tree(tmp_path)
    found = zaya("quantize", TINY, tmp_path / "out", "--resume", "--json")
    assert found.document()["already_complete"]
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "fp9"], "fp9"),
        (["--recipe", "int4", "--tp", "4"], "tensor-parallel"),
        (["--recipe", "int4", "--expert-layout", "stacked"], "stack"),
        (["--target-vllm", "0.10.0"], "0.10.0"),
        (["--device", "tpu"], "tpu"),
        (["--max-shard-size", "much"], "much"),
        (["--recipe", "./nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_wrong_use_is_one_line_and_a_hint(zaya: Zaya, arguments: list[str], words: str, tmp_path: Path) -> None:
    message, _ = zaya("quantize", TINY, tmp_path / "out", *arguments).error()
    assert words in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules:\n- {role: router, scheme: fp8}\n", "router"),
        ("rules:\n- {role: 're:.*ruoter.*', scheme: fp8}\n", "ruoter"),
        ("rules:\n- {role: head, scheme: fp8}\n", "tied"),
        ("rules:\n- {role: experts, scheme: fp8, blocks: 7}\n", "block 7"),
        ("rules:\n- {role: experts, scheme: {kind: nvfp4, group: 64}}\n", "64"),
        ("rules:\n- {role: experts, scheme: fp8}\nignore: [lm_head]\n", "ignore"),
    ],
)
def test_recipes_that_cannot_be_followed(zaya: Zaya, text: str, words: str, tmp_path: Path) -> None:
    """Rows of the recipe that would quantize the wrong thing, or nothing: errors before any work."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("name: mine\ndescription: Mine.\n" + text)
    message, _ = zaya("quantize", TINY, tmp_path / "out", "--recipe", recipe).error()
    assert words in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]


def test_the_source_is_named_in_the_card_and_the_manifest_without_paths(zaya: Zaya, tmp_path: Path) -> None:
    zaya("quantize", TINY, tmp_path / "out", "--recipe", "int4-g32")
    manifest = json.loads((tmp_path / "out" / "zaya_manifest.json").read_text())
    assert manifest["source"]["name"] == "tiny"
    for file in ("zaya_manifest.json", "README.md", "config.json"):
        assert str(TINY.parent) not in (tmp_path / "out" / file).read_text()


def test_a_recipe_that_learns_takes_statistics_and_says_what_it_lacks(zaya: Zaya, tmp_path: Path) -> None:
    found = zaya("quantize", TINY, tmp_path / "out", "--recipe", "int4-imatrix")
    assert found.error() == (
        "recipe int4-imatrix needs data to know its inputs",
        "give --stats FILE, which `zaya calibrate` makes, or --data; --data library is the standard library's source, "
        "for want of better",
    )
    planned = zaya("quantize", TINY, tmp_path / "out", "--recipe", "int4-imatrix", "--dry-run")
    assert planned.code == 0
    assert "needs data to know its inputs" in planned.err
    quick = ("--samples", "6", "--context", "64")
    assert zaya("calibrate", TINY, "-o", tmp_path / "stats", *quick).code == 0
    found = zaya(
        "quantize", TINY, tmp_path / "out", "--recipe", "int4-imatrix", "--stats", tmp_path / "stats", "--json"
    )
    assert found.code == 0
    assert len(found.document()["quantized"]) == 116
    assert "not used" in zaya("quantize", TINY, tmp_path / "plain", "--stats", tmp_path / "stats").err


def test_auto_writes_down_what_it_chose(zaya: Zaya, tmp_path: Path) -> None:
    options = ("--recipe", "auto", "--data", "library", "--samples", "8", "--context", "64")
    found = zaya("quantize", TINY, tmp_path / "out", *options, "--target-size", "1.33MB", "--json")
    assert found.code == 0
    document = found.document()
    assert document["sizes"]["bytes_after"] == document["auto"]["bytes"] <= 1_330_000
    assert (tmp_path / "out" / "recipe.yaml").read_text() == document["auto"]["recipe"]
    again = zaya(
        "quantize", TINY, tmp_path / "again", "--recipe", tmp_path / "out" / "recipe.yaml", *options[2:], "--json"
    )
    assert again.document()["quantized"] == document["quantized"]
    dry = zaya("quantize", TINY, tmp_path / "dry", *options, "--target-bits", "6", "--dry-run")
    assert "name: auto" in dry.out
    assert not (tmp_path / "dry").exists()


def test_what_the_data_lack_is_said(zaya: Zaya, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 40)
    data = ("--data", tmp_path / "text.txt", "--samples", "99", "--context", "64")
    found = zaya("quantize", TINY, tmp_path / "out", "--recipe", "int4-imatrix", *data)
    assert found.code == 0
    assert "sequences of the 99 asked for: all are used" in found.err
    auto = ("quantize", TINY, tmp_path / "other", "--recipe", "auto", "--target-bits", "9", "--data")
    learned = ("quantize", TINY, tmp_path / "other", "--recipe", "int4-imatrix", "--data", "library")
    for command in (learned, (*auto, "library"), ("validate", TINY)):
        message, hint = zaya(*command, "--context", "300000").error()
        assert message == "a context of 300,000 tokens, where the model has 1,024 positions"
        assert hint == "take a shorter one"
    os.mkfifo(tmp_path / "pipe")
    found = zaya(*auto, tmp_path / "pipe")
    assert found.error() == ("auto reads its data twice, and a pipe can be read once", "give a file to --data")


def test_what_auto_was_told_of_the_inputs_is_used_even_where_nothing_is_quantized(zaya: Zaya, tmp_path: Path) -> None:
    data = ("--data", "library", "--samples", "4", "--context", "64")
    found = zaya("quantize", TINY, tmp_path / "out", "--recipe", "auto", "--target-size", "1GB", "--dry-run", *data)
    assert (found.code, found.err) == (0, "")


def test_a_target_is_for_auto_alone(zaya: Zaya, tmp_path: Path) -> None:
    assert zaya("quantize", TINY, tmp_path / "out", "--target-bits", "5").error()[0].startswith("a target size is for")
    assert zaya("quantize", TINY, tmp_path / "out", "--recipe", "auto").error()[0] == "auto needs one target"
