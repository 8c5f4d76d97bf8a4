"""What an optimizer beside the model costs `zaya convert`: run by hand, reported in the README.

    python -m tests.benchmarks.megatron --folder /some/disk/with/20GB --blocks 2 --rounds 3

A model with ZAYA1-8B's widths is saved twice: as a raw export, and as a trainer saves it, with an optimizer of six
times its bytes, by torch.save. Times are wall times of whole processes, in turns.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.convert import measure
from tests.benchmarks.support import generate, in_turns, widths
from tests.megatron import primus, save, trainer_args
from zaya_tools.checkpoint.source import open_source
from zaya_tools.layouts.raw import RAW
from zaya_tools.tensors import TensorInfo

_TYPES = {"BF16": torch.bfloat16}


def mapped(tensor: TensorInfo) -> Tensor:
    """A stored tensor without a copy: its file, mapped."""
    with tensor.file.open("rb") as stream:
        view = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(view, dtype=_TYPES[tensor.dtype], count=tensor.numel, offset=tensor.start).view(
        tensor.shape
    )


def as_trained(raw: Path, target: Path, blocks: int) -> int:
    """The raw export in `raw` as a trainer's iteration at `target`, with optimizer state; the file's bytes."""
    model = {primus(name): mapped(tensor) for name, tensor in open_source(raw).tensors.items()}
    holes = target.parent / "optimizer"
    with holes.open("wb") as stream:
        stream.truncate(4 * max(tensor.numel() for tensor in model.values()))
    state: dict[str, Any] = {}
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        for name, tensor in model.items():
            # Every one a storage of its own, all of the same hole in the disk.
            hole = torch.from_file(str(holes), shared=False, size=tensor.numel(), dtype=torch.float32)
            state[f"{kind}.{name}"] = hole.view(tensor.shape)
    file = target / "mp_rank_00" / "model_optim_rng.pt"
    save(file, {"args": trainer_args(widths(blocks)), "iteration": 100, "model": model, "optimizer": {"state": state}})
    return file.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=None, help="where to put about nine times the model")
    parser.add_argument("--blocks", type=int, default=2, help="2 blocks are 1.0 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds before each command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        raw, trained, target = Path(scratch) / "raw", Path(scratch) / "iter_0000100", Path(scratch) / "target"
        size = generate(raw, RAW, options.blocks)
        whole = as_trained(raw, trained, options.blocks)
        zaya = [sys.executable, "-m", "zaya_tools.cli.app", "convert"]
        commands = {
            f"raw export, {size / 1e9:.2f} GB": [*zaya, str(raw), str(target)],
            f"trainer's file, {whole / 1e9:.2f} GB": [*zaya, str(trained), str(target)],
            "back: raw export to a trainer's file": [*zaya, str(raw), str(target), "--to", "megatron"],
        }
        jobs = {name: partial(measure, command, target, options.pause) for name, command in commands.items()}
        found = in_turns(jobs, options.rounds)
    print("| | seconds | peak RSS, MB |\n|---|---|---|")
    for name, (wall, peak) in found.items():
        print(f"| {name} | {wall:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
