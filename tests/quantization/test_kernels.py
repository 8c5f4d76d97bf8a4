"""The two paths against each other, rounding against tables, and everything that compiling can come to."""

from __future__ import annotations

import multiprocessing
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import ceil
from pathlib import Path
from time import perf_counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.quantization.library import DTYPES
from zaya_tools.errors import ZayaError
from zaya_tools.quantization import native, reference
from zaya_tools.quantization.kernels import grouped, nearest, ungrouped
from zaya_tools.quantization.quantize import quantize
from zaya_tools.quantization.scheme import OBSERVERS, SCHEMES, Kind, Scheme

Found = tuple[Tensor, Tensor, tuple[float, float, int] | None]

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler here"
)


def run(path: Callable[..., tuple[float, float, int] | None], weight: Tensor, scheme: Scheme, mse: bool) -> Found:
    """Codes, scales (bytes both) and sums of one path."""
    rows, columns = weight.shape
    codes = torch.full((rows, ceil(columns * scheme.bits / 8)), 0xAA, dtype=torch.uint8)
    coded = {Kind.MXFP4: torch.uint8, Kind.NVFP4: torch.float8_e4m3fn}
    scales = torch.zeros(ceil(rows / scheme.rows), scheme.groups(columns), dtype=coded.get(scheme.kind, weight.dtype))
    whole = torch.tensor([3.0]) if scheme.kind is Kind.NVFP4 else None
    sums = path(weight, scheme, mse=mse, whole=whole, codes=codes, scales=scales)
    return codes, scales.view(torch.uint8), sums


@st.composite
def weights(draw: st.DrawFn, scheme: Scheme) -> Tensor:
    """Anything finite: rows of any magnitude, ties, zeros of both signs, single huge and single tiny elements."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    if scheme.rows == 1 and scheme.columns:
        columns = scheme.columns * draw(st.integers(1, 6))
    else:
        columns = draw(st.integers(1, 300))
    rows = draw(st.integers(1, 260 if scheme.rows > 1 else 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        weight = (4 * weight).round() / 2
    lowest, highest = draw(st.sampled_from([(0, 0), (-3, 3), (-45, 38), (-41, -36), (36, 38)]))
    exponents = lowest + (highest - lowest) * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    weight *= 10**exponents
    for value in draw(st.lists(st.sampled_from([0.0, -0.0, 1e-8, -1e-45, 448.0, -6e4, 1e38]), max_size=4)):
        weight.view(-1)[draw(st.integers(0, weight.numel() - 1))] = value
    if draw(st.booleans()):
        weight[draw(st.integers(0, rows - 1))] = draw(st.sampled_from([0.0, -0.0, 3.0]))
    most = torch.finfo(dtype).max
    return weight.clamp(-most, most).to(dtype)


@needs_compiler
@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), mse=st.booleans())
def test_both_paths_agree_to_the_last_bit(name: str, data: st.DataObject, mse: bool) -> None:
    scheme = SCHEMES[name]
    weight = data.draw(weights(scheme))
    codes, scales, sums = run(reference.quantize_rows, weight, scheme, mse)
    other_codes, other_scales, other_sums = run(native.quantize_rows, weight, scheme, mse)
    assert torch.equal(scales, other_scales)
    assert torch.equal(codes, other_codes)
    assert sums is not None
    assert other_sums is not None
    # In the native path a stored number times its scale is rounded to float32, as in a kernel.
    error, norm = sums[:2]
    assert other_sums[0] == pytest.approx(error, rel=1e-5, abs=3e-7 * (error * norm) ** 0.5 + 1e-12 * norm)
    assert other_sums[1] == pytest.approx(norm, rel=1e-5)
    assert other_sums[2] == sums[2]


@needs_compiler
@pytest.mark.parametrize("name", SCHEMES)
def test_threads_do_not_disturb_each_other(name: str) -> None:
    slabs = [torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(8)]
    alone = [quantize(slab, SCHEMES[name], "mse", amax=5.0) for slab in slabs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda slab: quantize(slab, SCHEMES[name], "mse", amax=5.0), slabs * 3))
    for mine, other in zip(together, alone * 3, strict=True):
        assert mine.facts == other.facts
        for suffix, tensor in mine.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), other.tensors[suffix].view(torch.uint8))


@needs_compiler
def test_other_threads_run_meanwhile() -> None:
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).bfloat16()
    scheme = SCHEMES["int4-g32"]
    codes, scales = torch.empty(1024, 1024, dtype=torch.uint8), torch.empty(1024, 64, dtype=torch.bfloat16)
    native.usable(weight)  # compiled before the clock runs
    turns = [perf_counter()]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(native.quantize_rows, weight, scheme, mse=True, whole=None, codes=codes, scales=scales)
        while not done.done():
            turns.append(perf_counter())
    gaps = [after - before for before, after in pairwise(turns)]
    assert max(gaps) < 0.7 * (turns[-1] - turns[0])  # with the lock held, all of it would be one gap


def test_eight_bit_floats_round_like_torchs() -> None:
    values = torch.cat((torch.linspace(-460, 460, 200_001), torch.linspace(-0.05, 0.05, 200_001)))
    assert torch.equal(nearest(values.clone(), Kind.FLOAT8), values.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_four_bit_floats_round_like_the_librarys() -> None:
    from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA

    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = torch.cat((ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)))
    values = torch.cat((torch.linspace(-7, 7, 100_001), near, -near))
    theirs = FP4_E2M1_DATA.cast_to_fp4(values.clamp(-6, 6))
    for kind in (Kind.MXFP4, Kind.NVFP4):
        assert torch.equal(nearest(values.clone(), kind), theirs)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(sorted(SCHEMES)), rows=st.integers(1, 300), width=st.integers(1, 5))
def test_groups_come_back_in_place(name: str, rows: int, width: int) -> None:
    scheme = SCHEMES[name]
    columns = (scheme.columns or 7) * width - (scheme.rows > 1)
    weight = torch.arange(1.0, rows * columns + 1).view(rows, columns)
    groups = grouped(weight, scheme)
    assert groups.shape[0] == ceil(rows / scheme.rows) * scheme.groups(columns)
    assert groups.sum(dtype=torch.float64) == weight.sum(dtype=torch.float64)
    assert torch.equal(ungrouped(groups, scheme, rows, columns), weight)


def test_the_torch_path_does_not_care_for_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    for scheme in SCHEMES.values():
        whole = run(reference.quantize_rows, weight, scheme, mse=False)
        monkeypatch.setattr(reference, "BLOCK", 1)
        parts = run(reference.quantize_rows, weight, scheme, mse=False)
        monkeypatch.undo()
        assert torch.equal(whole[0], parts[0])
        assert torch.equal(whole[1], parts[1])


# ---- compiling ----


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that was compiled and checked before."""
    monkeypatch.delenv("CC", raising=False)
    native.build(native.cache_folder())
    return max(native.cache_folder().glob("kernels-*.so"), key=lambda file: file.stat().st_mtime)


def compiler(folder: Path, action: str) -> Path:
    """A compiler that answers --version and otherwise does `action`, with $out as what it was asked to make."""
    script = folder / "fakecc"
    script.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo fake 1.0; exit 0; fi
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then out=$2; fi; case $1 in *.c) source=$1;; esac; shift; done
out=${{out:-$1}}
echo run >> {folder}/runs
{action}
""")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a process that has not looked for the library yet."""
    native.forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ZAYA_KERNELS", raising=False)
    return tmp_path / "cache" / "zaya-tools"


@pytest.fixture(autouse=True)
def _forget_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    native.forget()


WEIGHT = torch.linspace(-1, 1, 4 * 128).view(4, 128)


@needs_compiler
def test_compiled_once_and_kept(compiled: Path, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, f'cp {compiled} "$out"')))
    for _ in range(3):
        native.forget()
        assert native.usable(WEIGHT)
    assert (tmp_path / "runs").read_text().split() == ["run"]
    assert [file.suffix for file in fresh.iterdir()] == [".so"]


@needs_compiler
def test_a_damaged_file_is_made_again(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, f'cp {compiled} "$out"')))
    native.build(tmp_path / "sound")
    (sound,) = (tmp_path / "sound").iterdir()
    damaged = tmp_path / "damaged" / sound.name
    damaged.parent.mkdir()
    code = sound.read_bytes()
    for harm in (b"", code[:1000], code[:5000] + bytes(len(code) - 5000)):
        damaged.write_bytes(harm)
        native.build(damaged.parent)
        assert damaged.read_bytes()[:-32] == compiled.read_bytes()


@needs_compiler
def test_another_compiler_compiles_again(
    compiled: Path, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flag in ("", " -DOTHER"):
        native.forget()
        monkeypatch.setenv("CC", str(compiler(tmp_path, f'cp {compiled} "$out"')) + flag)
        assert native.usable(WEIGHT)
    assert len(list(fresh.glob("*.so"))) == 2


def _build(folder: Path) -> bool:
    return native.build(folder) is not None


@needs_compiler
def test_many_processes_at_once(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, f'sleep 0.2; cp {compiled} "$out"')))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert all(pool.map(_build, [tmp_path / "cache"] * 4))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_without_a_compiler_torch_does_it(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not native.usable(WEIGHT)
    assert quantize(WEIGHT, SCHEMES["int4"], "mse").finite
    monkeypatch.setenv("ZAYA_KERNELS", "native")
    with pytest.raises(ZayaError, match="there is no native path: no C compiler"):
        quantize(WEIGHT, SCHEMES["int4"], "mse")


def test_a_compiler_that_fails_is_quoted(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, "echo 'cannot find -lc' >&2; exit 1")))
    assert not native.usable(WEIGHT)
    assert len((tmp_path / "runs").read_text().split()) == 3  # with each way to name the processor
    monkeypatch.setenv("ZAYA_KERNELS", "native")
    with pytest.raises(ZayaError, match="cannot find -lc"):
        native.usable(WEIGHT)
    assert not list(fresh.iterdir())


@needs_compiler
def test_kernels_that_compute_something_else_are_not_used(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = next(found for found in map(shutil.which, ("cc", "gcc", "clang")) if found)
    header = Path(native.__file__).with_name("numbers.h").read_text()
    (tmp_path / "numbers.h").write_text(header.replace("448.0f", "400.0f"))
    action = f'cp "$source" {tmp_path}/wrong.c; {real} -shared -fPIC -o "$out" {tmp_path}/wrong.c'
    monkeypatch.setenv("CC", str(compiler(tmp_path, action)))
    monkeypatch.setenv("ZAYA_KERNELS", "native")
    with pytest.raises(ZayaError, match="differ from torch's for fp8"):
        native.usable(WEIGHT)
    assert not list(fresh.iterdir())


@needs_compiler
def test_a_cache_that_cannot_be_written(
    compiled: Path, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.parent.mkdir()
    fresh.write_text("a file where a folder should be")
    monkeypatch.setenv("CC", str(compiler(tmp_path, f'cp {compiled} "$out"')))
    monkeypatch.setenv("ZAYA_KERNELS", "native")
    assert native.usable(WEIGHT)
    assert quantize(WEIGHT, SCHEMES["fp8"], "minmax").finite


def test_a_wish_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZAYA_KERNELS", "fast")
    with pytest.raises(ZayaError, match="ZAYA_KERNELS is 'fast'"):
        quantize(WEIGHT, SCHEMES["fp8"], "minmax")


@needs_compiler
def test_torch_when_torch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZAYA_KERNELS", "torch")
    assert not native.usable(WEIGHT)
    monkeypatch.setenv("ZAYA_KERNELS", "native")
    assert native.usable(WEIGHT)
    assert not native.usable(WEIGHT.t())
    assert not native.usable(WEIGHT.to("meta"))
    for observer in OBSERVERS:
        assert quantize(WEIGHT, SCHEMES["fp8"], observer).finite


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.cache_folder() == tmp_path / "zaya-tools"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert native.cache_folder() == Path.home() / ".cache" / "zaya-tools"
