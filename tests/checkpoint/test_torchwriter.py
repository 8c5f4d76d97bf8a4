"""Files that are written for trainers: whole zips, of the size that was planned, that torch reads in every way."""

from __future__ import annotations

import argparse
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.support import model, tree, use_blocks
from tests.synthetic import GEOMETRIES, read_tensors, same_bits, small, write_checkpoint
from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint import torchwriter
from zaya_tools.checkpoint.conversion import convert, plan_conversion
from zaya_tools.checkpoint.pump import write_shard
from zaya_tools.checkpoint.torchwriter import TorchShard, _Record, write_torch_shard
from zaya_tools.errors import DestinationError, NonFiniteError
from zaya_tools.layouts.megatron_config import config_of_arguments
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw_config import declared

FILE = Path("release/mp_rank_00/model_optim_rng.pt")


def load(folder: Path, **options: Any) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        found: dict[str, Any] = torch.load(folder / FILE, weights_only=True, **options)
    return found


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("block", [64, 4096, 4 * 2**20])
def test_torch_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, block: int) -> None:
    model(tmp_path / "raw", dtype=dtype)
    use_blocks(monkeypatch, block)
    monkeypatch.setattr(torchwriter, "BLOCK", block)
    work = convert(tmp_path / "raw", tmp_path / "out", to="megatron").conversion
    file = tmp_path / "out" / FILE
    assert file.stat().st_size == work.plan.nbytes
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert "model_optim_rng/data.pkl" in archive.namelist()
    plain, mapped = load(tmp_path / "out"), load(tmp_path / "out", mmap=True)
    assert plain.keys() == {"args", "checkpoint_version", "iteration", "model"}
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    for name, tensor in plain["model"].items():
        assert same_bits(mapped["model"][name], tensor)
        assert tensor.is_contiguous()
        assert mapped["model"][name].data_ptr() % 64 == 0


def test_every_byte_is_accounted_for(tmp_path: Path) -> None:
    from blake3 import blake3

    model(tmp_path / "raw")
    done: list[int] = []
    result = convert(tmp_path / "raw", tmp_path / "out", to="megatron", advance=done.append)
    assert sum(done) == result.conversion.plan.read_bytes
    recorded = json.loads((tmp_path / "out" / "zaya_manifest.json").read_text())
    files = {name: content for name, content in tree(tmp_path / "out").items() if name != "zaya_manifest.json"}
    assert recorded["files"].keys() == files.keys()
    for name, facts in recorded["files"].items():
        assert facts == {"bytes": len(files[name]), "blake3": blake3(files[name]).hexdigest()}
    assert recorded["layout"] == "megatron"
    assert set(recorded["source"]["tensors"]) == set(read_tensors(tmp_path / "raw"))


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    model(tmp_path / "raw")
    for name in ("one", "two"):
        convert(tmp_path / "raw", tmp_path / name, to="megatron")
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_a_cast_is_torchs_cast(tmp_path: Path) -> None:
    a = small()
    stored = write_checkpoint(tmp_path / "native", NATIVE, a, dtype="F32")
    convert(tmp_path / "native", tmp_path / "out", to="megatron", dtype="bfloat16")
    found = load(tmp_path / "out")["model"]
    assert same_bits(found["embedding.word_embeddings.weight"], stored["model.embed_tokens.weight"].bfloat16())
    assert same_bits(found["decoder.layers.0.self_attn.temp"], stored["model.layers.0.self_attn.qk_norm.temp"])
    stack = stored["model.layers.1.mlp.experts.gate_up_proj"]
    for expert in range(a.experts):
        name = f"decoder.layers.3.zaya_block.local_experts.{expert}.linear_fc1.weight"
        assert same_bits(found[name], stack[expert].bfloat16())


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_arguments_say_the_geometry(tmp_path: Path, geometry: str) -> None:
    a = small(**GEOMETRIES[geometry])
    write_checkpoint(tmp_path / "native", NATIVE, a)
    convert(tmp_path / "native", tmp_path / "out", to="megatron")
    args = vars(load(tmp_path / "out")["args"])
    stated = {**declared(config_of_arguments(args)), "query_heads": args["num_attention_heads"], "dtype": a.dtype}
    assert Architecture(**stated) == a
    # What a trainer builds the model from.
    assert (args["num_layers"], args["num_experts"]) == (2 * a.blocks, a.experts)
    assert (args["ffn_hidden_size"], args["moe_ffn_hidden_size"]) == (a.expert_width, a.expert_width)
    assert args["untie_embeddings_and_output_weights"] is (not a.tied)


def test_a_bad_number_stops_the_run(tmp_path: Path) -> None:
    name = "model.layers.1.zaya_block.experts.local_experts.2.linear_fc2.weight"
    good = model(tmp_path / "raw")[name]
    bad = good.clone()
    bad[3, 4] = float("nan")
    model(tmp_path / "raw", overrides={name: bad})
    with pytest.raises(NonFiniteError, match=r"linear_fc2\.weight: 1 value is NaN or infinite, the first at \[3, 4\]"):
        convert(tmp_path / "raw", tmp_path / "out", to="megatron")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["raw"]


def test_it_is_replaced_only_as_it_was_written(tmp_path: Path) -> None:
    model(tmp_path / "raw")
    out = tmp_path / "out"
    convert(tmp_path / "raw", out, to="megatron")
    before = tree(out)
    with pytest.raises(DestinationError, match="already exists"):
        convert(tmp_path / "raw", out, to="megatron")
    for foreign in (out / "mine.txt", out / "release" / "mine.txt", out / "release" / "mp_rank_01" / "x.pt"):
        foreign.parent.mkdir(exist_ok=True)
        foreign.write_text("x")
        with pytest.raises(DestinationError, match="is not a file that zaya wrote"):
            convert(tmp_path / "raw", out, to="megatron", force=True)
        assert foreign.read_text() == "x"
        foreign.unlink()
    with pytest.raises(DestinationError, match="mp_rank_01 is not a file that zaya wrote"):
        convert(tmp_path / "raw", out, to="megatron", force=True)
    (out / "release" / "mp_rank_01").rmdir()
    convert(tmp_path / "raw", out, to="megatron", force=True)
    assert tree(out) == before
    convert(tmp_path / "raw", out, force=True)
    assert not (out / "release").exists()
    assert (out / "config.json").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "raw"]


def test_a_link_in_it_is_not_followed(tmp_path: Path) -> None:
    model(tmp_path / "raw")
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    convert(tmp_path / "raw", out, to="megatron")
    shutil.move(out / "release", elsewhere)
    (out / "release").symlink_to(elsewhere)
    with pytest.raises(DestinationError, match="is not a file that zaya wrote"):
        convert(tmp_path / "raw", out, to="megatron", force=True)
    assert (elsewhere / "mp_rank_00").exists()


def test_a_finished_run_is_known(tmp_path: Path) -> None:
    model(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "out", to="megatron")
    assert convert(tmp_path / "raw", tmp_path / "out", to="megatron", resume=True).already_complete
    assert not plan_conversion(tmp_path / "raw", to="megatron").warnings


@pytest.mark.parametrize("size", [0, 10, 2**32 - 2, 2**32 - 1, 2**32, 2**40])
@pytest.mark.parametrize("begin", [0, 7, 2**32 - 1, 2**33 + 1])
def test_records_beyond_four_gigabytes(size: int, begin: int) -> None:
    # Read back by Python's zipfile, which follows the directory and its 64-bit extension.
    record = _Record(b"a/data/0", begin, size, b"")
    assert (begin + len(record.header)) % 64 == 0
    entry = record.entry(123)
    tail = entry + torchwriter._directory_end(1, len(entry), record.end)

    class Holes:
        """A file of which only the end is there."""

        def __init__(self) -> None:
            self.position = 0

        def seek(self, offset: int, whence: int = 0) -> int:
            self.position = offset + (0, self.position, record.end + len(tail))[whence]
            return self.position

        def tell(self) -> int:
            return self.position

        def read(self, count: int = -1) -> bytes:
            start = self.position - record.end
            assert start >= 0, "only the directory is read"
            data = tail[start:] if count < 0 else tail[start : start + count]
            self.position += len(data)
            return data

        def seekable(self) -> bool:
            return True

    with zipfile.ZipFile(Holes()) as archive:
        (info,) = archive.infolist()
    assert (info.filename, info.file_size, info.compress_size) == ("a/data/0", size, size)
    assert (info.header_offset, info.CRC) == (begin, 123)


def test_the_two_writers_agree_on_what_they_read(tmp_path: Path) -> None:
    model(tmp_path / "raw")
    plan = plan_conversion(tmp_path / "raw", to="megatron").plan
    (shard,) = plan.shards
    assert isinstance(shard, TorchShard)
    ours = write_torch_shard(shard, tmp_path / "x.pt", lambda _: None)
    native = plan_conversion(tmp_path / "raw").plan.shards[0]
    other = write_shard(native, tmp_path / "x.safetensors", 2, lambda _: None)
    read = {(segment.tensor, segment.offset, segment.nbytes, segment.blake3) for segment in ours.segments}
    assert read == {(segment.tensor, segment.offset, segment.nbytes, segment.blake3) for segment in other.segments}
