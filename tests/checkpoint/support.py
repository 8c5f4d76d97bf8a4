"""What the tests of the engine share: folders as values, and small models, files and blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.synthetic import small, write_checkpoint
from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint import pump, shardfile
from zaya_tools.checkpoint import source as source_module
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.run import Converted
from zaya_tools.errors import DestinationError
from zaya_tools.layouts.raw import RAW

SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0"}\n',
    "tokenizer_config.json": b'{\r\n "a": 1 }',
    "generation_config.json": b"{}",
    "chat_template.jinja": "{{ bos }} é\n".encode(),
}
TRAINING_FILES = ("optimizer.pt", "pytorch_model.bin", "trainer_state.json", "rng_state.pth", "rng_state_0.pth")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included, by relative name."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def stamps(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, time of change and inode of everything below a folder."""
    entries = {str(entry.relative_to(folder)): entry.lstat() for entry in [folder, *folder.rglob("*")]}
    return {name: (status.st_size, status.st_mtime_ns, status.st_ino) for name, status in entries.items()}


def model(
    folder: Path, architecture: Architecture | None = None, *, sides: bool = True, **options: Any
) -> dict[str, Tensor]:
    """A raw checkpoint of `architecture` (default: a small one) with side files; its tensors by stored name."""
    tensors = write_checkpoint(folder, RAW, architecture or small(), **options)
    if sides:
        for name, content in SIDE_FILES.items():
            (folder / name).write_bytes(content)
    return tensors


def use_blocks(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make the engine work in blocks of `size` bytes, a multiple of 8; direct writes are off below a disk page."""
    monkeypatch.setattr(pump, "BLOCK", size)
    monkeypatch.setattr(source_module, "BLOCK", size)
    if size % shardfile.PAGE:
        monkeypatch.setattr(shardfile, "PAGE", 8)


def file_bytes(entries: Mapping[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file with this header, whatever it says."""
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(shape: list[Any], start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    """One tensor of a header, whatever it says."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ROOT = Path(__file__).parents[2]


def drive(**options: Any) -> subprocess.Popen[str]:
    """Start a conversion in a process of its own (see driver.py), and return when its imports are done."""
    paths = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    command = [sys.executable, "-m", "tests.checkpoint.driver", json.dumps(paths)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n", process.communicate()[1]
    return process


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, the rest of stdout, and stderr."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def one_line_and_hint(text: str) -> tuple[str, str]:
    """The message and the hint of an error as it is printed; fails when anything else is there."""
    error, hint = text.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    return error.removeprefix("error: "), hint.removeprefix("hint: ")


SHARDS: dict[str, Any] = {"max_shard_size": 12_000}
"""Options that cut the small model into shards enough to stop in between."""


def refused(message: str, source: Path, destination: Path, **options: Any) -> DestinationError:
    """The error that refuses a destination; nothing changes anywhere near it."""
    near = destination.parent if destination.parent.is_dir() else source.parent
    before, times = tree(near), stamps(near)
    with pytest.raises(DestinationError, match=message) as caught:
        convert(source, destination, **options)
    assert tree(near) == before
    now = stamps(near)
    del times["."], now["."]  # a hidden folder may have come and gone
    assert now == times
    return caught.value


def no_leftovers(folder: Path) -> bool:
    """Whether no hidden folder of ours is in a folder."""
    return not any(entry.name.startswith(".") for entry in folder.iterdir())


class Interrupted(NamedTuple):
    """A run that stopped after some shards: its source, its destination and its hidden folder."""

    source: Path
    out: Path
    hidden: Path


def interrupt(source: Path, out: Path, after: int = 3, **options: Any) -> Interrupted:
    """Stop a conversion while it writes shard `after` + 1."""
    done: list[int] = []

    def stop(_: int) -> None:
        done.append(1)
        if len(done) > after + 1:  # the first call reports what a resume finds
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, advance=stop, **{**SHARDS, **options})
    hidden = partial_folder(out)
    assert len(list((hidden / "output").iterdir())) >= after
    return Interrupted(source, out, hidden)


def resume(run: Interrupted, **options: Any) -> tuple[Converted, int]:
    """Resume; the result and the source bytes that were read this time."""
    counts: list[int] = []
    result = convert(run.source, run.out, resume=True, advance=counts.append, **{**SHARDS, **options})
    return result, sum(counts[1:])
