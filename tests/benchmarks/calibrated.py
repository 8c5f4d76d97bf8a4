"""Recipes that learn from inputs, beside llm-compressor's own output for the same scheme on the same data: run by hand.

    python -m tests.benchmarks.calibrated quality --tokens 30660
    python -m tests.benchmarks.calibrated cost --folder /some/disk/with/12GB --blocks 2 --samples 16

`quality` prints a table for the bundled checkpoint: ours, and the library's `oneshot` with its sequential pipeline, all
of them measured by the streaming engine in float32 on held-out text. `cost` prints seconds a block and peak memory on a
checkpoint with ZAYA1-8B's widths, each run in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.support import generate
from zaya_tools import calibrate, convert, quantize
from zaya_tools.calibration.data import Choice, sample
from zaya_tools.calibration.run import Settings
from zaya_tools.checkpoint.source import open_source
from zaya_tools.data import TINY
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.text import HELD_OUT, tokenize
from zaya_tools.evaluation.windows import Windows, cut
from zaya_tools.layouts.native import NATIVE
from zaya_tools.model.weights import Weights
from zaya_tools.quantization.auto import choose_recipe
from zaya_tools.quantization.calibrated import Calibration

IGNORED = ["lm_head", r"re:.*mlp\.gate\..*", r"re:.*conv_qk_.*"]
LIBRARY = {
    "fp8-static": "FP8", "int8-smooth": "smooth", "int4": "W4A16", "int4-awq": "awq", "int4-gptq": "gptq",
    "nvfp4": "NVFP4",
}  # fmt: skip
"""What llm-compressor calls it, by the recipe of ours that stores the same."""
ORDER = (
    "int8", "int8-smooth", "fp8", "fp8-static", "nvfp4a16", "nvfp4", "int4", "int4-imatrix", "int4-awq", "int4-gptq",
)  # fmt: skip
CHOICE = Choice(samples=64, context=512)


def library(name: str, source: Path, destination: Path, choice: Choice, tokenizer: Path, dtype: str) -> float:
    """Quantize a native checkpoint by `oneshot`; seconds that it took, loading and saving left out."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from transformers import PreTrainedTokenizerFast, ZayaForCausalLM

    # It wants to pin memory where there is no accelerator.
    IntermediatesCache._pin_intermediate = classmethod(lambda cls, intermediate: None)
    model = ZayaForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    ids = sample(choice, tokenizer, model.config.vocab_size).ids
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    special = {f"{kind}_token": f"<{kind}>" for kind in ("bos", "eos", "pad")}
    start = time.perf_counter()
    oneshot(
        model=model, tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"), **special),
        dataset=data, recipe=_modifiers(name, model.config.num_experts), max_seq_length=choice.context,
        num_calibration_samples=len(ids), pipeline="sequential",
    )  # fmt: skip
    seconds = time.perf_counter() - start
    model.save_pretrained(destination, save_compressed=True)
    return seconds


def _modifiers(name: str, experts: int) -> Any:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    def plain(scheme: str) -> Any:
        return QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=IGNORED)

    projections = r"re:.*self_attn\.qkv_proj\.(q_proj|k_proj|v_proj_current|v_proj_delayed)$"
    pairs = [(r"re:.*input_layernorm$", projections)]
    pairs += [(rf"re:.*experts\.{e}\.up_proj$", rf"re:.*experts\.{e}\.down_proj$") for e in range(experts)]
    if name == "gptq":
        return GPTQModifier(targets=["Linear"], scheme="W4A16", ignore=IGNORED)
    if name == "awq":
        mappings = [{"smooth_layer": first, "balance_layers": [second]} for first, second in pairs]
        return [AWQModifier(mappings=mappings), plain("W4A16")]
    if name == "smooth":
        return [SmoothQuantModifier(mappings=[[[second], first] for first, second in pairs]), plain("W8A8")]
    return plain(name)


def _row(label: str, folder: Path, windows: Windows) -> str:
    found = measure(Weights.open(folder), windows, Weights.open(TINY)).divergence
    assert found is not None
    size = open_source(folder).nbytes
    return (
        f"| {label} | {size:,} | {found.ratio.value:.4f} | {found.kl.value:.5f} +- {found.kl.error:.5f} "
        f"| {found.top1.value:.2%} |"
    )


def quality(tokens: int) -> None:
    """Print the table for the bundled checkpoint."""
    windows = cut(tokenize(TINY, HELD_OUT, tokens), 512)
    print("| recipe | bytes | perplexity ratio | mean KL | same top token |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        convert(TINY, folder / "native")
        file = calibrate(TINY, folder / "statistics", Settings(CHOICE)).file
        given = Calibration(statistics=file, choice=CHOICE)
        sizes = {}
        for name in ORDER:
            quantize(TINY, folder / name, name, calibration=given)
            sizes[name] = open_source(folder / name).nbytes
            print(_row(f"`{name}`", folder / name, windows), flush=True)
            if name in LIBRARY:
                library(LIBRARY[name], folder / "native", folder / f"{name}-library", CHOICE, TINY, "float32")
                label = f"llm-compressor, {LIBRARY[name]}"
                print(_row(label, folder / f"{name}-library", windows), flush=True)
        for size in (sizes["int4"], sizes["nvfp4a16"], 1_500_000, 1_800_000, sizes["fp8"]):
            auto = choose_recipe(TINY, folder / "auto", given, size=size, force=True)
            quantize(TINY, folder / "auto", auto.recipe, calibration=given, force=True)
            print(_row(f"`auto --target-size {size}`", folder / "auto", windows), flush=True)


def worker(task: str, folder: Path, samples: int, context: int) -> None:
    """One measured run; prints seconds and peak memory as JSON."""
    choice = Choice(samples=samples, context=context)
    stats, out = folder / "statistics", folder / f"out-{task}"
    start = time.perf_counter()
    if task == "calibrate":
        calibrate(folder / "model", stats, Settings(choice, tokenizer=str(TINY)), force=True)
    elif task == "oneshot gptq":
        library("gptq", folder / "model", out, choice, TINY, "bfloat16")
    else:
        given = Calibration(statistics=stats, choice=choice, tokenizer=str(TINY))
        quantize(folder / "model", out, task, calibration=given, force=True)
    seconds = time.perf_counter() - start
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    print(json.dumps({"seconds": seconds, "peak": peak}))


def cost(folder: Path, blocks: int, samples: int, context: int, tasks: list[str]) -> None:
    """Print seconds a block and peak memory at ZAYA1-8B's widths."""
    if not (folder / "model").exists():
        size = generate(folder / "model", NATIVE, blocks)
        print(f"{blocks} blocks, {size / 1e9:.2f} GB; {samples} sequences of {context} tokens")
    print("| run | seconds a block | peak memory, MB |\n|---|---|---|")
    for task in tasks:
        command = [sys.executable, "-m", "tests.benchmarks.calibrated", "worker", "--folder", str(folder),
                   "--task", task, "--samples", str(samples), "--context", str(context)]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
        print(f"| {task} | {found['seconds'] / blocks:.1f} | {found['peak']:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["quality", "cost", "worker"])
    parser.add_argument("--tokens", type=int, default=30_660)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--task", default="")
    parser.add_argument("--tasks", nargs="*", default=["calibrate", "int4-imatrix", "int4-gptq", "oneshot gptq"])
    options = parser.parse_args()
    if options.what == "quality":
        quality(options.tokens)
    elif options.what == "worker":
        worker(options.task, options.folder, options.samples, options.context)
    else:
        cost(options.folder, options.blocks, options.samples, options.context, options.tasks)


if __name__ == "__main__":
    main()
