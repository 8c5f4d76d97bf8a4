"""`zaya convert` from outside: exit codes, what goes where, and nothing said twice."""

from __future__ import annotations

import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.support import ROOT, SIDE_FILES, model, stamps, tree
from tests.cli.conftest import Zaya
from tests.synthetic import LAYOUTS, small, write_checkpoint
from zaya_tools.checkpoint.destination import partial_folder

KEYS = ["destination", "written", "already_complete", "source", "from", "to", "source_tensors", "tensors", "bytes",
        "shards", "dropped", "side_files", "notes", "warnings"]  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"
BIASES = "model.layers.1.zaya_block.router.balancing_biases"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model(tmp_path / "source")
    return tmp_path / "source"


def test_it_says_what_it_wrote(zaya: Zaya, source: Path, tmp_path: Path) -> None:
    (source / "optimizer.pt").write_bytes(b"x")
    (source / "generation_config.json").unlink()
    result = zaya("convert", source, tmp_path / "out")
    assert (result.code, result.err) == (0, ""), "no progress where nobody watches"
    assert result.out.splitlines() == [
        f"wrote {tmp_path / 'out'}",
        "75 source tensors become 67 in 1 files, 63.5 KB of tensors",
        "dtype changes in 2 tensors (balancing bias)",
        "side files copied: tokenizer.json, tokenizer_config.json, chat_template.jinja",
        "side files not there to copy: generation_config.json",
        "left behind: optimizer.pt",
        "skip class: proven unreachable in all 2 blocks",
    ]


def test_its_json_is_alone_on_stdout(zaya: Zaya, source: Path, tmp_path: Path) -> None:
    result = zaya("convert", source, tmp_path / "out", "--json", "--max-shard-size", "20KB")
    assert (result.code, result.err) == (0, "")
    document = result.document()
    assert list(document) == KEYS
    assert (document["written"], document["already_complete"]) == (True, False)
    assert (document["from"], document["to"], document["source"]) == ("raw", "native", "source")
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")}
    assert {shard["file"]: shard["bytes"] for shard in document["shards"]} == sizes
    assert document["side_files"]["copied"] == [*list(SIDE_FILES)[:2], "chat_template.jinja", "generation_config.json"]


def test_resuming_what_is_complete(zaya: Zaya, source: Path, tmp_path: Path) -> None:
    zaya("convert", source, tmp_path / "out")
    result = zaya("convert", source, tmp_path / "out", "--resume")
    assert (result.code, result.out, result.err) == (0, f"{tmp_path / 'out'} is already complete\n", "")
    assert zaya("convert", source, tmp_path / "out", "--resume", "--json").document()["already_complete"] is True


@pytest.mark.parametrize(
    "options", [[], ["--json"], ["--force"], ["--resume"], ["--to", "native", "--dtype", "float32"]]
)
def test_a_dry_run_writes_nothing(zaya: Zaya, source: Path, tmp_path: Path, options: list[str]) -> None:
    before = tree(tmp_path), stamps(tmp_path)
    result = zaya("convert", source, tmp_path / "out", "--dry-run", "--max-shard-size", "20KB", *options)
    assert (result.code, result.err) == (0, "")
    assert (tree(tmp_path), stamps(tmp_path)) == before
    if "--json" in options:
        document = result.document()
        assert document["written"] is False
        assert len(document["shards"]) >= 3
    else:
        assert "Plan: source (raw) to native" in result.out
        assert "model-00001-of-0000" in result.out
        assert "75 source tensors become 67" in result.out


def test_a_dry_run_tells_the_truth(zaya: Zaya, source: Path, tmp_path: Path) -> None:
    options = [source, tmp_path / "out", "--json", "--max-shard-size", "20KB"]
    planned = zaya("convert", *options, "--dry-run").document()
    written = zaya("convert", *options).document()
    same = set(KEYS) - {"written", "already_complete"}
    assert {key: planned[key] for key in same} == {key: written[key] for key in same}


@pytest.mark.parametrize("json", [[], ["--json"]])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_stops_it_is_one_line_and_a_hint(
    zaya: Zaya, source: Path, tmp_path: Path, json: list[str], dry: list[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("mine")
    write_checkpoint(tmp_path / "native", LAYOUTS["native"], small())
    model(tmp_path / "broken", overrides={"model.layers.0.self_attn.qkv.temp": None})
    model(tmp_path / "vision", overrides={"vision_tower.patch.weight": torch.zeros(2)})
    before = tree(tmp_path)
    refusals: list[tuple[list[str | Path], str]] = [
        ([source, tmp_path / "taken"], "already exists"),
        ([source, tmp_path / "taken", "--force"], "zaya did not write it"),
        ([source, source / "inside"], "lie in one another"),
        ([source, tmp_path / "no" / "parent"], "does not exist"),
        ([tmp_path / "nowhere", tmp_path / "out"], "does not exist"),
        (["org/name", tmp_path / "out"], "the hub cannot be reached"),
        ([tmp_path / "native", tmp_path / "out"], "already native; nothing was written"),
        ([source, tmp_path / "out", "--to", "raw"], "already raw; nothing was written"),
        ([tmp_path / "broken", tmp_path / "out"], "temp"),
        ([tmp_path / "vision", tmp_path / "out"], "ZAYA1-VL"),
        ([source, tmp_path / "out", "--max-shard-size", "five"], "'five' is not a size"),
        ([source, tmp_path / "out", "--max-shard-size", "0"], "'0' is not a size"),
        ([source, tmp_path / "out", "--max-shard-size", "9" * 400 + "TB"], "is not a size"),
    ]
    for arguments, message in refusals:
        found, _ = zaya("convert", *arguments, *json, *dry).error()
        assert message in found
        assert len(found) < 600
    assert tree(tmp_path) == before


def test_bad_numbers_leave_nothing(zaya: Zaya, tmp_path: Path) -> None:
    tensor = torch.zeros(64, 32, dtype=torch.bfloat16)
    tensor[3, 4] = math.nan
    model(tmp_path / "source", overrides={EMBEDDING: tensor})
    for options in ([], ["--json"], ["--dtype", "float16"]):
        message, _ = zaya("convert", tmp_path / "source", tmp_path / "out", *options).error()
        assert message == f"{EMBEDDING}: 1 value is NaN or infinite, the first at [3, 4] (in model.safetensors)"
        assert os.listdir(tmp_path) == ["source"]  # noqa: PTH208


def test_an_unfinished_run_says_how_to_go_on(zaya: Zaya, source: Path, tmp_path: Path) -> None:
    partial_folder(tmp_path / "out").mkdir()
    (partial_folder(tmp_path / "out") / "state.json").write_text("{}")
    message, hint = zaya("convert", source, tmp_path / "out").error()
    assert "an unfinished run" in message
    assert "--resume" in hint
    assert "--force" in hint
    assert zaya("convert", source, tmp_path / "out", "--force").code == 0


def test_a_reachable_skip_class_is_warned_of_block_by_block(zaya: Zaya, tmp_path: Path) -> None:
    model(tmp_path / "source", overrides={BIASES: torch.tensor([0.0, 0.1, 0.0, 0.5])})
    result = zaya("convert", tmp_path / "source", tmp_path / "out", "--json")
    assert result.code == 0
    first, second = result.err.splitlines()
    assert first.startswith("warning: the skip class can be chosen in 1 of 2 blocks")
    assert second.startswith("warning: block 0: skip is reachable (bias 0.5, largest expert bias 0.1)")
    assert [f"warning: {line}" for line in result.document()["warnings"]] == [first, second]


@pytest.mark.parametrize(
    "name",
    ["[/red]", "[bold]x[/bold]", ":smile: :tiger:", "[link=http://x]", "a b", "é", "{x}", "%s", "-dash", "~tilde"],
)
@pytest.mark.parametrize("place", ["source", "destination"])
def test_names_are_printed_as_they_are(
    zaya: Zaya, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    # No slash may be in a file name: what stands for it looks the same to markup.
    folder = tmp_path / name.replace("http://", "") if "http" in name else tmp_path / name
    folder.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if place == "source":
        model(folder)
        last = folder.name
        for arguments in (["inspect", folder], ["convert", folder, "out", "--dry-run"]):
            result = zaya(*arguments)
            assert result.code == 0
            assert last in result.out.splitlines()[0]
        return
    model(tmp_path / "source")
    assert zaya("convert", "source", folder).out.splitlines()[0] == f"wrote {folder}"
    assert f"{folder} already exists" in zaya("convert", "source", folder).error()[0]


@pytest.mark.parametrize("name", ["[/red]", "[bold]", ":smile:", "x[0]"])
def test_names_of_tensors_and_files_are_printed_as_they_are(zaya: Zaya, tmp_path: Path, name: str) -> None:
    model(tmp_path / "source", overrides={f"{name}.weight": torch.zeros(1)})
    (tmp_path / "source" / f"{name.replace('/', '')}.pt").write_text("")
    assert f"surplus: {name}.weight" in zaya("inspect", tmp_path / "source").out
    assert f"{name}.weight" in zaya("convert", tmp_path / "source", tmp_path / "out").error()[0]


def test_names_cannot_steer_the_terminal(zaya: Zaya, tmp_path: Path) -> None:
    bad = "x\x1b[31m\x07\nerror: all is lost\r"
    folder = tmp_path / bad
    model(folder)
    for arguments in (["inspect", folder], ["convert", folder, tmp_path / "out", "--dry-run"]):
        result = zaya(*arguments)
        assert result.code == 0
        assert not set("\x1b\x07\r") & set(result.out + result.err)
        assert "\\x1b[31m\\x07" in result.out
    (folder / "config.json").write_text("{")
    assert zaya("inspect", folder).code == 2
    message, _ = zaya("inspect", f"{folder} gone").error()
    assert message.isprintable()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_no_encoding_has(tmp_path: Path, encoding: str) -> None:
    model(tmp_path / "source")
    name = os.fsdecode(b"caf\xe9 \xff")
    (tmp_path / "source").rename(tmp_path / name)
    for arguments in (["inspect", name], ["convert", name, "öut", "--dry-run"], ["convert", name, "öut"],
                      ["inspect", f"{name} gone"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "zaya_tools.cli.app", *arguments], cwd=tmp_path, capture_output=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert b"Traceback" not in done.stderr
        assert done.returncode == (2 if "gone" in arguments[1] else 0)


def test_progress_is_for_people_who_watch(source: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "zaya_tools.cli.app", "convert", str(source), str(tmp_path / "out"), "--json"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True, check=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 65_536).decode()
    os.close(ours)
    assert "converting to native" in shown
    assert done.stdout.startswith("{"), "and only the document is on stdout"
    assert "converting" not in done.stdout


def test_workers_and_sizes_are_obeyed(zaya: Zaya, source: Path, tmp_path: Path) -> None:
    for number, options in enumerate([["--workers", "1"], ["--workers", "5"]]):
        assert zaya("convert", source, tmp_path / str(number), "--max-shard-size", "10KiB", *options).code == 0
    assert tree(tmp_path / "0") == tree(tmp_path / "1")
    assert len(list((tmp_path / "0").glob("*.safetensors"))) > 5
    assert zaya("convert", tmp_path / "0", tmp_path / "back", "--to", "raw").code == 0
    assert "raw layout" in zaya("inspect", tmp_path / "back").out
