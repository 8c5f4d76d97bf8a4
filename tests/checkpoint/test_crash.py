"""A process that dies: at any moment nothing half done is under the destination's name, and a resume completes it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import ROOT, drive, finish, model, one_line_and_hint, stamps, tree
from tests.synthetic import small
from zaya_tools.checkpoint.conversion import convert, plan_conversion
from zaya_tools.checkpoint.destination import partial_folder

KILLS = {False: 20, True: 10}
OPTIONS: dict[str, Any] = {"max_shard_size": 60_000}
SLOW: dict[str, Any] = {**OPTIONS, "block": 8192, "delay": 0.008, "workers": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crash") / "source"
    model(folder, small(hidden_size=64, expert_width=64, blocks=3, experts=5, vocab_size=200), shards=2)
    return folder


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("crash") / "expected"
    convert(source, folder, **OPTIONS)
    files = tree(folder)
    assert len([name for name in files if name.endswith(".safetensors")]) >= 6
    return files


@pytest.fixture(scope="module")
def duration(source: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that the slowed conversion takes after its imports."""
    process = drive(source=source, destination=tmp_path_factory.mktemp("crash") / "out", **SLOW)
    begin = time.monotonic()
    assert finish(process)[0] == 0
    return time.monotonic() - begin


def kill(source: Path, out: Path, after: float, **options: Any) -> bool:
    """Kill a conversion after so many seconds; whether it was still at work."""
    process = drive(source=source, destination=out, **SLOW, **options)
    time.sleep(after)
    process.kill()
    return finish(process)[0] == -signal.SIGKILL


@pytest.mark.parametrize("force", [False, True], ids=["new", "replacing"])
def test_killed_at_random_moments(
    source: Path, expected: dict[str, bytes], duration: float, tmp_path: Path, force: bool
) -> None:
    choose, kills = random.Random(2026), KILLS[force]
    out = tmp_path / "out"
    old: dict[str, bytes] | None = None
    found: list[str] = []
    died = 0
    for number in range(kills):
        if force:
            convert(source, out, force=True, dtype="float32")
            old = tree(out)
        # One moment in every stretch of the run, the last ones around its end.
        after = (number + choose.random()) * duration / (kills - 1)
        died += kill(source, out, after, force=force)
        seen = tree(out) if out.exists() else None
        assert seen in (old, expected), f"in part after {after:.3f} of {duration:.3f} s"
        found.append("new" if seen == expected else "before")
        convert(source, out, resume=True, force=force, **OPTIONS)
        assert tree(out) == expected
        assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208
        if not force:
            (tmp_path / "out").rename(tmp_path.parent / f"{tmp_path.name}-{number}")
    assert died >= kills // 4, "the kills have to land while it runs"
    assert found.count("before") >= kills // 4


def test_killed_again_and_again(source: Path, expected: dict[str, bytes], duration: float, tmp_path: Path) -> None:
    """Every run gets a little further than the one before, and finished shards are never written twice."""
    out, kept = tmp_path / "out", 0
    times: dict[str, Any] = {}
    for _ in range(8):
        if not kill(source, out, duration / 4, resume=True):
            break
        if out.exists():
            break
        records = {file.stem for file in (partial_folder(out) / "records").glob("*.json")}
        assert len(records) >= kept
        kept = len(records)
        now = {name: stamp for name, stamp in stamps(partial_folder(out) / "output").items() if name in records}
        assert times.items() <= now.items()
        times = now
    convert(source, out, resume=True, **OPTIONS)
    assert kept >= 2
    assert tree(out) == expected


def sweep(source: Path, folder: Path, old: Path | None = None, *, exchange: bool = True) -> list[dict[str, Any]]:
    options = {"source": str(source), "folder": str(folder), "old": old and str(old), "exchange": exchange}
    command = [sys.executable, "-m", "tests.checkpoint.sweep", json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    notes: list[dict[str, Any]] = json.loads(done.stdout)
    assert [note["died"] for note in notes] == [True] * (len(notes) - 1) + [False]
    assert all(note["resumed"] for note in notes)
    assert all(note["left"] == [] for note in notes)
    assert len(notes) > 30
    return notes


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for three shards."""
    folder = tmp_path_factory.mktemp("crash") / "few"
    model(folder)
    return folder


def test_killed_before_every_change_to_the_disk(few: Path, tmp_path: Path) -> None:
    notes = sweep(few, tmp_path)
    states = [note["found"] for note in notes]
    assert set(states) == {"absent", "new"}
    assert states == sorted(states), "once it is there, it stays"
    assert [note["complete"] for note in notes] == [state == "new" for state in states]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_killed_before_every_change_while_replacing(
    few: Path, tmp_path_factory: pytest.TempPathFactory, exchange: bool
) -> None:
    folder = tmp_path_factory.mktemp("sweep")
    old = tmp_path_factory.mktemp("sweep") / "old"
    convert(few, old, dtype="float32")
    count = Counter(note["found"] for note in sweep(few, folder, old, exchange=exchange))
    # Where folders cannot be exchanged, there is one moment without either; the next run puts the old one back.
    assert count.pop("absent", 0) == (0 if exchange else 1)
    assert set(count) == {"old", "new"}
    assert count["new"] > 5, "deaths while the old files are removed"


def test_ctrl_c_is_one_line_and_can_be_resumed(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = drive(source=source, destination=out, block=8192, workers=2, delay=0.1, **OPTIONS)
    time.sleep(0.15)
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    assert code == 130
    assert stdout == ""
    message, hint = one_line_and_hint(stderr)
    assert message == "interrupted"
    assert "--resume" in hint
    assert not out.exists()
    convert(source, out, resume=True, **OPTIONS)
    assert tree(out) == expected


def test_a_second_process_is_refused_and_the_first_goes_on(
    source: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = drive(source=source, destination=out, stop_after=5, **OPTIONS)
    assert first.stdout is not None
    assert first.stdout.readline() == "waiting\n"
    for options in ({}, {"resume": True}, {"force": True}):
        code, _, stderr = finish(drive(source=source, destination=out, **OPTIONS, **options))
        assert code == 2
        assert "another zaya process is writing" in one_line_and_hint(stderr)[0]
    first.kill()
    finish(first)
    convert(source, out, resume=True, **OPTIONS)
    assert tree(out) == expected


def test_a_file_size_limit_is_a_full_disk(source: Path, expected: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = [shard.nbytes for shard in plan_conversion(source, **OPTIONS).plan.shards]
    limit = max(sizes) - 1
    before = sizes.index(max(sizes))
    assert before >= 1
    code, stdout, stderr = finish(drive(source=source, destination=out, file_limit=limit, block=8192, **OPTIONS))
    assert (code, stdout) == (2, "")
    message, hint = one_line_and_hint(stderr)
    assert "the disk is full" in message
    assert f"({before} finished shards are kept)" in message
    assert "--resume" in hint
    assert not out.exists()
    assert len(list((partial_folder(out) / "output").iterdir())) == before
    convert(source, out, resume=True, **OPTIONS)
    assert tree(out) == expected


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 70 MB, where the system lets us have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=70m", "none", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("may not mount")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_another_program_fills(source: Path, expected: dict[str, bytes], small_disk: Path) -> None:
    out, filler = small_disk / "out", small_disk / "filler"
    code, _, stderr = finish(drive(source=source, destination=out, fill=filler, **SLOW))
    assert code == 2
    assert "the disk is full" in one_line_and_hint(stderr)[0]
    assert not out.exists()
    filler.unlink()
    convert(source, out, resume=True, **OPTIONS)
    assert tree(out) == expected


def test_a_disk_that_is_too_small_is_refused_at_once(source: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(10_000_000))
    code, _, stderr = finish(drive(source=source, destination=small_disk / "out", **OPTIONS))
    assert code == 2
    assert "bytes of disk" in one_line_and_hint(stderr)[0]
    assert os.listdir(small_disk) == ["filler"]  # noqa: PTH208


def test_memory_does_not_grow_with_the_model_and_torch_stays_out(tmp_path: Path) -> None:
    """Peak memory of conversions of 19 and 75 MB, one large tensor among small ones; no heavy library is loaded."""
    peaks: dict[int, int] = {}
    sizes = {}
    for experts in (2, 8):
        architecture = small(
            hidden_size=512, expert_width=1024, experts=experts, blocks=2, vocab_size=6_000 * experts, head_dim=32
        )
        model(tmp_path / str(experts), architecture)
        sizes[experts] = (tmp_path / str(experts) / "model.safetensors").stat().st_size
        for dtype in ("keep", "float32"):
            out = tmp_path / f"{experts} {dtype}"
            code, stdout, stderr = finish(
                drive(source=tmp_path / str(experts), destination=out, dtype=dtype, workers=2, max_shard_size="20MB")
            )
            assert code == 0, stderr
            result = json.loads(stdout)
            assert result["heavy"] == []
            peaks[experts] = max(peaks.get(experts, 0), result["peak"])
    assert sizes[8] > 3.5 * sizes[2] > 18_000_000
    assert peaks[8] - peaks[2] < 12_000_000
    assert peaks[8] < 150_000_000
