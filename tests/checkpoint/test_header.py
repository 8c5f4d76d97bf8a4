"""Headers: the safetensors library's files are read, it reads ours, and nothing damaged gets through."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from tests.checkpoint.support import entry, file_bytes
from tests.synthetic import TORCH
from zaya_tools.checkpoint.header import MAX_HEADER, Header, build_header, read_header
from zaya_tools.dtypes import SIZES
from zaya_tools.errors import SourceError

SHAPES = [(), (1,), (3, 5), (2, 1, 4), (0, 7)]


def fails(file: Path, content: bytes, message: str) -> SourceError:
    """The error for a file of this content, which names the file and matches `message`."""
    file.write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        read_header(file)
    assert file.name in caught.value.message
    return caught.value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", TORCH)
def test_reads_what_the_library_writes(file: Path, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{index}.é": torch.randint(0, 100, shape, generator=generator).to(TORCH[dtype])
        for index, shape in enumerate(SHAPES)
    }
    save_file(tensors, file, {"format": "pt", "note": "any"})
    header = read_header(file)
    assert header.size == file.stat().st_size
    assert {t.name: (t.dtype, t.shape) for t in header.tensors} == {
        name: (dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    content = file.read_bytes()
    for tensor in header.tensors:
        expected = tensors[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.nbytes else b""
        assert content[tensor.start : tensor.start + tensor.nbytes] == expected


def test_the_library_reads_what_is_written(file: Path) -> None:
    rows = [(f"{dtype}.{index}", dtype, shape) for dtype in TORCH for index, shape in enumerate(SHAPES)]
    header = build_header(rows)
    assert len(header) % 8 == 0
    size = sum(SIZES[dtype] * torch.Size(shape).numel() for _, dtype, shape in rows)
    file.write_bytes(header + bytes(range(256)) * (size // 256 + 1))
    os.truncate(file, len(header) + size)
    again = read_header(file)
    assert sorted((t.name, t.dtype, t.shape) for t in again.tensors) == sorted(rows)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == {name for name, _, _ in rows}
        content = file.read_bytes()
        for tensor in again.tensors:
            loaded = opened.get_tensor(tensor.name)
            assert (loaded.dtype, tuple(loaded.shape)) == (TORCH[tensor.dtype], tensor.shape)
            if tensor.nbytes:
                stored = content[tensor.start : tensor.start + tensor.nbytes]
                assert loaded.reshape(-1).view(torch.uint8).numpy().tobytes() == stored


@pytest.mark.parametrize("size", range(8))
def test_too_short_for_a_length(file: Path, size: int) -> None:
    assert fails(file, b"\x10" * size, f"{size} bytes long").hint == "download it again"


@pytest.mark.parametrize("length", [MAX_HEADER + 1, 2**40, 2**63, 2**64 - 1])
def test_absurd_length(file: Path, length: int) -> None:
    fails(file, length.to_bytes(8, "little") + b"{}", re.escape(f"a header of {length:,} bytes"))


def test_header_longer_than_the_file(file: Path) -> None:
    fails(file, (500).to_bytes(8, "little") + b"{}", "promises a header of 500 bytes, has 2 in all")


def test_git_lfs_pointer(file: Path) -> None:
    error = fails(file, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "Git LFS pointer")
    assert error.hint is not None
    assert "git lfs pull" in error.hint


def raw_header(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw


@pytest.mark.parametrize(
    "raw",
    [b"", b"   ", b"{", b"\xff\xfe", b'{"a": }', b"[" * 60_000, b'{"a":' * 60_000, b"\xef\xbb\xbf{}", b"1" * 5000],
    ids=["empty", "blank", "cut", "not utf-8", "no value", "deep list", "deep table", "byte order mark", "long number"],
)
def test_invalid_json(file: Path, raw: bytes) -> None:
    fails(file, raw_header(raw), "the header is not valid JSON")


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"text"', b"null"])
def test_json_that_is_no_table(file: Path, raw: bytes) -> None:
    fails(file, raw_header(raw), "not a JSON object")


@pytest.mark.parametrize("inside", [False, True])
def test_a_key_that_stands_twice(file: Path, inside: bool) -> None:
    tensor = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    raw = f'{{"a":{tensor},"b":{tensor},"a":{tensor}}}'
    if inside:
        raw = '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"dtype":"I8"}}'
    fails(file, raw_header(raw.encode()) + b"\0\0", f"the key '{'dtype' if inside else 'a'}' stands twice")


def test_a_late_double_key_among_many_is_found_at_once(file: Path) -> None:
    keys = [f'"{n}":0' for n in range(200_000)]
    fails(file, raw_header(("{" + ",".join([*keys, keys[-1]]) + "}").encode()), "stands twice")


@pytest.mark.parametrize("dtype", ["F4", "bfloat16", "", None, 3, [], {}, ["F32"]])
def test_unknown_dtype(file: Path, dtype: Any) -> None:
    fails(file, file_bytes({"a": entry([1], 0, 4, dtype)}, bytes(4)), "a has the unknown dtype")


BAD_NUMBERS: list[Any] = [-1, -4, 1.0, "4", None, True, [4], {}, 2**63, 10**4000]


@pytest.mark.parametrize("number", BAD_NUMBERS, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("where", ["shape", "start", "end"])
def test_numbers_that_are_none(file: Path, number: Any, where: str) -> None:
    values: dict[str, Any] = {"shape": [1], "start": 0, "end": 4, where: [number] if where == "shape" else number}
    fails(file, file_bytes({"a": entry(values["shape"], values["start"], values["end"])}, bytes(4)), "malformed shape")


@pytest.mark.parametrize("change", [{"shape": 4}, {"shape": None}, {"data_offsets": [0]}, {"data_offsets": [0, 4, 8]},
                                    {"data_offsets": 4}, {"shape": [1] * 1000}])  # fmt: skip
def test_malformed_lists(file: Path, change: dict[str, Any]) -> None:
    fails(file, file_bytes({"a": entry([1], 0, 4) | change}, bytes(4)), "malformed shape or offsets")


def test_a_product_beyond_all_files_is_an_error_not_a_long_computation(file: Path) -> None:
    huge = 2**63 - 1
    fails(file, file_bytes({"a": entry([huge] * 16, 0, 4)}, bytes(4)), "but its offsets span 4")


@pytest.mark.parametrize("tensor", [None, 3, [], "F32", {}])
def test_an_entry_that_is_no_tensor(file: Path, tensor: Any) -> None:
    fails(file, file_bytes({"a": tensor}), "a has")


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "\ud800", "a\0", "a\u202eb"])
def test_a_name_that_cannot_be_shown(file: Path, name: str) -> None:
    error = fails(file, file_bytes({name: entry([1], 0, 4)}, bytes(4)), "unprintable characters")
    assert error.message.isprintable()


@pytest.mark.parametrize(
    ("tensors", "size", "message"),
    [
        ({"a": (0, 4), "b": (2, 6)}, 6, "b overlaps the tensor before it"),
        ({"a": (0, 4), "b": (0, 4)}, 4, "overlaps the tensor before it"),
        ({"a": (0, 4), "b": (8, 12)}, 12, "b leaves a gap before it"),
        ({"a": (4, 8)}, 8, "a leaves a gap before it"),
        ({"a": (0, 4), "b": (4, 8)}, 9, "has 1 bytes after its last tensor"),
        ({"a": (0, 4), "b": (4, 8)}, 7, r"promises [\d,]+ bytes, has [\d,]+"),
        ({"a": (0, 4), "b": (4, 8)}, 0, r"promises [\d,]+ bytes, has [\d,]+"),
        ({"a": (0, 4_000_000_000)}, 8, r"promises 4,000,000,\d+ bytes, has"),
        ({}, 1, "has 1 bytes after its last tensor"),
    ],
)
def test_offsets(file: Path, tensors: dict[str, tuple[int, int]], size: int, message: str) -> None:
    entries = {name: entry([end - start], start, end, "U8") for name, (start, end) in tensors.items()}
    fails(file, file_bytes(entries, bytes(size)), message)


@pytest.mark.parametrize(("shape", "end"), [([2], 4), ([1], 8), ([2, 2], 8), ([0], 4), ([], 8)])
def test_shape_and_offsets_disagree(file: Path, shape: list[int], end: int) -> None:
    fails(file, file_bytes({"a": entry(shape, 0, end)}, bytes(end)), rf"but its offsets span {end}")


def test_offsets_that_run_backwards(file: Path) -> None:
    fails(file, file_bytes({"a": entry([1], 8, 4)}, bytes(8)), "its offsets span -4")


def test_cut_in_half_says_what_is_promised_and_what_is_there(file: Path) -> None:
    save_file({"a": torch.zeros(1000)}, file)
    whole = file.read_bytes()
    promised, cut = len(whole), len(whole) // 2
    error = fails(file, whole[:cut], re.escape(f"promises {promised:,} bytes, has {cut:,}"))
    assert error.hint is not None
    assert "download" in error.hint


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(SourceError, match=f"{name}.safetensors is not a file"):
            read_header(tmp_path / f"{name}.safetensors")
    with pytest.raises(SourceError, match=r"gone\.safetensors cannot be read: No such file"):
        read_header(tmp_path / "gone.safetensors")


def valid_file() -> bytes:
    raw = json.dumps({"__metadata__": {"format": "pt"}, "a": entry([2, 3], 0, 24), "b": entry([5], 24, 34, "BF16"),
                      "c": entry([], 34, 35, "U8")}).encode()  # fmt: skip
    return raw_header(raw) + bytes(35)


def header_or_error(file: Path) -> Header | None:
    """The header; None where reading it gives a SourceError that names the file. Any other exception gets out."""
    with pytest.raises(SourceError, match=re.escape(file.name)) if _damaged(file) else nullcontext():
        return read_header(file)
    return None


def _damaged(file: Path) -> bool:
    try:
        read_header(file)
    except SourceError:
        return True
    return False


VALID = valid_file()
HEADER = 8 + int.from_bytes(VALID[:8], "little")


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, len(VALID)),
    whole=st.booleans(),
)
def test_any_damage_is_a_source_error_or_harmless(
    file: Path, changes: list[tuple[int, int]], cut: int, whole: bool
) -> None:
    content = bytearray(VALID)
    for position, value in changes:
        content[position] = value
    file.write_bytes(content if whole else content[:cut])
    header = header_or_error(file)
    if header is None:
        return
    # What got through is consistent: the tensors fill the file from the header to its end.
    position = 8 + len(header.raw)
    for tensor in header.tensors:
        assert tensor.start == position
        assert tensor.nbytes == tensor.numel * SIZES[tensor.dtype]
        position += tensor.nbytes
    assert position == header.size == file.stat().st_size


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["a", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_source_error_or_a_header(file: Path, header: Any) -> None:
    file.write_bytes(raw_header(json.dumps(header).encode()))
    read = header_or_error(file)
    assert read is None or all(tensor.nbytes == 0 for tensor in read.tensors)
