"""The native path: `kernels.c`, compiled once for this processor and kept in the user's cache folder.

Without a compiler, or where what it makes does not agree with the torch path to the last bit, the torch path is used.
ZAYA_KERNELS=torch forbids the native path, ZAYA_KERNELS=native insists on it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from zaya_tools.errors import ZayaError
from zaya_tools.quantization import kernels, reference, search
from zaya_tools.quantization.scheme import SCHEMES, Kind, Scheme

VARIABLE = "ZAYA_KERNELS"

_SOURCE = Path(__file__).with_name("kernels.c")
_PARTS = (_SOURCE, Path(__file__).with_name("numbers.h"))
_FLAGS = ("-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # compilers differ in which of the first two they know
_SECONDS = 120
_SEAL = hashlib.sha256().digest_size
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_KINDS = {kind: index for index, kind in enumerate((Kind.FLOAT8, Kind.INT8, Kind.INT4, Kind.MXFP4, Kind.NVFP4))}
_FINITE, _NOT_FINITE = 0, 1
_lock = threading.Lock()


class _Task(ctypes.Structure):
    """`Task` of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "group_rows", "group_columns")),
        *((name, ctypes.c_int32) for name in ("dtype", "kind", "search", "coarse", "fine")),
        *((name, ctypes.c_float) for name in ("global_scale", "span", "epsilon", "low", "high", "half_step")),
        *((name, ctypes.c_float) for name in ("smallest", "largest")),
        *((name, ctypes.POINTER(ctypes.c_float)) for name in ("coarse_factors", "fine_factors")),
        ("steps", ctypes.POINTER(ctypes.c_int32)),
    )


class BuildError(Exception):
    """There is no native path here; says why."""


def usable(values: Tensor) -> bool:
    """Whether the native path takes this tensor. ZayaError when it is wanted and cannot be had, or for a bad wish."""
    aligned = values.device.type == "cpu" and values.data_ptr() % values.element_size() == 0
    if not aligned or values.dtype not in _DTYPES or not values.is_contiguous():
        return False
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "torch", "native"):
        raise ZayaError(f"{VARIABLE} is '{wish}'", "set it to 'torch' or 'native', or leave it out")
    if wish == "torch":
        return False
    _, reason = _library()
    if reason and wish == "native":
        raise ZayaError(
            f"{VARIABLE}=native, but there is no native path: {reason}", "install a C compiler (gcc, clang)"
        )
    return not reason


def missing() -> str | None:
    """Why the slower torch path will be used on a CPU although nobody asked for it; None when it will not be."""
    if os.environ.get(VARIABLE, ""):
        return None
    return _library()[1] or None


def largest(values: Tensor) -> float:
    """The largest magnitude of a contiguous tensor; NaN where it holds one."""
    library, _ = _library()
    assert library is not None
    return float(library.zaya_largest(values.data_ptr(), values.numel(), _DTYPES[values.dtype]))


def quantize_rows(
    weight: Tensor, scheme: Scheme, *, mse: bool, whole: Tensor | None, codes: Tensor, scales: Tensor
) -> tuple[float, float, int] | None:
    """What `reference.quantize_rows` does, for contiguous tensors in main memory. Lets other threads run meanwhile."""
    library, _ = _library()
    assert library is not None
    return _run(library, weight, scheme, mse, whole, codes, scales)


def _run(
    library: ctypes.CDLL, weight: Tensor, scheme: Scheme, mse: bool, whole: Tensor | None, codes: Tensor, scales: Tensor
) -> tuple[float, float, int] | None:
    task = _Task.from_buffer_copy(_template(scheme, weight.dtype, mse))
    task.rows, task.columns = weight.shape
    task.group_rows = scheme.rows
    task.group_columns = scheme.columns or weight.shape[1]
    task.global_scale = whole.item() if whole is not None else 0.0
    sums = (ctypes.c_double * 3)()
    status = library.zaya_quantize(
        ctypes.byref(task), weight.data_ptr(), codes.data_ptr(), scales.data_ptr(), ctypes.byref(sums)
    )
    if status == _NOT_FINITE:
        return None
    if status != _FINITE:
        raise MemoryError
    return sums[0], sums[1], int(sums[2])


@cache
def _template(scheme: Scheme, dtype: torch.dtype, mse: bool) -> _Task:
    """What does not depend on the matrix. Its arrays stay alive with it, and it stays alive in the cache."""
    kind = scheme.kind
    low, high = kernels.LEVELS[kind]
    coarse, fine = search.COARSE.get(kind, ()), search.FINE.get(kind, ())
    steps = search.STEPS.get(kind, ())
    return _Task(
        dtype=_DTYPES[dtype], kind=_KINDS[kind], search=int(mse), coarse=len(coarse) or len(steps), fine=len(fine),
        span=kernels.SPAN.get(kind, 1.0), epsilon=torch.finfo(dtype).eps, low=low, high=high,
        half_step=kernels.HALF_STEP[kind], smallest=search.SMALLEST, largest=search.LARGEST,
        coarse_factors=(ctypes.c_float * len(coarse))(*coarse), fine_factors=(ctypes.c_float * len(fine))(*fine),
        steps=(ctypes.c_int32 * len(steps))(*steps),
    )  # fmt: skip


def _library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or why there is none."""
    with _lock:  # one build a process, whatever the number of threads
        return _built()


@cache
def _built() -> tuple[ctypes.CDLL | None, str]:
    try:
        try:
            return build(cache_folder()), ""
        except OSError:  # nowhere to keep it; what is loaded outlives its file
            with tempfile.TemporaryDirectory() as folder:
                return build(Path(folder)), ""
    except (BuildError, OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return None, " ".join(str(error).split())[:300]


def forget() -> None:
    """Look for the library anew, as after a change of the environment."""
    with _lock:
        _built.cache_clear()


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "zaya-tools"


def build(folder: Path) -> ctypes.CDLL:
    """The library from `folder`, compiled if it is not there. Safe with any number of processes at once.

    BuildError without a compiler, or when what it made is wrong; OSError when `folder` cannot be written.
    """
    compiler = _compiler()
    target = folder / f"kernels-{_key(compiler)}.so"
    if _sealed(target):
        return _load(target)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Compiled and tried under a name of its own, and renamed: nobody sees a file that is not whole.
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        made = Path(work) / target.name
        _compile(compiler, made)
        library = _load(made)
        _check(library)
        sealed = made.with_suffix(".sealed")
        code = made.read_bytes()
        sealed.write_bytes(code + hashlib.sha256(code).digest())
        sealed.replace(target)
    return library


def _sealed(file: Path) -> bool:
    """Whether a file is there and ends with the digest of the rest: loading a torn one would kill the process."""
    try:
        data = file.read_bytes()
    except OSError:
        return False
    return data[-_SEAL:] == hashlib.sha256(data[:-_SEAL]).digest()


def _compiler() -> Sequence[str]:
    wanted = os.environ.get("CC", "").split()
    for candidate in (wanted, ["cc"], ["gcc"], ["clang"]):
        if candidate and (found := shutil.which(candidate[0])):
            return [found, *candidate[1:]]
    raise BuildError("no C compiler (cc, gcc, clang or $CC) was found")


def _key(compiler: Sequence[str]) -> str:
    """Changes with all that the compiled code depends on: source, flags, compiler, processor."""
    version = _output([*compiler, "--version"])
    cpu = Path("/proc/cpuinfo")
    features = {
        line for line in (cpu.read_text("utf-8", "replace").splitlines() if cpu.exists() else ())
        if line.startswith(("model name", "flags", "Features", "CPU"))
    }  # fmt: skip
    sources = (part.read_text("utf-8") for part in _PARTS)
    parts = (*sources, str(_FLAGS), str(_TUNINGS), str(compiler), version, platform.machine(), *sorted(features))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _compile(compiler: Sequence[str], target: Path) -> None:
    reason = BuildError("")
    for tuning in _TUNINGS:
        try:
            _output([*compiler, *_FLAGS, *tuning, str(_SOURCE), "-o", str(target)])
        except BuildError as error:
            if isinstance(error.__cause__, subprocess.TimeoutExpired):
                raise
            reason = error
        else:
            return
    raise reason


def _load(file: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(file))
    pointer = ctypes.c_void_p
    library.zaya_quantize.argtypes = (ctypes.POINTER(_Task), pointer, pointer, pointer, pointer)
    library.zaya_quantize.restype = ctypes.c_int
    library.zaya_largest.argtypes = (pointer, ctypes.c_int64, ctypes.c_int32)
    library.zaya_largest.restype = ctypes.c_float
    return library


def _check(library: ctypes.CDLL) -> None:
    """BuildError unless the library agrees with the torch path on a small matrix, for every scheme and dtype."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(130, 256, generator=generator) * torch.logspace(-44, 38, 130)[:, None]
    for dtype in _DTYPES:
        most = torch.finfo(dtype).max
        weight = sample.clamp(-most, most).to(dtype)
        for scheme in SCHEMES.values():
            for mse in (False, True):
                results = []
                for native in (False, True):
                    codes = torch.empty(130, 256 // (2 if scheme.packed else 1), dtype=torch.uint8)
                    narrow = torch.uint8 if scheme.kind is Kind.MXFP4 else kernels.FLOAT8
                    stored = narrow if scheme.kind in search.STEPS else dtype
                    grid = (-(-130 // scheme.rows), scheme.groups(256))
                    scales = torch.empty(grid, dtype=stored)
                    whole = torch.tensor([2.5]) if scheme.kind is Kind.NVFP4 else None
                    if native:
                        _run(library, weight, scheme, mse, whole, codes, scales)
                    else:
                        reference.quantize_rows(weight, scheme, mse=mse, whole=whole, codes=codes, scales=scales)
                    results.append((codes, scales.view(torch.uint8)))
                if not all(torch.equal(mine, other) for mine, other in zip(*results, strict=True)):
                    raise BuildError(f"the compiled kernels differ from torch's for {scheme.name} in {dtype}")
