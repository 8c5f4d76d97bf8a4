"""What the benchmarks share: checkpoints with ZAYA1-8B's widths, and tables of medians."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.synthetic import config_of
from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.header import build_header
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import parameters


def widths(blocks: int, vocab_size: int = 32_768) -> Architecture:
    """ZAYA1-8B with another number of blocks and a smaller vocabulary."""
    return Architecture(blocks, 2048, 8, 2, 128, 16, 2048, 256, vocab_size=vocab_size)


def generate(folder: Path, layout: Layout, blocks: int, shards: int = 2) -> int:
    """A checkpoint of normal bfloat16 numbers in so many files; returns the bytes of its tensors.

    Hashing and scanning cost the same for any finite values, so one pool of them serves all tensors.
    """
    a = widths(blocks)
    parts = [
        (part, "F32" if parameter.float32 and layout is not RAW else "BF16")
        for parameter in parameters(a)
        for part in layout.parts(parameter, a)
    ]
    random = np.random.default_rng(0)
    pool = ((random.standard_normal(1 << 23).astype(np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    each = -(-len(parts) // shards)
    for number in range(shards):
        group = sorted(parts[number * each : (number + 1) * each], key=lambda entry: entry[1] != "F32")
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        with (folder / name).open("wb") as stream:
            stream.write(build_header([(part.name, dtype, part.shape) for part, dtype in group]))
            for part, dtype in group:
                weight_map[part.name] = name
                # Two bfloat16 numbers are one finite float32 number.
                left = int(np.prod(part.shape)) * (2 if dtype == "F32" else 1)
                total += 2 * left
                while left:
                    start = int(random.integers(0, 4096))
                    taken = min(left, len(pool) - start)
                    stream.write(pool[start : start + taken].tobytes())
                    left -= taken
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_of(layout, a)))
    return total


Job = Callable[[], tuple[float, float]]
"""Does something once; (seconds, peak RSS in MB)."""


def in_turns(jobs: Mapping[str, Job], rounds: int) -> dict[str, tuple[float, float]]:
    """(median of the seconds, largest peak) by name, of jobs that take turns."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for number in range(rounds + 1):
        for name, job in jobs.items():
            result = job()
            if number:  # the first round touches memory and disk for the first time
                runs[name].append(result)
    return {
        name: (statistics.median(run[0] for run in found), max(run[1] for run in found)) for name, found in runs.items()
    }
