"""The hidden folder of a run, and disks that are full or fail."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import SHARDS, Interrupted, interrupt, refused, resume, tree
from zaya_tools.checkpoint import writer
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.sidefiles import MANIFEST
from zaya_tools.errors import DestinationError, SourceError


def test_a_strangers_folder_of_that_name_is_not_touched(source: Path, out: Path) -> None:
    hidden = partial_folder(out)
    hidden.mkdir()
    (hidden / "thesis.tex").write_text("mine")
    for options in ({}, {"force": True}, {"resume": True}):
        refused("thesis.tex is not of an unfinished run", source, out, **options)
    assert not out.exists()


def test_a_strangers_link_of_that_name_is_not_followed(source: Path, out: Path) -> None:
    (out.parent / "precious").mkdir()
    (out.parent / "precious" / "state.json").write_text("mine")
    partial_folder(out).symlink_to("precious")
    for options in ({}, {"force": True}, {"resume": True}):
        refused("is a link, not the work of an unfinished run", source, out, **options)


def test_what_a_stranger_put_into_it_stays_at_the_end(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    note = partial_folder(out) / "notes.txt"

    def put(_: int) -> None:
        note.write_text("mine")

    convert(source, out, advance=put, **SHARDS)
    assert tree(out) == expected
    assert note.read_text() == "mine"


def test_a_second_process_is_refused(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    seen: list[str] = []

    def second(_: int) -> None:
        flags: list[dict[str, bool]] = [{}, {"force": True}, {"resume": True}]
        for options in flags:
            with pytest.raises(DestinationError, match="another zaya process is writing") as caught:
                convert(source, out, **{**SHARDS, **options})
            seen.append(caught.value.message)

    convert(source, out, workers=1, advance=second, **SHARDS)
    assert len(seen) > 3
    assert tree(out) == expected


def test_a_lock_file_that_was_deleted_meanwhile_locks_nothing(
    source: Path, out: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that held it ended, and removed its folder, between our opening of the file and our lock."""
    flock = fcntl.flock
    calls: list[int] = []

    def late(lock: Any, mode: int) -> None:
        calls.append(mode)
        if len(calls) == 1:
            shutil.rmtree(partial_folder(out))
        flock(lock, mode)

    monkeypatch.setattr(fcntl, "flock", late)
    convert(source, out, **SHARDS)
    assert len(calls) == 2
    assert tree(out) == expected


def test_a_replaced_output_is_put_back(source: Path, other: Path, out: Path, expected: dict[str, bytes]) -> None:
    """A kill between the two renames that stand in for an exchange leaves neither output under the name."""
    convert(source, out, **SHARDS)
    interrupt(other, out, force=True)
    out.rename(partial_folder(out) / "replaced")
    with pytest.raises(DestinationError, match="already exists"):
        convert(other, out, **SHARDS)
    assert tree(out) == expected


def test_shards_of_the_replaced_output_do_not_count_as_finished(
    source: Path, other: Path, out: Path, expected: dict[str, bytes]
) -> None:
    """A run killed right after the exchange has the old shards, of the same names and sizes, where its own were."""
    convert(other, out, **SHARDS)
    run = interrupt(source, out, after=4, force=True)
    shutil.rmtree(run.hidden / "output")
    out.rename(run.hidden / "output")
    resume(run)
    assert tree(out) == expected


@pytest.mark.parametrize("room", [0, 60_000_000])
def test_too_little_room_is_said_before_the_work(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    usage = shutil.disk_usage(out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=room))
    error = refused(rf"needs [\d,]+ bytes of disk, {room:,} are free", source, out)
    assert error.hint
    assert not any(out.parent.iterdir())


def test_finished_shards_need_no_room_again(
    run: Interrupted, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(len(content) for name, content in expected.items() if name.endswith(".safetensors"))
    usage = shutil.disk_usage(run.out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=64 * 2**20 + whole - 1))
    resume(run)
    assert tree(run.out) == expected


def test_too_little_room_for_the_rest_keeps_what_is_finished(
    run: Interrupted, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(run.out.parent)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
        refused("bytes of disk, 0 are free", run.source, run.out, resume=True, **SHARDS)
    _, read = resume(run)
    assert 0 < read < sum(map(len, expected.values())) / 2
    assert tree(run.out) == expected


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_failing_write_keeps_what_is_finished(
    source: Path, out: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    pwrite = os.pwrite
    room = 40_000

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(code, os.strerror(code))
        room -= len(data)
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DestinationError) as caught:
            convert(source, out, **SHARDS)
    full_disk = code != errno.EIO
    assert ("the disk is full" if full_disk else "could not be written: Input/output error") in caught.value.message
    assert caught.value.hint is not None
    assert "--resume" in caught.value.hint
    assert not out.exists()
    assert not list(partial_folder(out).glob("*.unfinished")), "half a shard does not fill the disk"
    _, read = resume(Interrupted(source, out, partial_folder(out)))
    assert 0 < read < sum(map(len, expected.values())) * 0.7
    assert tree(out) == expected


def test_a_full_disk_at_the_last_small_file(
    source: Path, out: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer._write_bytes

    def full(file: Path, content: bytes) -> None:
        if file.name == MANIFEST:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write_bytes", full)
        with pytest.raises(DestinationError, match=f"the disk is full: {MANIFEST} could not be written"):
            convert(source, out, **SHARDS)
    assert not out.exists()
    assert resume(Interrupted(source, out, partial_folder(out)))[1] == 0
    assert tree(out) == expected


def test_a_source_that_goes_away_is_not_called_a_failing_write(source: Path, tmp_path: Path, out: Path) -> None:
    shutil.copytree(source, tmp_path / "source")
    done: list[int] = []

    def remove(_: int) -> None:
        done.append(1)
        if len(done) == 3:
            (tmp_path / "source" / "model.safetensors").unlink()

    with pytest.raises(SourceError, match=r"model\.safetensors cannot be read: No such file or directory"):
        convert(tmp_path / "source", out, advance=remove, workers=1, **SHARDS)
    assert not out.exists()
