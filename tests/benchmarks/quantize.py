"""How fast `zaya quantize` is beside llm-compressor's model_free_ptq and `cp`: run by hand, reported in the README.

    python -m tests.benchmarks.quantize --folder /some/disk/with/15GB --blocks 8 --rounds 3

A native checkpoint with ZAYA1-8B's widths is generated, experts one by one as model_free_ptq wants them, and quantized
by each in turns, to the same schemes. Imports are counted on neither side, everything else is: each runs in a process
of its own that says how long it took and how much memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.benchmarks.support import Job, generate, in_turns
from zaya_tools.layouts.native import NATIVE_PER_EXPERT

OURS = """
import sys, time
from pathlib import Path
import torch
from zaya_tools.quantization import native, stream
from zaya_tools.quantization.conversion import quantize
from zaya_tools.quantization.recipe import load_recipe
source, target, recipe = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
start = time.perf_counter()
quantize(source, target, recipe)
seconds = time.perf_counter() - start
"""

THEIRS = """
import sys, time
from llmcompressor import model_free_ptq
source, target, scheme = sys.argv[1:4]
ignore = ["lm_head", "re:.*embed_tokens", "re:.*mlp.gate.*", "re:.*conv_qk_.*", "re:.*norm.*", "re:.*residual_scale.*"]
start = time.perf_counter()
model_free_ptq(source, target, scheme=scheme, ignore=ignore, max_workers=2, device="cpu")
seconds = time.perf_counter() - start
"""

TAIL = """
import json
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
print("RESULT", json.dumps({"seconds": seconds, "peak": peak}))
"""

RECIPES = {
    "fp8": ("extends: fp8\n", "FP8_DYNAMIC"),
    "int4 minmax": ("extends: int4\nobserver: minmax\n", "W4A16"),
    "int4 mse": ("extends: int4\nobserver: mse\n", None),
}


def measure(script: str, *arguments: str) -> tuple[float, float]:
    """(seconds without imports, peak RSS in MB) of a script that writes its second argument, removed afterwards."""
    target = Path(arguments[1])
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", script + TAIL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    shutil.rmtree(target)
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    return found["seconds"], found["peak"]


def copy(source: Path, target: Path) -> tuple[float, float]:
    """(seconds, 0) of `cp -r`."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds, 0.0


def rested(job: Job, pause: float) -> tuple[float, float]:
    """A job's result, begun when the disk has nothing left to do."""
    os.sync()
    time.sleep(pause)
    return job()


def _jobs(root: Path, source: Path, large: Path, target: Path, peer: bool) -> dict[str, Job]:
    """What is measured, by name, in the order of a round."""
    jobs: dict[str, Job] = {"cp -r": partial(copy, source, target)}
    files = {}
    for name, (text, scheme) in RECIPES.items():
        file = root / f"{name.replace(' ', '-')}.yaml"
        file.write_text(f"name: {file.stem}\ndescription: Benchmark.\n{text}")
        files[name] = str(file)
        jobs[f"zaya quantize, {name}"] = partial(measure, OURS, str(source), str(target), str(file))
        if scheme and peer:
            jobs[f"model_free_ptq, {scheme}"] = partial(measure, THEIRS, str(source), str(target), scheme)
    jobs["zaya quantize, fp8, one file"] = partial(measure, OURS, str(large), str(target), files["fp8"])
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--folder", type=Path, default=None, help="where to put about three times the checkpoint")
    parser.add_argument("--blocks", type=int, default=8, help="8 blocks are 3.4 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before each run")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="run llm-compressor too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = Path(scratch)
        source, large, target = root / "source", root / "large", root / "target"
        size = generate(source, NATIVE_PER_EXPERT, options.blocks, shards=4)
        generate(large, NATIVE_PER_EXPERT, options.blocks, shards=1)
        jobs = _jobs(root, source, large, target, options.peer)
        found = in_turns({name: partial(rested, job, options.pause) for name, job in jobs.items()}, options.rounds)
    print(f"{size / 1e9:.2f} GB, {options.rounds} rounds, medians\n")
    print("| | seconds | GB/s of source | peak RSS, MB |\n|---|---|---|---|")
    for name, (wall, peak) in found.items():
        print(f"| {name} | {wall:.2f} | {size / wall / 1e9:.2f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
