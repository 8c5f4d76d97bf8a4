"""The manifest: every digest in it is checked here by reading again, and equal runs give equal bytes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.checkpoint.support import model, tree
from tests.synthetic import small
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.sidefiles import MANIFEST
from zaya_tools.checkpoint.source import open_source


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / MANIFEST).read_text()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source of two files and its conversion to four."""
    folder = tmp_path_factory.mktemp("manifest")
    model(folder / "source", small(tied=False), shards=2)
    (folder / "source" / "optimizer.pt").write_bytes(b"x")
    convert(folder / "source", folder / "out", max_shard_size=20_000)
    return folder


def test_every_file_is_listed_with_its_digest(folder: Path) -> None:
    files = tree(folder / "out")
    listed = manifest_of(folder / "out")["files"]
    assert set(listed) == set(files) - {MANIFEST}
    assert len([name for name in listed if name.endswith(".safetensors")]) > 2
    for name, facts in listed.items():
        assert facts == {"bytes": len(files[name]), "blake3": blake3(files[name]).hexdigest()}


def test_every_source_tensor_is_covered_by_stretches_with_their_digests(folder: Path) -> None:
    source = open_source(folder / "source")
    recorded = manifest_of(folder / "out")["source"]["tensors"]
    assert set(recorded) == set(source.tensors)
    for name, tensor in source.tensors.items():
        content = tensor.file.read_bytes()[tensor.start : tensor.start + tensor.nbytes]
        position = 0
        for stretch in recorded[name]:
            assert stretch["offset"] == position
            data = content[position : position + stretch["bytes"]]
            assert stretch["blake3"] == blake3(data).hexdigest()
            position += stretch["bytes"]
        assert position == tensor.nbytes


def test_source_files_are_described(folder: Path) -> None:
    recorded = manifest_of(folder / "out")["source"]
    assert (recorded["name"], recorded["layout"]) == ("source", "raw")
    for name, facts in recorded["files"].items():
        content = (folder / "source" / name).read_bytes()
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        assert facts == {"bytes": len(content), "header_blake3": blake3(header).hexdigest()}
    assert len(recorded["files"]) == 2


def test_every_written_tensor_is_described(folder: Path) -> None:
    recorded = manifest_of(folder / "out")["tensors"]
    written = open_source(folder / "out").tensors
    assert set(recorded) == set(written)
    for name, facts in recorded.items():
        tensor = written[name]
        assert (facts["dtype"], tuple(facts["shape"]), facts["file"]) == (tensor.dtype, tensor.shape, tensor.file.name)
        assert facts["operation"] == ("cast" if name.endswith("balancing_biases") else "copy")
    sources = recorded["model.layers.1.mlp.experts.gate_up_proj"]["sources"]
    prefix = "model.layers.3.zaya_block.experts.local_experts"
    assert sources == [f"{prefix}.{expert}.linear_fc1.weight" for expert in range(3)]
    used = [source for facts in recorded.values() for source in facts["sources"]]
    assert sorted(used) == sorted(open_source(folder / "source").tensors)


def test_what_was_asked_and_with_what(folder: Path) -> None:
    recorded = manifest_of(folder / "out")
    assert recorded["options"] == {"to": "native", "dtype": "keep", "max_shard_bytes": 20_000}
    assert recorded["layout"] == "native"
    assert recorded["architecture"]["experts"] == 3
    assert set(recorded["tool"]) == {"zaya_tools", "python", "numpy"}


def test_no_times_and_no_paths(folder: Path) -> None:
    text = (folder / "out" / MANIFEST).read_text()
    assert str(folder) not in text
    assert "/" not in text
    assert "optimizer.pt" not in text
    assert not re.search(r"20\d\d-\d\d-\d\d|\d\d:\d\d:\d\d", text)
    stamps = {int(file.stat().st_mtime) for file in (folder / "out").iterdir()}
    assert not any(str(stamp) in text for stamp in stamps)


@pytest.mark.parametrize("workers", [1, 7])
def test_equal_runs_give_equal_bytes(folder: Path, tmp_path: Path, workers: int) -> None:
    elsewhere = tmp_path / "far" / "away"
    shutil.copytree(folder / "source", elsewhere / "source", copy_function=shutil.copyfile)
    convert(elsewhere / "source", tmp_path / "another name", max_shard_size=20_000, workers=workers)
    assert tree(tmp_path / "another name") == tree(folder / "out")


def test_one_changed_bit_changes_the_manifest(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "source", tmp_path / "source")
    tensor = open_source(tmp_path / "source").tensors["model.final_norm.weight"]
    content = bytearray(tensor.file.read_bytes())
    content[tensor.start] ^= 1
    tensor.file.write_bytes(content)
    convert(tmp_path / "source", tmp_path / "out", max_shard_size=20_000)
    before, after = manifest_of(folder / "out"), manifest_of(tmp_path / "out")
    changed = {name for name, facts in after["files"].items() if facts != before["files"][name]}
    assert changed == {before["tensors"]["model.norm.weight"]["file"]}
    stretches = after["source"]["tensors"]
    assert {n for n, found in stretches.items() if found != before["source"]["tensors"][n]} == {
        "model.final_norm.weight"
    }
    assert before["source"]["files"] == after["source"]["files"], "headers are the same"
