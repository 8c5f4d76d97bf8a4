"""Unfinished runs: what a resume takes over, what it refuses, and what is complete already."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import SHARDS, Interrupted, interrupt, no_leftovers, refused, resume, stamps, tree
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.sidefiles import MANIFEST


def test_continues_with_what_was_finished(run: Interrupted, expected: dict[str, bytes]) -> None:
    finished = stamps(run.hidden / "output")
    assert not run.out.exists()
    result, read = resume(run)
    assert 0 < read < result.conversion.plan.read_bytes * 0.7
    assert tree(run.out) == expected
    kept = stamps(run.out)
    assert all(kept[name] == stamp for name, stamp in finished.items() if name != ".")
    assert no_leftovers(run.out.parent)


def test_twice(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    interrupt(source, out, after=1)
    resume(interrupt(source, out, after=2, resume=True))
    assert tree(out) == expected


def test_without_an_unfinished_run_starts_one(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    convert(source, out, resume=True, **SHARDS)
    assert tree(out) == expected


def test_is_not_guessed(run: Interrupted) -> None:
    error = refused("an unfinished run for .* is in", run.source, run.out, **SHARDS)
    assert error.hint is not None
    assert "--resume" in error.hint
    assert "--force" in error.hint


def test_force_starts_again(run: Interrupted, expected: dict[str, bytes]) -> None:
    counts: list[int] = []
    result = convert(run.source, run.out, force=True, advance=counts.append, **SHARDS)
    assert sum(counts) == result.conversion.plan.read_bytes
    assert tree(run.out) == expected
    assert no_leftovers(run.out.parent)


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"max_shard_size": 13_000}, {"dtype": "bfloat16"}])
def test_other_options_are_refused(run: Interrupted, options: dict[str, Any]) -> None:
    error = refused("of another source, other options", run.source, run.out, resume=True, **{**SHARDS, **options})
    assert error.hint is not None
    assert "--force" in error.hint


def test_another_source_is_refused(run: Interrupted, other: Path) -> None:
    refused("of another source", other, run.out, resume=True, **SHARDS)


@pytest.mark.parametrize("change", ["one byte", "touched"])
def test_a_changed_source_is_refused(source: Path, tmp_path: Path, out: Path, change: str) -> None:
    shutil.copytree(source, tmp_path / "source")
    run = interrupt(tmp_path / "source", out)
    file = tmp_path / "source" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= change == "one byte"
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    refused("of another source", run.source, run.out, resume=True, **SHARDS)


def test_a_changed_config_is_refused(source: Path, tmp_path: Path, out: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    run = interrupt(tmp_path / "source", out)
    file = tmp_path / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 77.0}))
    refused("of another source", run.source, run.out, resume=True, **SHARDS)


def test_side_files_are_those_of_the_resumed_run(source: Path, tmp_path: Path, out: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    run = interrupt(tmp_path / "source", out)
    (tmp_path / "source" / "tokenizer.json").write_bytes(b"corrected")
    resume(run)
    assert (out / "tokenizer.json").read_bytes() == b"corrected"


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "{}", "[]", '{"digest": {}}', '{"digest": {"segments": [1]}}', "gone"]
)
def test_damaged_records_only_cost_time(run: Interrupted, expected: dict[str, bytes], damage: str) -> None:
    records = sorted((run.hidden / "records").iterdir())
    assert len(records) >= 3
    if damage == "gone":
        records[0].unlink()
    elif damage == "cut":
        os.truncate(records[0], records[0].stat().st_size // 2)
    else:
        records[0].write_text("" if damage == "empty" else damage)
    resume(run)
    assert tree(run.out) == expected


@pytest.mark.parametrize("damage", ["cut", "grown", "gone", "swapped"])
def test_damaged_shards_are_written_again(
    run: Interrupted, other: Path, expected: dict[str, bytes], damage: str
) -> None:
    shard = sorted((run.hidden / "output").iterdir())[1]
    if damage == "cut":
        os.truncate(shard, 10)
    elif damage == "grown":
        shard.write_bytes(shard.read_bytes() + b"\0")
    elif damage == "gone":
        shard.unlink()
    else:  # another model's shard of the same name and size
        convert(other, run.out.parent / "swap", **SHARDS)
        shutil.copy2(run.out.parent / "swap" / shard.name, shard)
        assert shard.stat().st_size == len(expected[shard.name])
    resume(run)
    assert tree(run.out) == expected


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"fingerprint": null}'])
def test_a_damaged_state_is_refused_with_a_way_out(run: Interrupted, expected: dict[str, bytes], content: str) -> None:
    (run.hidden / "state.json").write_text(content)
    error = refused("of another source", run.source, run.out, resume=True, **SHARDS)
    assert error.hint is not None
    assert "--force" in error.hint
    convert(run.source, run.out, force=True, **SHARDS)
    assert tree(run.out) == expected


def test_a_finished_output_is_already_complete(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    convert(source, out, **SHARDS)
    before = stamps(out)
    result = convert(source, out, resume=True, **SHARDS)
    assert result.already_complete
    assert (stamps(out), tree(out)) == (before, expected)
    assert no_leftovers(out.parent)


@pytest.mark.parametrize("gone", ["config.json", "model-00002-of-0000", "tokenizer.json"])
def test_an_output_that_lacks_a_file_is_not_complete(source: Path, out: Path, gone: str) -> None:
    convert(source, out, **SHARDS)
    next(file for file in out.iterdir() if file.name.startswith(gone)).unlink()
    refused("already exists", source, out, resume=True, **SHARDS)
    assert not convert(source, out, resume=True, force=True, **SHARDS).already_complete
    assert convert(source, out, resume=True, **SHARDS).already_complete


@pytest.mark.parametrize("content", ["[]", "{}", '{"files": 1}', '{"files": {}, "source": 1}'])
def test_a_strange_manifest_is_not_complete(source: Path, out: Path, content: str) -> None:
    convert(source, out, **SHARDS)
    (out / MANIFEST).write_text(content)
    refused("already exists", source, out, resume=True, **SHARDS)


def test_an_output_of_other_options_is_not_complete(source: Path, other: Path, out: Path) -> None:
    convert(source, out, **SHARDS)
    refused("already exists", source, out, resume=True)
    refused("already exists", other, out, resume=True, dtype="float32", **SHARDS)


def test_a_complete_output_does_not_end_another_run(
    source: Path, other: Path, out: Path, expected: dict[str, bytes]
) -> None:
    """An unfinished run of another conversion to the same name keeps its work."""
    convert(source, out, **SHARDS)
    run = interrupt(other, out, force=True)
    work = tree(run.hidden)
    assert convert(source, out, resume=True, **SHARDS).already_complete
    assert tree(run.hidden) == work
    assert tree(out) == expected
