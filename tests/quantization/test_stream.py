"""The streaming writer: threads, slabs and blocks change no byte, and memory does not grow with the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.support import ROOT, no_leftovers, tree, use_blocks
from tests.quantization.support import DATA_FREE, GEOMETRY, geometry
from tests.synthetic import write_checkpoint
from zaya_tools import quantize
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.plan import Plan
from zaya_tools.errors import DestinationError
from zaya_tools.layouts.raw import RAW
from zaya_tools.quantization import stream
from zaya_tools.quantization.conversion import plan_quantization
from zaya_tools.quantization.planning import QuantizedOutput
from zaya_tools.quantization.stream import write_quantized

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream") / "source"
    write_checkpoint(folder, RAW, GEOMETRY, shards=2)
    return folder


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def write(plan: Plan, folder: Path, workers: int) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    for shard in plan.shards:
        digest = write_quantized(shard, folder / shard.filename, workers, lambda _: None, CPU)
        content = (folder / shard.filename).read_bytes()
        assert (digest.blake3, digest.nbytes) == (blake3(content).hexdigest(), len(content)) == (
            digest.blake3, shard.nbytes,
        )  # fmt: skip
    return tree(folder)


@pytest.fixture(scope="module")
def plans(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Plan, dict[str, bytes]]]:
    """Every recipe's plan, and the files that one worker writes in whole matrices."""
    result = {}
    for recipe in DATA_FREE:
        plan = plan_quantization(source, recipe, max_shard_size=120_000).plan
        result[recipe] = (plan, write(plan, tmp_path_factory.mktemp("stream") / recipe, 1))
    return result


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    recipe=st.sampled_from(DATA_FREE),
    workers=st.integers(1, 5),
    block=st.sampled_from([64, 512, 4096, 2**16]),
    slab=st.integers(1, 70_000),
)
def test_threads_slabs_and_blocks_change_nothing(
    plans: dict[str, tuple[Plan, dict[str, bytes]]],
    tmp_path_factory: pytest.TempPathFactory,
    patch: pytest.MonkeyPatch,
    recipe: str,
    workers: int,
    block: int,
    slab: int,
) -> None:
    plan, expected = plans[recipe]
    with patch.context() as inner:
        use_blocks(inner, block)
        inner.setattr(stream, "BLOCK", block)
        inner.setattr(stream, "SLAB", slab)
        assert write(plan, tmp_path_factory.mktemp("parts"), workers) == expected


def test_digests_of_the_source_are_those_of_convert(source: Path, tmp_path: Path) -> None:
    """Every stretch of the source is read once and recorded, whatever becomes of it."""
    from zaya_tools import convert

    convert(source, tmp_path / "converted")
    quantize(source, tmp_path / "out", "int4")
    recorded = [json.loads((tmp_path / name / "zaya_manifest.json").read_text()) for name in ("converted", "out")]
    whole, cut = (entry["source"]["tensors"] for entry in recorded)
    assert whole.keys() == cut.keys()
    for name in whole:
        assert sum(part["bytes"] for part in whole[name]) == sum(part["bytes"] for part in cut[name]), name
        if len(whole[name]) == len(cut[name]):
            assert whole[name] == cut[name]


def test_progress_reaches_the_planned_bytes(source: Path, tmp_path: Path) -> None:
    work = plan_quantization(source, "nvfp4a16")
    done: list[int] = []
    quantize(source, tmp_path / "out", planned=work, advance=done.append)
    assert sum(done) == work.plan.read_bytes == work.source.nbytes


def test_matrices_are_read_once_though_they_become_several_tensors(source: Path) -> None:
    plan = plan_quantization(source, "int4").plan
    stored = [output for output in plan.outputs() if isinstance(output, QuantizedOutput)]
    assert {output.suffix for output in stored} == {"weight_packed", "weight_scale", "weight_shape"}
    assert plan.read_bytes == plan_quantization(source, "bf16").plan.read_bytes


@pytest.mark.parametrize("recipe", ["fp8", "int4"])
def test_a_stopped_run_resumes_to_the_same_bytes(recipe: str, source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_shard_size": 60_000}
    quantize(source, tmp_path / "expected", recipe, **options)
    expected = tree(tmp_path / "expected")
    out, calls = tmp_path / "out", 0

    def stop(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, recipe, advance=stop, **options)
    assert not out.exists()
    kept = list((partial_folder(out) / "output").iterdir())
    assert 0 < len(kept) < len([name for name in expected if name.endswith(".safetensors")])
    times = {file.name: file.stat().st_mtime_ns for file in kept}
    with pytest.raises(DestinationError, match="other options"):
        quantize(source, out, "int8", resume=True, **options)
    quantize(source, out, recipe, resume=True, **options)
    assert tree(out) == expected
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    assert no_leftovers(tmp_path)
    assert quantize(source, out, recipe, resume=True, **options).already_complete


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A process that dies leaves nothing under the name, and a resume gives the bytes of an undisturbed run."""
    write_checkpoint(tmp_path / "source", RAW, geometry(blocks=3, experts=4))
    arguments: dict[str, Any] = {"source": str(tmp_path / "source"), "recipe": "int4", "max_shard_size": 60_000}
    quantize(**arguments, destination=tmp_path / "expected")
    expected = tree(tmp_path / "expected")
    died = 0
    for steps in (2, 15, 40, 75):
        out = tmp_path / f"out{steps}"
        script = (
            "import json, os, signal, sys\n"
            "from zaya_tools import quantize\n"
            "options, steps = json.loads(sys.argv[1]), int(sys.argv[2])\n"
            "left = [steps]\n"
            "def step(_):\n"
            "    left[0] -= 1\n"
            "    if left[0] == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
            "quantize(**options, advance=step)\n"
        )
        command = [sys.executable, "-c", script, json.dumps({**arguments, "destination": str(out)}), str(steps)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        died += done.returncode == -9
        assert not out.exists() or tree(out) == expected
        quantize(**arguments, destination=out, resume=True)
        assert tree(out) == expected
    assert died == 4


def test_a_full_disk_is_said_and_the_run_can_go_on(source: Path, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    options: dict[str, Any] = {"max_shard_size": 60_000}
    quantize(source, tmp_path / "expected", "fp8", **options)
    real, written = os.pwrite, 0

    def full(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 150_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    with patch.context() as inner:
        inner.setattr(os, "pwrite", full)
        with pytest.raises(DestinationError, match="disk is full") as caught:
            quantize(source, tmp_path / "out", "fp8", **options)
    assert "--resume" in (caught.value.hint or "")
    assert not (tmp_path / "out").exists()
    quantize(source, tmp_path / "out", "fp8", resume=True, **options)
    assert tree(tmp_path / "out") == tree(tmp_path / "expected")


def test_memory_grows_with_neither_model_nor_shard(tmp_path: Path) -> None:
    """Peak memory of a process over what its imports take: a few slabs, for a matrix a hundred times as large."""
    script = (
        "import json, sys\n"
        "from zaya_tools import quantize\n"
        "from zaya_tools.quantization import quantize as numerics, stream\n"
        "def peak(key):\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))\n"
        "quantize(sys.argv[1], sys.argv[3] + '-warm', sys.argv[4], workers=2)\n"
        "before = peak('VmRSS')\n"
        "quantize(sys.argv[2], sys.argv[3], sys.argv[4], workers=2)\n"
        "print(peak('VmHWM') - before)\n"
    )
    write_checkpoint(tmp_path / "warm", RAW, GEOMETRY)
    large = geometry(hidden_size=1024, expert_width=1024, experts=6, vocab_size=20_000)
    write_checkpoint(tmp_path / "large", RAW, large)
    size = sum(file.stat().st_size for file in (tmp_path / "large").iterdir())
    assert size > 110 * 2**20
    for recipe in ("fp8", "int4"):
        command = [sys.executable, "-c", script, *(str(tmp_path / name) for name in ("warm", "large", recipe)), recipe]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert int(done.stdout.splitlines()[-1]) < 80 * 2**20
