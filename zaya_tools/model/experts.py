"""Top-1 experts, run expert by expert over the tokens that chose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_tools.model.router import Routing

ExpertFunction = Callable[[int, Tensor], Tensor]
"""(expert, its tokens [rows, hidden]) -> its output [rows, hidden], both in the compute dtype; called with rows > 0."""


@dataclass(frozen=True)
class DenseExperts:
    """SwiGLU experts (arXiv 2002.05202).

    `gate_up` [experts, 2 * width, hidden] has gate rows first; `down` is [experts, hidden, width].

    Weights of another dtype than the tokens are cast one expert at a time, in use.
    """

    gate_up: Tensor
    down: Tensor

    def __call__(self, expert: int, rows: Tensor) -> Tensor:
        """Give down(silu(gate x) * up x)."""
        return self.outer(expert, self.inner(expert, rows))

    def inner(self, expert: int, rows: Tensor) -> Tensor:
        """Give silu(gate x) * up x [rows, width]."""
        gate, up = F.linear(rows, self.gate_up[expert].to(rows.dtype)).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def outer(self, expert: int, inner: Tensor) -> Tensor:
        """Give down(inner) [rows, hidden]."""
        return F.linear(inner, self.down[expert].to(inner.dtype))


def run_experts(x: Tensor, routing: Routing, experts: ExpertFunction, count: int) -> Tensor:
    """Weighted output [..., hidden] of the chosen one of `count` experts; zero for a token that chose skip.

    Tokens x [..., hidden] are sorted by expert, so each expert's weights are read once. Reads the tokens an expert
    on the host.
    """
    rows = x.flatten(0, -2)
    choice = routing.choice.flatten()
    order = choice.argsort(stable=True)
    tokens = torch.bincount(choice, minlength=count + 1).tolist()
    out = torch.zeros_like(rows)
    weight = routing.weight.flatten().to(x.dtype)[:, None]
    start = 0
    # Skip is the last class, so its tokens come last in the order and are left at zero.
    for expert, number in enumerate(tokens[:count]):
        if number:
            chosen = order[start : start + number]
            out.index_copy_(0, chosen, experts(expert, rows[chosen]).mul_(weight[chosen]))
            start += number
    return out.view(x.shape)
