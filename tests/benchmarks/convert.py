"""How fast `zaya convert` is beside `cp -r`, and how much memory it takes: run by hand, reported in the README.

    python -m tests.benchmarks.convert --folder /some/disk/with/20GB --blocks 10 --rounds 5

A checkpoint with ZAYA1-8B's widths is generated, then copied, converted, and converted the way a transformers
script does it (load everything, stack the experts, save_file), in turns. Times are wall times of whole processes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks.support import generate, in_turns
from zaya_tools.layouts.raw import RAW

PEER = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from zaya_tools.checkpoint.source import open_source
from zaya_tools.layouts.match import match
source, target = map(Path, sys.argv[1:])
found = match((opened := open_source(source)).tensors, opened.config)
tensors = {}
for file in sorted(source.glob("*.safetensors")):
    tensors |= load_file(file)
state = {}
for name, parts in found.bound.items():
    held = [tensors.pop(part.part.name) for part in parts]
    state[name] = torch.stack(held) if len(held) > 1 else held[0]
target.mkdir()
save_file(state, target / "model.safetensors", metadata={"format": "pt"})
"""


def measure(command: Sequence[str], target: Path, pause: float) -> tuple[float, float]:
    """(wall seconds, peak RSS in MB) of a command that writes `target`, which is removed before and after.

    Virtual disks lend bandwidth and take it back: a pause before each command lets every one begin with the same.
    """
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    time.sleep(pause)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    # Not ru_maxrss: it also counts this process's memory, which the child shares until it runs its program.
    while process.poll() is None:
        peak = max(peak, _peak_rss(process.pid))
        time.sleep(0.01)
    wall = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed with status {process.returncode}")
    shutil.rmtree(target)
    return wall, peak / 1024


def _peak_rss(pid: int) -> int:
    """VmHWM of a running process in KB, 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=None, help="where to put about three times the checkpoint")
    parser.add_argument("--blocks", type=int, default=10, help="10 blocks are 4.3 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds before each command")
    parser.add_argument(
        "--peer", action=argparse.BooleanOptionalAction, default=True, help="needs twice the bytes in RAM"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source, half, target = Path(scratch) / "source", Path(scratch) / "half", Path(scratch) / "target"
        size = generate(source, RAW, options.blocks)
        generate(half, RAW, options.blocks // 2)
        zaya = [sys.executable, "-m", "zaya_tools.cli.app", "convert"]
        commands = {
            "cp -r": ["cp", "-r", str(source), str(target)],
            "cp -r, then sync": ["sh", "-c", f"cp -r '{source}' '{target}' && sync -f '{target}'"],
            "zaya convert": [*zaya, str(source), str(target)],
            "zaya convert, half the size": [*zaya, str(half), str(target)],
            "load, stack, save_file": [sys.executable, "-c", PEER, str(source), str(target)],
        }
        if not options.peer:
            del commands["load, stack, save_file"]
        jobs = {name: partial(measure, command, target, options.pause) for name, command in commands.items()}
        found = in_turns(jobs, options.rounds)
    floor = found["cp -r"][0]
    print(f"{size / 1e9:.2f} GB, {options.rounds} rounds, medians\n")
    print("| | seconds | of cp -r | peak RSS, MB |\n|---|---|---|---|")
    for name, (wall, peak) in found.items():
        print(f"| {name} | {wall:.2f} | {wall / floor:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
