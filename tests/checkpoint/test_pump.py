"""Moving bytes: any number of threads and any block size give the same file, and bad numbers stop everything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.checkpoint.support import model, tree, use_blocks
from tests.synthetic import TORCH, read_tensors, same_bits, small
from zaya_tools.checkpoint.conversion import convert, plan_conversion
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.pump import ShardDigest, write_shard
from zaya_tools.checkpoint.run import Conversion
from zaya_tools.errors import NonFiniteError

Q, EMBEDDING = "model.layers.2.self_attn.qkv.linear_q.weight", "model.embed_tokens.weight"


def written(work: Conversion, folder: Path, workers: int) -> dict[str, tuple[bytes, ShardDigest]]:
    """Every shard of a plan, written by this many threads."""
    folder.mkdir(exist_ok=True)
    result = {}
    for shard in work.plan.shards:
        digest = write_shard(shard, folder / shard.filename, workers, lambda _: None)
        result[shard.filename] = ((folder / shard.filename).read_bytes(), digest)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with odd sizes, so that pieces begin anywhere in a block, and unquantized values of every magnitude."""
    folder = tmp_path_factory.mktemp("pump") / "source"
    model(folder, small(vocab_size=37, experts=3, router_width=5, sliding_window=None, blocks=1), shards=2)
    return folder


@pytest.fixture(scope="module")
def plans(folder: Path) -> dict[str, Conversion]:
    return {
        dtype: plan_conversion(folder, dtype=dtype, max_shard_size=10_000) for dtype in ("keep", "float32", "float16")
    }


@pytest.fixture(scope="module")
def expected(plans: dict[str, Conversion], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By one thread, in blocks larger than the files."""
    return {dtype: written(work, tmp_path_factory.mktemp(dtype), 1) for dtype, work in plans.items()}


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    workers=st.integers(1, 8),
    block=st.integers(1, 40).map(lambda n: 8 * n) | st.sampled_from([4096, 8192, 12_288]),
    dtype=st.sampled_from(["keep", "float32", "float16"]),
)
def test_threads_and_blocks_change_nothing(
    plans: dict[str, Conversion], expected: dict[str, Any], tmp_path: Path, workers: int, block: int, dtype: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_blocks(patch, block)
        result = written(plans[dtype], tmp_path, workers)
    assert result == expected[dtype]
    for content, digest in result.values():
        assert digest.blake3 == blake3(content).hexdigest()
        assert digest.nbytes == len(content)


def test_digests_are_those_of_the_bytes(plans: dict[str, Conversion], expected: dict[str, Any]) -> None:
    """Of the whole file, and of every stretch of source: read again here, by nothing that the engine uses."""
    assert len(plans["keep"].plan.shards) > 2
    for dtype, work in plans.items():
        for shard in work.plan.shards:
            content, digest = expected[dtype][shard.filename]
            assert digest.blake3 == blake3(content).hexdigest()
            pieces = [piece for output in shard.outputs for piece in output.pieces]
            found = [(segment.tensor, segment.offset, segment.nbytes) for segment in digest.segments]
            assert found == [(piece.tensor.name, piece.offset, piece.nbytes) for piece in pieces]
            for piece, segment in zip(pieces, digest.segments, strict=True):
                start = piece.tensor.start + piece.offset
                data = piece.tensor.file.read_bytes()[start : start + piece.nbytes]
                assert segment.blake3 == blake3(data).hexdigest()


def test_progress_adds_up_to_what_is_read(
    plans: dict[str, Conversion], tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    use_blocks(patch, 64)
    work = plans["float32"]
    done: list[int] = []
    for shard in work.plan.shards:
        write_shard(shard, tmp_path / shard.filename, 4, done.append)
    assert sum(done) == work.plan.read_bytes
    assert len(done) > 100


def test_a_failing_worker_stops_the_others(
    plans: dict[str, Conversion], tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    use_blocks(patch, 64)
    calls: list[int] = []

    def fail(count: int) -> None:
        calls.append(count)
        if len(calls) == 3:
            raise ZeroDivisionError("from the callback")

    with pytest.raises(ZeroDivisionError, match="from the callback"):
        write_shard(plans["keep"].plan.shards[0], tmp_path / "x", 4, fail)
    assert len(calls) < 20


def positions(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {
        "first": tuple(0 for _ in shape),
        "middle": tuple(size // 2 for size in shape),
        "last": tuple(size - 1 for size in shape),
    }


@pytest.mark.parametrize("block", [64, 4096])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_one_bad_number_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bad: float, where: str, block: int
) -> None:
    use_blocks(monkeypatch, block)
    tensor = torch.zeros(64, 32, dtype=TORCH[dtype])
    index = positions(tuple(tensor.shape))[where]
    tensor[index] = bad
    model(tmp_path / "source", dtype=dtype, overrides={EMBEDDING: tensor})
    with pytest.raises(NonFiniteError) as caught:
        convert(tmp_path / "source", tmp_path / "out")
    assert caught.value.message == (
        f"{EMBEDDING}: 1 value is NaN or infinite, the first at {list(index)} (in model.safetensors)"
    )
    assert caught.value.hint
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source"], "nothing is published or left"


@pytest.mark.parametrize("dtype", ["keep", "float32", "float16"])
@pytest.mark.parametrize(
    "name",
    [EMBEDDING, "model.layers.1.zaya_block.experts.local_experts.2.linear_fc2.weight",
     "model.layers.0.self_attn.qkv.temp", "model.layers.3.zaya_block.router.balancing_biases",
     "model.res_scale.residual_bias", "model.final_norm.weight"],
)  # fmt: skip
def test_every_kind_of_tensor_is_scanned_whatever_is_done_to_it(tmp_path: Path, name: str, dtype: str) -> None:
    tensors = model(tmp_path / "clean")
    broken = tensors[name].clone()
    broken.view(-1)[-1] = math.nan
    model(tmp_path / "source", overrides={name: broken})
    with pytest.raises(NonFiniteError, match="1 value is NaN") as caught:
        convert(tmp_path / "source", tmp_path / "out", dtype=dtype)
    assert caught.value.message.startswith(f"{name}: ")
    assert not (tmp_path / "out").exists()


def test_all_bad_numbers_of_a_tensor_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_blocks(monkeypatch, 64)
    tensor = torch.zeros(64, 32, dtype=torch.bfloat16)
    tensor[5, 3], tensor[5, 4], tensor[40], tensor[63, 31] = math.inf, -math.inf, math.nan, math.inf
    model(tmp_path / "source", overrides={EMBEDDING: tensor})
    with pytest.raises(NonFiniteError, match=r"35 values are NaN or infinite, the first at \[5, 3\]"):
        convert(tmp_path / "source", tmp_path / "out", workers=8)


def test_a_bad_number_in_what_back_to_raw_reads(tmp_path: Path) -> None:
    model(tmp_path / "raw")
    convert(tmp_path / "raw", tmp_path / "native")
    file = tmp_path / "native" / "model-00001-of-00001.safetensors"
    work = plan_conversion(tmp_path / "native", to="raw")
    piece = next(out for out in work.plan.outputs() if "local_experts.1.linear_fc2" in out.name).pieces[0]
    content = bytearray(file.read_bytes())
    at = piece.tensor.start + piece.offset + piece.nbytes - 2
    content[at : at + 2] = b"\x80\x7f"
    file.write_bytes(content)
    with pytest.raises(NonFiniteError, match=r"mlp\.experts\.down_proj: 1 value is .* first at \[1, 31, 31\]"):
        convert(tmp_path / "native", tmp_path / "back", to="raw")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_float16_overflow_names_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    use_blocks(monkeypatch, 64)
    tensor = torch.zeros(64, 32, dtype=TORCH[dtype])
    tensor[7, 9] = -70144.0
    model(tmp_path / "source", dtype=dtype, overrides={EMBEDDING: tensor})
    with pytest.raises(NonFiniteError) as caught:
        convert(tmp_path / "source", tmp_path / "out", dtype="float16")
    assert caught.value.message == f"{EMBEDDING}[7, 9] = -70144 does not fit in F16"
    assert caught.value.hint is not None
    assert "bfloat16" in caught.value.hint
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("value", [65504.0, -65504.0, 6e-8, 1e-30])
def test_float16_keeps_what_it_can_hold(tmp_path: Path, value: float) -> None:
    tensor = torch.full((64, 32), value, dtype=torch.float32)
    model(tmp_path / "source", dtype="F32", overrides={EMBEDDING: tensor})
    convert(tmp_path / "source", tmp_path / "out", dtype="float16")
    assert same_bits(read_tensors(tmp_path / "out")[EMBEDDING], tensor.half())


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [1, 511, 4096, 4097, 12_288])
def test_files_of_any_size_with_and_without_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, size: int
) -> None:
    use_blocks(monkeypatch, 4096 if direct else 2048)
    model(tmp_path / "source", small(vocab_size=size))
    convert(tmp_path / "source", tmp_path / "out", workers=3)
    source, out = read_tensors(tmp_path / "source"), load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert same_bits(out[EMBEDDING], source[EMBEDDING])
    assert not partial_folder(tmp_path / "out").exists()
    assert "model-00001-of-00001.safetensors" in tree(tmp_path / "out")
