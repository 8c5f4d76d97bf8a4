"""The router: which expert, or none, a token goes to, and with what weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_tools.model.linear import Linear
from zaya_tools.model.norm import rms_norm


@dataclass(frozen=True)
class RouterWeights:
    """Linear layers, and vectors [router width]; `balancing` is [experts + 1]. Norm and balancing are float32.

    `carry_scale` is None in the first block, which carries nothing over.
    """

    down: Linear
    carry_scale: Tensor | None
    norm: Tensor
    hidden: tuple[Linear, Linear]
    out: Linear
    balancing: Tensor
    eps: float


@dataclass(frozen=True)
class Routing:
    """What the router says of each token: shapes are those of its input without the last axis.

    `choice` int64 is the expert, or the number of experts for skip; `weight` float32 is the probability of the choice.
    """

    choice: Tensor
    weight: Tensor


def route(x: Tensor, carried: Tensor | None, router: RouterWeights) -> tuple[Routing, Tensor]:
    """Route normed tokens x [..., hidden]; `carried` [..., router width] is what the previous block's router gave.

    Returns the routing, and the states [..., router width] of the compute dtype for the next block's router.
    """
    states = router.down(x)
    if router.carry_scale is not None and carried is not None:
        states = torch.addcmul(states, carried, router.carry_scale)
    inner = rms_norm(states, router.norm, router.eps, states.dtype)
    for layer in router.hidden:
        inner = F.gelu(layer(inner))
    # The softmax spans the skip class even where skip can never win; biases only choose, they never weigh.
    probabilities = router.out(inner).softmax(dim=-1, dtype=torch.float32)
    choice = (probabilities + router.balancing).argmax(dim=-1, keepdim=True)
    return Routing(choice[..., 0], probabilities.gather(-1, choice)[..., 0]), states
