"""Parameters that this plugin loads itself, without a loader of vLLM's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zaya_tools.errors import LayoutError


def weight(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A parameter without gradient, of a dtype that need not be the model's.

    Zeroed: one that a checkpoint leaves out on purpose (no bias) is right as it is.
    """
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def take(parameter: Tensor, tensor: Tensor) -> None:
    """Copy a stored tensor. LayoutError where shapes differ: copying would stretch what is too small."""
    if parameter.shape != tensor.shape:
        raise LayoutError(f"shape {list(tensor.shape)}, expected {list(parameter.shape)}")
    with torch.no_grad():
        parameter.copy_(tensor)
