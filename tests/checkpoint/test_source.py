"""Checkpoint folders: what opens, what is refused and how, and that nothing in them ever changes."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.support import model, stamps, tree, use_blocks
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.inspection import inspect
from zaya_tools.checkpoint.source import INDEX, open_source, read_bytes, read_json, same_bytes, stretches
from zaya_tools.errors import SourceError


def fails(folder: Path, message: str) -> SourceError:
    with pytest.raises(SourceError, match=message) as caught:
        open_source(folder)
    return caught.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint of two files and an index."""
    model(tmp_path / "source", shards=2)
    return tmp_path / "source"


def weight_map(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / INDEX).read_text())["weight_map"])


def write_map(folder: Path, weights: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))


def test_a_sound_folder(folder: Path) -> None:
    source = open_source(folder)
    assert set(source.tensors) == set(weight_map(folder))
    assert source.nbytes == sum(tensor.nbytes for tensor in source.tensors.values()) > 0
    assert source.ignored == ()


def test_one_file_without_an_index(tmp_path: Path) -> None:
    tensors = model(tmp_path / "one")
    assert not (tmp_path / "one" / INDEX).exists()
    assert set(open_source(tmp_path / "one").tensors) == set(tensors)


def test_several_files_without_an_index(folder: Path) -> None:
    names = set(weight_map(folder))
    (folder / INDEX).unlink()
    assert set(open_source(folder).tensors) == names


def test_no_folder(tmp_path: Path) -> None:
    assert fails(tmp_path / "nowhere", "nowhere does not exist").hint
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file", "is a file, not a checkpoint folder")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    fails(folder, r"no config\.json")


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a":' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ],
    ids=["empty", "cut", "not utf-8", "deep list", "deep table", "long number", "list", "null", "lfs"],
)
def test_json_files_that_are_none(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    error = fails(folder, message)
    assert error.message.startswith(name)
    assert len(error.message) < 300


def test_a_json_file_of_absurd_size_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 2**40)
    fails(folder, r"config\.json is larger than")


def test_config_that_is_a_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    fails(folder, r"config\.json cannot be read")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    fails(tmp_path, "no safetensors files")


def test_only_pickles_are_named_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "optimizer.pt"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    error = fails(
        tmp_path,
        r"no safetensors files, only pickles of unknown use \(optimizer\.pt, pytorch_model-00001-of-00002\.bin and 1",
    )
    assert error.hint is not None
    assert "file" in error.hint


def test_files_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    fails(tmp_path, "hold no tensors")


@pytest.mark.parametrize(
    "name",
    ["../../secret", "../model.safetensors", "/etc/passwd", "a/b", "a\\b", "..\\secret", "a\0b", "\0", "", ".", "..",
     "./model.safetensors"],
)  # fmt: skip
def test_an_index_may_not_point_out_of_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    weights = weight_map(folder)
    first = next(iter(weights))
    write_map(folder, weights | {first: name})
    error = fails(folder, "which is not a file name inside the folder")
    assert first in error.message
    assert repr(name) in error.message


@pytest.mark.parametrize("weights", [None, [], {}, "x", {"a": 1}, {"a": None}, {"a": ["model.safetensors"]}])
def test_an_index_without_a_map(folder: Path, weights: Any) -> None:
    write_map(folder, weights)
    fails(folder, "has no weight_map of file names")


def test_an_index_that_names_absent_files(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    fails(folder, r"1 of 2 files that .* names are missing: model-00002-of-00002\.safetensors")


def test_a_dangling_index_link_is_not_a_missing_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / INDEX).symlink_to("../blobs/gone")
    fails(folder, f"no {INDEX}")


def test_an_index_name_that_no_file_system_has(folder: Path) -> None:
    weights = weight_map(folder)
    write_map(folder, weights | {next(iter(weights)): "\ud800.safetensors"})
    fails(folder, "are missing")


def test_the_index_promises_a_tensor_that_the_file_lacks(folder: Path) -> None:
    write_map(folder, weight_map(folder) | {"extra.weight": "model-00001-of-00002.safetensors"})
    fails(folder, r"promises extra\.weight in model-00001-of-00002\.safetensors, which does not hold it")


def test_the_index_puts_a_tensor_into_the_wrong_file(folder: Path) -> None:
    weights = weight_map(folder)
    first = next(name for name, file in weights.items() if "00001" in file)
    write_map(folder, weights | {first: "model-00002-of-00002.safetensors"})
    assert first in fails(folder, "which does not hold it").message


def test_a_file_holds_a_tensor_that_the_index_lacks(folder: Path) -> None:
    weights = weight_map(folder)
    last = next(reversed(weights))
    del weights[last]
    write_map(folder, weights)
    assert last in fails(folder, "which model.safetensors.index.json does not name").message


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_files(folder: Path, indexed: bool) -> None:
    copy = folder / "model-00003-of-00003.safetensors"
    save_file({"model.norm.weight": torch.zeros(2), "other": torch.zeros(2)}, copy)
    save_file({"model.norm.weight": torch.zeros(2)}, folder / "a.safetensors")
    if indexed:
        write_map(folder, weight_map(folder) | {"other": copy.name, "model.norm.weight": "a.safetensors"})
    else:
        (folder / INDEX).unlink()
    error = fails(folder, r"model\.norm\.weight is in two files")
    assert "a.safetensors" in error.message


def test_files_that_the_index_does_not_name_are_noted(folder: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert open_source(folder).ignored == ("consolidated.safetensors",)
    assert any("consolidated.safetensors is not part of the checkpoint" in note for note in inspect(folder).notes)


@pytest.mark.parametrize("indexed", [True, False])
def test_hidden_files_are_no_weights(folder: Path, indexed: bool) -> None:
    (folder / "._model-00001-of-00002.safetensors").write_bytes(b"Mac OS X")
    if not indexed:
        (folder / INDEX).unlink()
    assert open_source(folder).ignored == ()


def test_a_damaged_file_is_named(folder: Path) -> None:
    cut = folder / "model-00002-of-00002.safetensors"
    os.truncate(cut, cut.stat().st_size // 2)
    fails(folder, r"model-00002-of-00002\.safetensors promises [\d,]+ bytes, has [\d,]+")


def test_links_into_a_cache_work(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    convert(folder, tmp_path / "plain")
    before = tree(tmp_path / "cache")
    convert(snapshot, tmp_path / "linked")
    shards = [name for name in tree(tmp_path / "plain") if name.endswith(".safetensors")]
    assert all(tree(tmp_path / "linked")[name] == tree(tmp_path / "plain")[name] for name in shards)
    assert not any(entry.is_symlink() for entry in (tmp_path / "linked").iterdir())
    assert tree(tmp_path / "cache") == before


@pytest.mark.parametrize("indexed", [True, False])
def test_a_read_only_source_works_and_nothing_in_it_changes(tmp_path: Path, indexed: bool) -> None:
    folder = tmp_path / "source"
    model(folder, shards=2 if indexed else 1)
    for file in folder.iterdir():
        file.chmod(stat.S_IRUSR)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    bytes_before, stamps_before = tree(folder), stamps(folder)
    try:
        inspect(folder)
        convert(folder, tmp_path / "out", dtype="float32")
        convert(folder, tmp_path / "out", dtype="float32", force=True)
        with pytest.raises(Exception, match="lie in one another"):
            convert(folder, folder / "inside")
        assert (tree(folder), stamps(folder)) == (bytes_before, stamps_before)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("block", [8, 64, 4096])
def test_reading_by_stretches(folder: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    use_blocks(monkeypatch, block)
    tensor = max(open_source(folder).tensors.values(), key=lambda t: t.nbytes)
    content = tensor.file.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
    assert read_bytes(tensor).tobytes() == content
    parts = list(stretches(tensor))
    assert [offset for offset, _ in parts] == list(range(0, tensor.nbytes, block))
    assert b"".join(data.tobytes() for _, data in parts) == content


@pytest.mark.parametrize("index", [0, 500, 999])
def test_one_different_byte_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    use_blocks(monkeypatch, 64)
    (tmp_path / "config.json").write_text("{}")
    values = torch.zeros(1000, dtype=torch.uint8)
    other = values.clone()
    other[index] = 1
    save_file({"a": values, "b": values.clone(), "c": other, "d": values[:10].clone()}, tmp_path / "model.safetensors")
    tensors = open_source(tmp_path).tensors
    assert same_bytes(tensors["a"], tensors["b"])
    assert not same_bytes(tensors["a"], tensors["c"])
    assert not same_bytes(tensors["a"], tensors["d"])


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    tensor = max(open_source(folder).tensors.values(), key=lambda t: t.start)
    os.truncate(tensor.file, tensor.start + 1)
    with pytest.raises(SourceError, match=r"ended at byte [\d,]+") as caught:
        read_bytes(tensor)
    assert tensor.file.name in caught.value.message


def test_a_read_error_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = next(iter(open_source(folder).tensors.values()))

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(SourceError, match=rf"{tensor.file.name} cannot be read at byte [\d,]+: Input/output error"):
        read_bytes(tensor)


def test_read_json_keeps_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"é": [1, null, {"a": 2.5}]}', "utf-8")
    assert read_json(tmp_path / "x.json") == {"é": [1, None, {"a": 2.5}]}
