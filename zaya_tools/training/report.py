"""The tiny checkpoint's README, written from measured numbers."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zaya_tools.architecture import Architecture
from zaya_tools.parameters import total
from zaya_tools.training.measure import Measured

if TYPE_CHECKING:
    from zaya_tools.training.tiny import Settings

MOST_PERPLEXITY = 5.0
LEAST_SHARE = 0.03
LEAST_MOVED = 0.5


@dataclass(frozen=True)
class Report:
    """What was trained and what came out.

    `moved` gives, for each native tensor, the share of its elements that training changed.
    """

    architecture: Architecture
    settings: Settings
    measured: Measured
    moved: Mapping[str, float]
    seconds: float

    def problems(self) -> list[str]:
        """Why this result should not be bundled; empty when it may."""
        found = []
        if not self.measured.perplexity < MOST_PERPLEXITY:
            found.append(f"perplexity {self.measured.perplexity:.2f} a byte, wanted below {MOST_PERPLEXITY:g}")
        for block in range(self.architecture.blocks):
            least = min(self.measured.shares(block))
            if least < LEAST_SHARE:
                found.append(f"an expert of block {block} got {least:.1%} of the tokens")
        if self.measured.skipped:
            found.append(f"{self.measured.skipped:.2%} of the tokens were skipped")
        found += [
            f"only {share:.0%} of {name} was changed by training"
            for name, share in self.moved.items()
            if share < LEAST_MOVED
        ]
        return found

    def readme(self) -> str:
        """The README in Markdown."""
        import torch
        import transformers

        a, s, m = self.architecture, self.settings, self.measured
        sliding = ", ".join(str(block) for block, slides in enumerate(a.sliding) if slides) or "none"
        window = a.sliding_window or 1
        least = min(self.moved, key=lambda name: self.moved[name])
        rates = f"Learning rate up to {s.peak_rate:g}, {s.warmup} steps of warm-up, a cosine to {s.final_share:.0%}"
        minutes = f"{self.seconds / 60:.1f} minutes on {s.threads} shared CPU cores"
        versions = f"torch {torch.__version__.partition('+')[0]} and transformers {transformers.__version__}"
        return f"""# A tiny trained ZAYA1

A real ZAYA1 model, only small: {a.blocks} blocks, {total(a):,} parameters, bytes as tokens, trained on Python
source code. It is a checkpoint as training writes it (the raw layout: two half-layers a block, `zaya_block`
names, bfloat16), so that conversion, quantization and validation can be tried and tested without a download. It
is too small to be useful for anything else. This file is written by the script that trains the model; the
numbers are measured on the bfloat16 values in `model.safetensors`, computed in float32.

## Geometry
| | |
|---|---|
| hidden size | {a.hidden_size} |
| query heads, key/value heads, head size | {a.query_heads}, {a.kv_heads}, {a.head_dim} |
| experts, width of one | {a.experts}, {a.expert_width} (top-1, and a skip class) |
| router width | {a.router_width} |
| sliding blocks | {sliding}: a token and the {window - 1} before it, rotary base {a.sliding_rope_theta:,.0f} |
| rotary base of the other blocks | {a.rope_theta:,.0f} |
| vocabulary | {a.vocab_size} rows: pad 0, eos 1, bos 2, then 256 bytes; the rest is padding |
| context | trained on {s.context} tokens, configured for {a.max_positions:,} |

## Measured on held-out text
| | |
|---|---|
| perplexity a byte | {m.perplexity:.4f} ({m.nats / m.tokens:.4f} nats) |
| held-out tokens | {m.tokens:,}, in pieces of {s.context} bytes, each after `<bos>` |
| tokens that took the skip class | {m.skipped:.2%} |

Share of the held-out tokens that each expert got:

| block | least | most | experts 0 to {a.experts - 1} |
|---|---|---|---|
{self._use()}

The skip class cannot be chosen by any input: in every block its balancing bias is -1 and the largest of the
others is at least 0, which the export asserts.

Every tensor was trained away from its initial value. The share of elements that differ from it, both rounded to
bfloat16, is smallest for `{least}`:
{self.moved[least]:.1%}. The skip class's balancing biases are meant to stay as they are.

## Training
AdamW (0.9, 0.95) on next-token cross-entropy, float32, {s.steps:,} steps of {s.batch} sequences of {s.context} tokens.
{rates} of it; weight decay
{s.weight_decay:g} on matrices, gradients clipped at {s.clip:g}, seed {s.seed}. {minutes}.
After every step each expert's balancing bias moves by {s.balance_rate:g} (decaying like the learning rate) towards an
equal share.

The text is the standard library of Python {platform.python_version()}, without tests and generated tables; about
5 % of its files, chosen by a hash of their paths, are held out. Made with {versions}.

To make it again (another machine, or other versions, may give other digits):

    python -m zaya_tools.training.tiny --out DIR

## License
The weights are licensed under Apache-2.0. They were trained on the text of the Python standard library, which is
licensed under the PSF license; none of that text is part of this folder.
"""

    def _use(self) -> str:
        rows = []
        for block in range(self.architecture.blocks):
            shares = self.measured.shares(block)
            every = " ".join(f"{share:.1%}" for share in shares)
            rows.append(f"| {block} | {min(shares):.1%} | {max(shares):.1%} | {every} |")
        return "\n".join(rows)
