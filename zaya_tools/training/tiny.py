"""Train the bundled tiny ZAYA1 and write it as a raw checkpoint.

python -m zaya_tools.training.tiny --out DIR [--steps N] [--seed S]
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zaya_tools.architecture import Architecture
from zaya_tools.training.corpus import held_out_text, training_documents
from zaya_tools.training.tokenizer import BOS, EOS, FIRST_BYTE, PAD, VOCABULARY

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from zaya_tools.training.report import Report

TINY = Architecture(
    blocks=4,
    hidden_size=128,
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    experts=8,
    expert_width=128,  # square expert matrices, as in the real models: shape checks prove nothing here either
    router_width=64,
    vocab_size=VOCABULARY,
    rope_theta=1_000_000.0,
    max_positions=1024,
    sliding=(True, False, True, False),
    sliding_window=64,
    pad_token=PAD,
    bos_token=BOS,
    eos_token=EOS,
)


@dataclass(frozen=True)
class Settings:
    """How long and how to train. `context` counts tokens, `batch` sequences, `warmup` steps.

    `balance_rate` is the first step of the balancing biases; like the learning rate it decays with a cosine.
    """

    steps: int = 2400
    seed: int = 0
    batch: int = 12
    context: int = 256
    peak_rate: float = 3e-3
    final_share: float = 0.02
    warmup: int = 100
    weight_decay: float = 0.05
    clip: float = 1.0
    balance_rate: float = 0.004
    threads: int = 2
    evaluation_bytes: int | None = None


def schedule(step: int, settings: Settings) -> float:
    """Share of the peak rate at a step: linear warm-up, then a cosine down to `final_share`."""
    warmup = min(settings.warmup, max(settings.steps // 10, 1))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(settings.steps - warmup, 1)
    return settings.final_share + (1 - settings.final_share) * (1 + math.cos(math.pi * progress)) / 2


def token_stream(documents: Sequence[str]) -> Tensor:
    """All documents as one int64 vector of token ids: `<bos>`, bytes, `<eos>`, again and again."""
    import torch

    pieces: list[Tensor] = []
    for document in documents:
        data = torch.frombuffer(bytearray(document.encode()), dtype=torch.uint8).long() + FIRST_BYTE
        pieces += [torch.tensor([BOS]), data, torch.tensor([EOS])]
    return torch.cat(pieces)


def sample(stream: Tensor, settings: Settings, generator: Generator) -> Tensor:
    """A batch of random windows, int64 [batch, context + 1]; half of them, on average, begin with `<bos>`."""
    import torch

    length = settings.context + 1
    starts = torch.randint(len(stream) - length + 1, (settings.batch,), generator=generator)
    windows = stream[starts[:, None] + torch.arange(length)]
    fresh = torch.rand(settings.batch, generator=generator) < 0.5
    windows[fresh, 0] = BOS
    return windows


def balance(biases: Tensor, counts: Tensor, rate: float) -> None:
    """Nudge an expert's bias up by `rate` if it got less than an equal share, down if more; in place.

    `biases` float32 [experts + 1] and `counts` int64 [experts + 1] end with the skip class, whose bias is left
    as it is. The others keep a mean of 0, hence a largest of at least 0: with skip at -1 it can never be chosen.
    """
    shortfall = counts[:-1].float().mean() - counts[:-1]
    biases[:-1] += rate * shortfall.sign()
    biases[:-1] -= biases[:-1].mean()


def train(
    model: Any, documents: Sequence[str], settings: Settings, log: Callable[[str], None] = lambda line: None
) -> None:
    """Train `model` (a `ZayaForCausalLM`) in place with AdamW on next-token cross-entropy."""
    import torch
    from torch.nn.functional import cross_entropy

    from zaya_tools.training.measure import routing_counts

    stream = token_stream(documents)
    generator = torch.Generator().manual_seed(settings.seed)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.peak_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    began, smooth = time.monotonic(), 0.0
    recent: list[Tensor] = []
    model.train()
    for step in range(settings.steps):
        share = schedule(step, settings)
        for group in optimizer.param_groups:
            group["lr"] = settings.peak_rate * share
        windows = sample(stream, settings, generator)
        with routing_counts(model) as counts:
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        for layer, used in zip(model.model.layers, counts, strict=True):
            balance(layer.mlp.gate.balancing_biases, used, settings.balance_rate * share)
        recent = [*recent[-49:], torch.stack(counts)]
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 49 or step == settings.steps - 1:
            use = torch.stack(recent).sum(dim=0)
            least = " ".join(f"{float(row[:-1].min() / row.sum()):.1%}" for row in use)
            log(
                f"step {step + 1:5d}  loss {smooth:.4f}  perplexity {math.exp(smooth):.3f}  "
                f"least used experts {least}  {time.monotonic() - began:.0f} s"
            )


def make(
    folder: Path,
    settings: Settings | None = None,
    architecture: Architecture = TINY,
    library: Path | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Report:
    """Train, write the raw checkpoint and its README into `folder`, and measure what the file holds.

    `library` is a folder of Python sources (default: the running interpreter's standard library).
    """
    import torch

    from zaya_tools.training.export import write_checkpoint
    from zaya_tools.training.measure import build_model, load_model, measure, moved
    from zaya_tools.training.report import Report

    settings = Settings() if settings is None else settings
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = build_model(architecture)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    began = time.monotonic()
    train(model, training_documents(library), settings, log)
    seconds = time.monotonic() - began
    write_checkpoint(folder, architecture, model.state_dict())
    stored = load_model(folder, architecture)
    text = held_out_text(settings.evaluation_bytes, library)
    report = Report(
        architecture=architecture,
        settings=settings,
        measured=measure(stored, text, settings.context),
        moved=moved(initial, stored.state_dict()),
        seconds=seconds,
    )
    (folder / "README.md").write_text(report.readme(), encoding="utf-8")
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the tiny ZAYA1. Returns 0, or 1 when the result is not good enough to be bundled."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="python -m zaya_tools.training.tiny", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the raw checkpoint into")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    given = parser.parse_args(arguments)
    # Waiting threads that spin make a step ten times slower where the cores are shared. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    settings = Settings(steps=given.steps, seed=given.seed)
    report = make(given.out, settings, log=lambda line: print(line, flush=True))
    measured = report.measured
    print(f"held-out perplexity {measured.perplexity:.4f} a byte over {measured.tokens:,} tokens")
    for problem in report.problems():
        print(f"not good enough: {problem}", file=sys.stderr)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
