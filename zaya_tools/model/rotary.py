"""Rotary position embedding on the first part of each head, NeoX halves (RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zaya_tools.architecture import FULL, Architecture, native_config
from zaya_tools.errors import LayoutError

# These choose their frequencies by the length of the running request, which one table cannot serve.
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Rotary:
    """float32 cosines and sines [tokens, 1, turned channels / 2]; the axis of one is the heads'."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn x [..., tokens, heads, head_dim], rounding once, to `dtype`."""
        half = self.cos.shape[-1]
        left, right = x[..., :half], x[..., half : 2 * half]
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        out[..., :half] = (left * self.cos).addcmul_(right, self.sin, value=-1)
        out[..., half : 2 * half] = (right * self.cos).addcmul_(left, self.sin)
        out[..., 2 * half :] = x[..., 2 * half :]
        return out


@lru_cache(maxsize=8)
def frequencies(architecture: Architecture, sliding: bool) -> tuple[Tensor, float]:
    """Radians a token of each pair of channels, float32 on CPU, and the factor on cosines and sines.

    Raises LayoutError for a rotary type whose frequencies depend on the length of the request.
    """
    a = architecture
    scaling = {} if sliding else dict(a.rope_scaling)
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        turned = int(a.head_dim * scaling.get("partial_rotary_factor", a.rotary_fraction))
        theta = a.sliding_rope_theta if sliding else scaling.get("rope_theta", a.rope_theta)
        return 1.0 / theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned), 1.0
    if kind in _BY_LENGTH:
        raise LayoutError(f"rotary type {kind} is not supported", "its frequencies depend on the length of a request")
    from transformers import ZayaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise LayoutError(f"rotary type {kind} is unknown", f"known types: default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    try:
        inverse, factor = ROPE_INIT_FUNCTIONS[kind](ZayaConfig(**native_config(a)), "cpu", layer_type=FULL)
    except KeyError as error:
        raise LayoutError(f"the rotary type {kind} needs {error.args[0]}, which config.json does not state") from error
    return inverse.float(), float(factor)


def rotary(architecture: Architecture, sliding: bool, positions: Tensor) -> Rotary:
    """Tables for integer positions [tokens], on their device."""
    inverse, factor = frequencies(architecture, sliding)
    angles = positions.float()[:, None] * inverse.to(positions.device)
    return Rotary(angles.cos().mul_(factor)[:, None], angles.sin().mul_(factor)[:, None])


def rotaries(architecture: Architecture, positions: Tensor) -> dict[bool, Rotary]:
    """The tables that a model's blocks need, by whether a block is sliding."""
    return {sliding: rotary(architecture, sliding, positions) for sliding in sorted(set(architecture.sliding))}
