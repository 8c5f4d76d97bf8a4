"""Destinations: what may be written, what --force replaces, and what is never touched."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.support import SHARDS, model, no_leftovers, refused, tree
from zaya_tools.checkpoint import writer
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.sidefiles import MANIFEST
from zaya_tools.errors import DestinationError


def test_a_new_name(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    convert(source, out, **SHARDS)
    assert tree(out) == expected
    assert no_leftovers(out.parent)


def test_an_empty_folder(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    out.mkdir()
    convert(source, out, **SHARDS)
    assert tree(out) == expected
    assert no_leftovers(out.parent)


def test_through_dots_and_links_of_the_parent(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: dict[str, bytes]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    for number, path in enumerate(["a", "../link/b", "./c/", str(tmp_path / "link" / "d")]):
        convert(source, path, **SHARDS)
        assert tree(tmp_path / "real" / "abcd"[number]) == expected
    assert no_leftovers(tmp_path / "real")


def test_the_current_folder_is_refused_before_the_work(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir()
    monkeypatch.chdir(out)
    for path in (Path(), out, Path("../out")):
        with pytest.raises(DestinationError, match="is the current folder") as caught:
            convert(source, path, **SHARDS)
        assert caught.value.hint
    assert list(out.parent.iterdir()) == [out]
    assert not any(out.iterdir())


def test_a_mount_point_is_refused_before_the_work(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    refused("is a mount point", source, out)


def test_a_name_that_exists(source: Path, out: Path) -> None:
    convert(source, out)
    error = refused("already exists", source, out)
    assert error.hint is not None
    assert "--force" in error.hint


def test_a_file(source: Path, out: Path) -> None:
    out.write_text("x")
    for force in (False, True):
        refused("exists and is not a folder", source, out, force=force)


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_link(source: Path, out: Path, target: str) -> None:
    (out.parent / "elsewhere").mkdir()
    out.symlink_to(target)
    for force in (False, True):
        refused("exists and is not a folder", source, out, force=force)
    assert not any((out.parent / "elsewhere").iterdir())


def test_a_link_to_an_output_of_ours(source: Path, out: Path) -> None:
    convert(source, out.parent / "real")
    out.symlink_to("real")
    refused("exists and is not a folder", source, out, force=True)


@pytest.mark.parametrize("place", ["", "inside", "deep/er", ".."])
def test_in_or_around_the_source(tmp_path: Path, place: str) -> None:
    source = tmp_path / "outer" / "source"
    model(source)
    (source / "deep").mkdir()
    for force in (False, True):
        refused("lie in one another", source, source / place, force=force)


def test_in_the_source_through_a_link(tmp_path: Path) -> None:
    model(tmp_path / "source")
    (tmp_path / "link").symlink_to("source")
    refused("lie in one another", tmp_path / "source", tmp_path / "link" / "out")
    refused("lie in one another", tmp_path / "link", tmp_path / "source" / "out")


def test_a_source_in_the_work_of_the_destination(tmp_path: Path) -> None:
    hidden = partial_folder(tmp_path / "out")
    model(hidden / "output")
    for force in (False, True):
        refused("is the unfinished work for", hidden / "output", tmp_path / "out", force=force)


def test_a_parent_that_is_missing(source: Path, tmp_path: Path) -> None:
    error = refused("does not exist", source, tmp_path / "no" / "such" / "out")
    assert error.hint == "create it first"
    assert not any(tmp_path.iterdir())


def test_a_parent_that_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused("does not exist", source, tmp_path / "file" / "out")


def test_a_parent_that_is_read_only(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # whom no mode stops; a read-only disk does
        monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == out.parent and mode & os.W_OK))
    else:
        out.parent.chmod(0o555)
    try:
        refused("is not writable", source, out)
    finally:
        out.parent.chmod(0o755)


def test_replaces_what_zaya_wrote(source: Path, other: Path, out: Path, expected: dict[str, bytes]) -> None:
    convert(other, out, max_shard_size=7_000)
    assert tree(out) != expected
    convert(source, out, force=True, **SHARDS)
    assert tree(out) == expected, "files of the old run are gone"
    assert no_leftovers(out.parent)


def test_needs_nothing_to_replace(source: Path, out: Path, expected: dict[str, bytes]) -> None:
    convert(source, out, force=True, **SHARDS)
    assert tree(out) == expected


def test_without_exchange_of_folders(
    source: Path, other: Path, out: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_exchange", lambda *_: False)
    convert(other, out)
    convert(source, out, force=True, **SHARDS)
    assert tree(out) == expected
    assert no_leftovers(out.parent)


@pytest.mark.parametrize(
    "change",
    ["new file", "new folder", "new link", "shard grown", "shard cut", "small file edited", "file became a link",
     "file became a folder", "no manifest", "manifest damaged", "manifest without files", "hidden file"],
)  # fmt: skip
def test_refuses_what_zaya_did_not_write(source: Path, out: Path, change: str) -> None:
    convert(source, out)
    shard = out / "model-00001-of-00001.safetensors"
    if change == "new file":
        (out / "notes.txt").write_text("mine")
    elif change == "hidden file":
        (out / ".gitignore").write_text("mine")
    elif change == "new folder":
        (out / "checkpoint").mkdir()
    elif change == "new link":
        (out / "link").symlink_to("config.json")
    elif change == "shard grown":
        shard.write_bytes(shard.read_bytes() + b"\0")
    elif change == "shard cut":
        os.truncate(shard, 100)
    elif change == "small file edited":
        (out / "tokenizer.json").write_bytes((out / "tokenizer.json").read_bytes().replace(b"1", b"2"))
    elif change == "file became a link":
        shard.rename(out.parent / "moved")
        shard.symlink_to("../moved")
    elif change == "file became a folder":
        (out / "tokenizer.json").unlink()
        (out / "tokenizer.json").mkdir()
    elif change == "no manifest":
        (out / MANIFEST).unlink()
    elif change == "manifest damaged":
        os.truncate(out / MANIFEST, 100)
    elif change == "manifest without files":
        (out / MANIFEST).write_text('{"files": []}')
    error = refused("did not write it|is not a file that zaya wrote", source, out, force=True)
    assert error.hint is not None
    assert "nothing that zaya did not write is deleted" in error.hint


def test_a_strangers_folder(source: Path, out: Path) -> None:
    model(out)
    refused("zaya did not write it", source, out, force=True)


def test_a_manifest_cannot_point_out_of_its_folder(
    source: Path, out: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    convert(source, out)
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "deep").mkdir()
    recorded = json.loads((out / MANIFEST).read_text())
    facts = {"bytes": 4, "blake3": "0" * 64}
    recorded["files"] |= {"../precious": facts, str(tmp_path / "precious"): facts, "../../precious": facts}
    (out / MANIFEST).write_text(json.dumps(recorded))
    convert(source, out, force=True, **SHARDS)
    assert (tmp_path / "precious").read_text() == "mine"
    assert tree(out) == expected


def test_what_appears_during_the_run_is_not_replaced(
    source: Path, other: Path, out: Path, expected: dict[str, bytes]
) -> None:
    """Neither a stranger's folder nor one of ours, unless replacing was asked for."""
    convert(other, out.parent / "ours")
    ours = tree(out.parent / "ours")

    def appear(_: int) -> None:
        if not out.exists():
            shutil.copytree(out.parent / "ours", out)

    with pytest.raises(DestinationError, match="already exists"):
        convert(source, out, advance=appear, **SHARDS)
    assert tree(out) == ours
    convert(source, out, resume=True, force=True, **SHARDS)
    assert tree(out) == expected
    assert no_leftovers(out.parent)


def note(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def test_a_file_that_appears_during_the_run_is_not_deleted(source: Path, out: Path) -> None:
    convert(source, out)
    with pytest.raises(DestinationError, match=r"notes\.txt is not a file that zaya wrote"):
        convert(source, out, force=True, advance=lambda _: note(out))
    assert (out / "notes.txt").read_text() == "mine"
