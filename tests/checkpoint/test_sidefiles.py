"""Files beside the weights: an allow-list travels, byte for byte; what a trainer left never does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.checkpoint.support import SIDE_FILES, TRAINING_FILES, model, tree
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.inspection import inspect
from zaya_tools.checkpoint.sidefiles import COPIED, EXPECTED, MANIFEST, side_files
from zaya_tools.checkpoint.source import CONFIG, INDEX
from zaya_tools.errors import SourceError


def test_every_known_side_file_is_copied_byte_for_byte(tmp_path: Path) -> None:
    model(tmp_path / "source")
    contents = {name: f"{name}\r\n".encode() + bytes(range(256)) for name in COPIED}
    for name, content in contents.items():
        (tmp_path / "source" / name).write_bytes(content)
    convert(tmp_path / "source", tmp_path / "out")
    copied = tree(tmp_path / "out")
    assert {name: copied[name] for name in COPIED} == contents
    assert set(copied) == {*COPIED, CONFIG, INDEX, MANIFEST, "model-00001-of-00001.safetensors"}


def test_what_a_trainer_left_is_never_copied_and_is_listed(tmp_path: Path) -> None:
    model(tmp_path / "source")
    others = (*TRAINING_FILES, "scheduler.pt", "training_args.bin", "README.md", "modeling_zaya.py", "latest")
    for name in others:
        (tmp_path / "source" / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    (tmp_path / "source" / "global_step100").mkdir()
    (tmp_path / "source" / "global_step100" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (tmp_path / "source" / ".git").mkdir()
    work = convert(tmp_path / "source", tmp_path / "out").conversion
    assert work.sides.left == tuple(sorted((*others, "global_step100")))
    assert set(tree(tmp_path / "out")) == {*SIDE_FILES, CONFIG, INDEX, MANIFEST, "model-00001-of-00001.safetensors"}
    assert inspect(tmp_path / "source").sides == work.sides


def test_what_is_missing_is_listed(tmp_path: Path) -> None:
    model(tmp_path / "source", sides=False)
    work = convert(tmp_path / "source", tmp_path / "out").conversion
    assert work.sides.missing == EXPECTED
    assert work.sides.copied == ()
    (tmp_path / "source" / "generation_config.json").write_bytes(b"{}")
    assert side_files(tmp_path / "source").missing == ("tokenizer.json", "tokenizer_config.json")


def test_a_sentencepiece_tokenizer_stands_for_tokenizer_json(tmp_path: Path) -> None:
    model(tmp_path / "source", sides=False)
    (tmp_path / "source" / "tokenizer.model").write_bytes(b"\0")
    assert side_files(tmp_path / "source").missing == ("tokenizer_config.json", "generation_config.json")


def test_links_are_followed_and_dangling_ones_are_missing(tmp_path: Path) -> None:
    model(tmp_path / "source", sides=False)
    (tmp_path / "blob").write_bytes(b"{}")
    (tmp_path / "source" / "tokenizer.json").symlink_to("../blob")
    (tmp_path / "source" / "generation_config.json").symlink_to("../gone")
    work = convert(tmp_path / "source", tmp_path / "out").conversion
    assert work.sides.copied == ("tokenizer.json",)
    assert "generation_config.json" in work.sides.missing
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"{}"


def test_things_that_are_no_files_are_left(tmp_path: Path) -> None:
    model(tmp_path / "source", sides=False)
    (tmp_path / "source" / "tokenizer.json").mkdir()
    os.mkfifo(tmp_path / "source" / "merges.txt")
    sides = side_files(tmp_path / "source")
    assert sides.copied == ()
    assert sides.left == ("merges.txt", "tokenizer.json")


def test_a_side_file_that_cannot_be_read_stops_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "source")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SourceError, match=r"tokenizer\.json cannot be read"):
        convert(tmp_path / "source", tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source"]


def test_weights_config_and_manifest_of_the_source_are_not_side_files(tmp_path: Path) -> None:
    model(tmp_path / "source", shards=2)
    convert(tmp_path / "source", tmp_path / "native")
    assert side_files(tmp_path / "native") == side_files(tmp_path / "source")
    convert(tmp_path / "native", tmp_path / "back", to="raw")
    assert (tmp_path / "back" / MANIFEST).read_bytes() != (tmp_path / "native" / MANIFEST).read_bytes()
