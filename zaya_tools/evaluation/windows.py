"""A text's tokens cut into the windows that a model sees, and which of their tokens count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_tools.errors import ZayaError


@dataclass(frozen=True)
class Windows:
    """`ids` int64 [windows, context] and `scored` bool of that shape: the tokens whose likelihood counts.

    Every token of the text but the first of each unbroken run is scored once. The last window may be padded at
    its end with zeros, which count for nothing and, in a causal model, change nothing before them.
    """

    ids: Tensor
    scored: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens that count."""
        return int(self.scored.sum())


def cut(tokens: Sequence[int], context: int, stride: int | None = None) -> Windows:
    """Windows of `context` tokens that begin every `stride` tokens (default: `context`, no overlap).

    With a smaller stride a window scores only the tokens that no earlier one did, each with at least
    context - stride tokens before it. Raises ZayaError for a stride beyond the context and for too little text.
    """
    stride = context if stride is None else stride
    if context < 2 or not 1 <= stride <= context:
        raise ZayaError(
            f"context {context} with stride {stride}", "take at least 2, and a stride of at most the context"
        )
    if len(tokens) < 2:
        raise ZayaError(f"{len(tokens)} tokens are too few to score one", "give more text")
    starts = [0]
    while starts[-1] + context < len(tokens):
        starts.append(starts[-1] + stride)
    ids = torch.zeros((len(starts), context), dtype=torch.int64)
    scored = torch.zeros((len(starts), context), dtype=torch.bool)
    seen = 0
    for row, start in enumerate(starts):
        window = torch.tensor(tokens[start : start + context])
        ids[row, : len(window)] = window
        # A window's first token has nothing before it in the window, so it cannot be scored there.
        scored[row, max(1, seen - start) : len(window)] = True
        seen = start + len(window)
    kept = scored.any(dim=1)
    return Windows(ids[kept], scored[kept])
