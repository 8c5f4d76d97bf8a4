"""Linear layers as callables, so that a block never knows whether its weights are dense or quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[..., inputs] -> [..., outputs], both in the compute dtype."""


@dataclass(frozen=True)
class Dense:
    """weight [outputs, inputs] and bias [outputs] or None, both in the compute dtype."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Give x W^T + b."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _Joined:
    parts: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


def join(parts: Sequence[Linear]) -> Linear:
    """One layer whose output is that of all parts side by side; dense parts become a single matrix product."""
    dense = [part for part in parts if isinstance(part, Dense)]
    if len(dense) < len(parts):
        return _Joined(tuple(parts))
    biases = [part.bias for part in dense if part.bias is not None]
    weight = torch.cat([part.weight for part in dense])
    return Dense(weight, torch.cat(biases) if len(biases) == len(dense) else None)
