"""Memory and speed of the block-by-block engine, beside transformers with the whole model in memory: run by hand.

    python -m tests.benchmarks.validate --folder /some/disk/with/12GB --blocks 8 --tokens 4096

A native checkpoint with ZAYA1-8B's widths and vocabulary is generated. Each engine runs in a process of its own and
gives the likelihood of the same random tokens; times are those of the forward pass, loading left out for
transformers and, since it streams, counted for ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from zaya_tools.architecture import Architecture, native_config
from zaya_tools.checkpoint.header import build_header
from zaya_tools.parameters import Role, parameters

OURS = """
import sys, time, torch
from pathlib import Path
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.windows import cut
from zaya_tools.model.weights import Weights
folder, dtype, tokens, context = Path(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ids = torch.randint(0, 262_272, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
start = time.perf_counter()
found = measure(Weights.open(folder, dtype=dtype), cut(ids, context))
seconds = time.perf_counter() - start
"""

THEIRS = """
import sys, time, torch
from pathlib import Path
from zaya_tools.evaluation.transformers_engine import load, perplexity
folder, dtype, tokens, context = Path(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ids = torch.randint(0, 262_272, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
model = load(folder, dtype)
start = time.perf_counter()
perplexity(model, ids, context, batch=1)
seconds = time.perf_counter() - start
"""

TAIL = """
import json
lines = open("/proc/self/status").read().splitlines()
peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
print(json.dumps({"seconds": seconds, "peak": peak}))
"""


def generate(folder: Path, blocks: int) -> tuple[int, int]:
    """A native checkpoint of random bfloat16 weights; (bytes of a block, bytes in all)."""
    a = Architecture(blocks, 2048, 8, 2, 128, 16, 2048, 256, vocab_size=262_272)
    random = np.random.default_rng(0)
    normal = random.standard_normal(1 << 22).astype(np.float32)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(native_config(a)))
    table = sorted(parameters(a), key=lambda parameter: not parameter.float32)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(build_header([(p.name, "F32" if p.float32 else "BF16", p.shape) for p in table]))
        for parameter in table:
            if parameter.role is Role.BALANCING:
                stream.write(np.append(np.zeros(a.experts), -1).astype(np.float32).tobytes())
                continue
            # Matrices of unit gain, vectors near one: activations stay of order one however deep the model is.
            near, scale = (0.0, parameter.shape[-1] ** -0.5) if len(parameter.shape) > 1 else (1.0, 0.02)
            if parameter.role is Role.ROUTER and len(parameter.shape) > 1:
                scale *= 4  # a router of unit gain sends everything to one expert
            bits = ((near + scale * normal).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            left = parameter.numel
            while left:
                taken = min(left, len(bits))
                stream.write(bits[:taken].tobytes())
                left -= taken
    block = sum(p.numel * (4 if p.float32 else 2) for p in table if p.block == 0)
    return block, (folder / "model.safetensors").stat().st_size


def run(program: str, folder: Path, dtype: str, tokens: int, context: int) -> dict[str, float]:
    command = [sys.executable, "-c", program + TAIL, str(folder), dtype, str(tokens), str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "model"
        block, size = generate(folder, options.blocks)
        print(f"{options.blocks} blocks of {block / 1e6:.0f} MB, {size / 1e9:.2f} GB, {options.tokens:,} tokens\n")
        print("| engine | dtype | tokens/s | peak RSS, MB |\n|---|---|---|---|")
        programs = {"zaya, block by block": OURS, "transformers, in memory": THEIRS}
        for dtype in ("float32", "bfloat16"):
            for name, program in programs.items() if options.peer else [("zaya, block by block", OURS)]:
                found = run(program, folder, dtype, options.tokens, options.context)
                print(f"| {name} | {dtype} | {options.tokens / found['seconds']:.0f} | {found['peak']:.0f} |")


if __name__ == "__main__":
    main()
