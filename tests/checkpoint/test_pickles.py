"""Pickles from strangers: what is harmless is read, everything else is refused by name, and nothing ever runs."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import pickletools
import subprocess
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.support import tree
from tests.megatron import save, trainer_args, trainer_modules, trainer_state, write_distributed, write_ranks
from tests.synthetic import small
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.inspection import inspect
from zaya_tools.checkpoint.pickles import Record, read_pickle
from zaya_tools.checkpoint.source import read_bytes
from zaya_tools.checkpoint.torchfile import read_torch_file
from zaya_tools.errors import SourceError

MARKER = "ZAYA_TEST_MARKER"


class Reduce:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.parts = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.parts


def touch(marker: Path) -> str:
    return f"touch {marker}"


GADGETS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "os.system": (lambda m: Reduce(os.system, touch(m)), "posix.system"),
    "subprocess.Popen": (lambda m: Reduce(subprocess.Popen, ["touch", str(m)]), "subprocess.Popen"),
    "eval": (lambda m: Reduce(eval, f"open({str(m)!r}, 'w')"), "builtins.eval"),
    "exec": (lambda m: Reduce(exec, f"open({str(m)!r}, 'w')"), "builtins.exec"),
    "getattr": (lambda m: Reduce(getattr, Reduce(__import__, "os"), "system"), "builtins.getattr"),
    "open": (lambda m: Reduce(open, str(m), "w"), "io.open"),
    "pickle.loads": (lambda m: Reduce(pickle.loads, pickle.dumps(Reduce(os.system, touch(m)))), "pickle.loads"),
    "torch.load": (lambda m: Reduce(torch.load, str(m)), "torch.serialization.load"),
    "torch storage": (lambda m: Reduce(torch.storage._load_from_bytes, b"x"), "torch.storage._load_from_bytes"),
    "numpy.load": (lambda m: Reduce(np.load, str(m), None, True), "numpy"),
    "a class with side effects": (lambda m: Reduce(zipfile.ZipFile, str(m), "w"), "zipfile.ZipFile"),
    "inside a state": (lambda m: Reduce(argparse.Namespace, state={"a": Reduce(os.system, touch(m))}), "posix.system"),
    "inside a dict that is kept": (
        lambda m: Reduce(defaultdict, Reduce(os.system, touch(m))),
        "posix.system",
    ),
}


@pytest.mark.parametrize("gadget", GADGETS)
@pytest.mark.parametrize("place", ["args", "model", "optimizer", "root"])
def test_what_would_run_is_refused_by_name(tmp_path: Path, gadget: str, place: str) -> None:
    make, name = GADGETS[gadget]
    marker = tmp_path / MARKER
    a = small()
    bomb = make(marker)
    state: Any = {"args": trainer_args(a), "iteration": 1, "model": trainer_state(a), "optimizer": {}}
    if place == "args":
        state["args"].bomb = bomb
    elif place == "root":
        state = bomb
    else:
        state[place] = {**state[place], "bomb": bomb}
    save(tmp_path / "run" / "mp_rank_00" / "model_optim_rng.pt", state)
    before = tree(tmp_path)
    for use in (lambda: convert(tmp_path / "run", tmp_path / "out"), lambda: inspect(tmp_path / "run")):
        with pytest.raises(SourceError, match="nothing in it was run") as caught:
            use()
        assert name in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.hint
    assert tree(tmp_path) == before
    assert not marker.exists()


def test_the_gadgets_do_run_where_pickles_are_trusted(tmp_path: Path) -> None:
    # Otherwise the tests above would prove nothing.
    ran = []
    for name, (make, _) in GADGETS.items():
        marker = tmp_path / MARKER
        try:
            value = pickle.loads(pickle.dumps(make(marker)))
            if isinstance(value, subprocess.Popen):
                value.wait()
            if hasattr(value, "close"):
                value.close()
        except Exception:  # some only work where their file exists
            continue
        if marker.exists():
            ran.append(name)
            marker.unlink()
    assert {"os.system", "subprocess.Popen", "eval", "exec", "open", "pickle.loads", "inside a state"} <= set(ran)


def test_distributed_metadata_and_chunks_are_no_way_in_either(tmp_path: Path) -> None:
    a = small(blocks=1)
    marker = tmp_path / MARKER
    for number, victim in enumerate((".metadata", "common.pt")):
        folder = tmp_path / f"{number}"
        write_distributed(folder, a)
        bomb = Reduce(os.system, touch(marker))
        if victim == ".metadata":
            (folder / victim).write_bytes(pickle.dumps(bomb))
        else:
            save(folder / victim, {"args": bomb})
        with pytest.raises(SourceError, match=r"posix\.system"):
            convert(folder, tmp_path / "out")
    folder = tmp_path / "chunk"
    write_distributed(folder, a)
    torch.save(Reduce(os.system, touch(marker)), folder / "__9_0.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "decoder.final_norm.weight")
    info = metadata.storage_data[index]
    info.relative_path, info.offset = "__9_0.distcp", 0
    info.length = (folder / "__9_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SourceError, match=r"posix\.system"):
        convert(folder, tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def program(*lines: bytes) -> bytes:
    return b"\x80\x04" + b"".join(lines) + b"."


def text(value: str) -> bytes:
    raw = value.encode()
    return b"\x8c" + bytes([len(raw)]) + raw


HAND_WRITTEN = {
    "an attribute of a known class": program(text("argparse"), text("Namespace.__init__.__globals__"), b"\x93"),
    "an attribute of a known function": program(text("torch._utils"), text("_rebuild_tensor_v2.__globals__"), b"\x93"),
    "a module through another": program(text("argparse"), text("_os.system"), b"\x93"),
    "the old instruction": b"(S'true'\nios\nsystem\n.",
    "an extension code": program(b"\x82\x01"),
    "our own reader": program(text("zaya_tools.checkpoint.pickles"), text("_Reader"), b"\x93"),
    "a storage that is none": program(text("torch"), text("os.system.Storage"), b"\x93", b")", b"R"),
    "state for a function": program(
        text("torch._utils"), text("_rebuild_tensor_v2"), b"\x93", b"}", text("_run"), b"K\x01", b"s", b"b"
    ),
    "state for a class": program(text("argparse"), text("Namespace"), b"\x93", b"}", b"b"),
    "slots of a class": program(text("argparse"), text("Namespace"), b"\x93", b"N}\x86", b"b"),
    "calling a number": program(b"K\x01", b")", b"R"),
    "nothing": b"",
    "no end": b"\x80\x04K\x01",
    "an empty stack": b"\x80\x04.",
    "a text that is longer than the file": b"\x80\x04\x8d" + (2**40).to_bytes(8, "little") + b"x.",
    "bytes that are longer than the file": b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x.",
    "a place in a table of gigabytes": program(b"K\x01r\xff\xff\xff\xff0"),
    "a persistent id": program(text("x"), b"Q"),
    "a persistent id of a storage without a type": program(b"(", text("storage"), b"K\x01" * 4, b"t", b"Q"),
}


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_hand_written_programs(case: str) -> None:
    with pytest.raises(SourceError) as caught:
        read_pickle(HAND_WRITTEN[case], "file.pt")
    assert caught.value.message.startswith("file.pt: the pickle ")
    assert caught.value.hint


def test_one_pickle_cannot_change_how_the_next_is_read() -> None:
    hostile = program(
        text("argparse"), text("Namespace"), b"\x93", b")\x81",
        b"}", text("fields"), text("torch.Size"), b"s", b"b",
    )  # fmt: skip
    assert isinstance(read_pickle(hostile, "x"), Record)
    honest = read_pickle(pickle.dumps(argparse.Namespace(a=1), 2), "x")
    assert honest.fields() == {"a": 1}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_pickles_are_read_or_refused(data: st.DataObject) -> None:
    state = {"args": argparse.Namespace(a=1, b=np.float64(2)), "s": {1, 2}, "o": OrderedDict(x=b"abc")}
    raw = bytearray(pickle.dumps(state, data.draw(st.sampled_from([2, 4, 5]))))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        read_pickle(bytes(raw), "x")
    except SourceError:
        return


def test_plain_values_arrive(tmp_path: Path) -> None:
    args = trainer_args(small(), more=[1, (2.5, None)], nested={"a": True}, name="zaya", state=argparse.Namespace(b=2))
    with trainer_modules():
        raw = pickle.dumps(args, 2)
    found = read_pickle(raw, "x").fields()
    assert found["layernorm_epsilon"] == 1e-5
    assert type(found["seed"]) is int
    assert (found["more"], found["nested"], found["name"]) == ([1, (2.5, None)], {"a": True}, "zaya")
    assert found["state"].fields() == {"b": 2}
    assert repr(found["model_type"]) == "<megatron.core.enums.ModelType>"
    assert "megatron" in raw.decode("latin1")


@pytest.mark.parametrize("number", [np.float32(1.5), np.float16(0.5), np.int8(-3), np.uint64(2**63), np.bool_(True)])
def test_numpy_numbers(number: Any) -> None:
    for protocol in (2, 4):
        found = read_pickle(pickle.dumps(number, protocol), "x")
        assert found == number.item()
        assert type(found) is type(number.item())


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn,
          torch.uint16, torch.float64]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (2, 1, 3)], ids=str)
def test_tensors_are_found_where_torch_put_them(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    whole = torch.randint(0, 100, (64,)).to(dtype)
    plain = torch.randint(0, 100, shape).to(dtype)
    state = {
        "plain": plain,
        "view": whole[8:32].view(4, 6),
        "same storage": whole[32:],
        "parameter": torch.nn.Parameter(plain, requires_grad=False),
    }
    torch.save(state, tmp_path / "x.pt")
    opened = read_torch_file(tmp_path / "x.pt")
    for name, tensor in state.items():
        info = opened.tensor(name, opened.values[name])
        assert info.shape == tuple(tensor.shape)
        data = torch.from_numpy(read_bytes(info))
        assert data.numel() == tensor.nbytes
        assert torch.equal(data, tensor.detach().contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 6).T, torch.zeros(4, 6)[:, :3], torch.zeros(3).expand(5, 3), torch.zeros(4, 4).diagonal()],
    ids=["transposed", "columns", "expanded", "diagonal"],
)
def test_views_with_strides_are_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save({"x": tensor}, tmp_path / "x.pt")
    opened = read_torch_file(tmp_path / "x.pt")
    with pytest.raises(SourceError, match=r"x is a view with strides .*not a tensor of its own") as caught:
        opened.tensor("x", opened.values["x"])
    assert "contiguous" in str(caught.value.hint)


def rezipped(source: Path, target: Path, *, compress: bool = False, skip: str = "", replace: Any = None) -> None:
    """A copy of a zip with something wrong in it."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            if skip and info.filename.endswith(skip):
                continue
            data = old.read(info)
            if replace and info.filename.endswith(replace[0]):
                data = replace[1]
            kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
            new.writestr(zipfile.ZipInfo(info.filename), data, kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": True}, "compressed"),
        ({"skip": "data.pkl"}, "without a data.pkl"),
        ({"skip": "data/0"}, "the data of x is missing"),
        ({"replace": ("data/0", b"short")}, "x needs 400 bytes, its record has 5"),
        ({"replace": ("byteorder", b"big")}, "big-endian"),
        ({"replace": ("data.pkl", b"junk")}, "the pickle is damaged"),
    ],
)
def test_zips_that_are_not_whole(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    torch.save({"x": torch.zeros(100)}, tmp_path / "good.pt")
    rezipped(tmp_path / "good.pt", tmp_path / "x.pt", **options)

    def read() -> None:
        opened = read_torch_file(tmp_path / "x.pt")
        opened.tensor("x", opened.values["x"])

    with pytest.raises(SourceError, match=message):
        read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a file of torch.save"),
        (b"junk", "not a file of torch.save"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(100), "not a whole zip file"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_torch_file(tmp_path / "x.pt")


def test_torchs_old_format_is_named(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(SourceError, match=r"old format of before 1\.6"):
        read_torch_file(tmp_path / "x.pt")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_damaged_files_are_read_or_refused(place: int, byte: int, cut: bool) -> None:
    import tempfile

    out = io.BytesIO()
    torch.save({"x": torch.zeros(10), "n": 3}, out)
    raw = bytearray(out.getvalue())
    raw[place % len(raw)] = byte
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.pt"
        file.write_bytes(bytes(raw[: place % len(raw)] if cut else raw))
        try:
            opened = read_torch_file(file)
            opened.tensor("x", opened.values["x"])
        except (SourceError, KeyError):
            return


def test_what_is_trusted_is_what_trainers_need() -> None:
    # The pickle of a real run names nothing else; a new name has to be looked at before it is let in.
    a = small()
    with trainer_modules():
        raw = pickle.dumps(trainer_args(a), 2)
    names = {arg for op, arg, _ in pickletools.genops(raw) if op.name == "GLOBAL"}
    assert names == {
        "argparse Namespace", "torch bfloat16", "megatron.core.enums ModelType", "pathlib PosixPath",
        "numpy._core.multiarray scalar", "numpy dtype", "_codecs encode",
    }  # fmt: skip


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    write_ranks(tmp_path / "run", small(), optimizer=False)
    (tmp_path / "run" / "mp_rank_00" / "model_optim_rng.pt").rename(tmp_path / "elsewhere")
    with pytest.raises(SourceError, match=r"mp_rank_00 has no model_optim_rng\.pt"):
        convert(tmp_path / "run", tmp_path / "out")
