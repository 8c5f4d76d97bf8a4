"""Normalisation and the scaled residual stream. Everything here computes in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def inverse_length(x: Tensor, scale: float, eps: float) -> Tensor:
    """Reciprocal length of the vectors of x [..., width] in float32: rsqrt(scale * sum x^2 + eps), [..., 1]."""
    # A norm followed by a square reads x once; on CPU that is twice as fast as squaring into a temporary.
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return length.square_().mul_(scale).add_(eps).rsqrt_()


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm (arXiv 1910.07467) of x [..., width] with a float32 weight [width], rounded once, to `dtype`."""
    return (x * inverse_length(x, 1 / x.shape[-1], eps)).mul_(weight).to(dtype)


@dataclass(frozen=True)
class ResidualScale:
    """How a sublayer's output joins the stream: all three are float32 [hidden].

    h = (out + out_bias) * out_scale + (h + stream_bias) * stream_scale, with both biases gathered in `shift`.
    """

    out_scale: Tensor
    stream_scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, out_scale: Tensor, out_bias: Tensor, stream_scale: Tensor, stream_bias: Tensor) -> ResidualScale:
        """From the four stored vectors, in any floating dtype."""
        scale, bias, stream, shift = (t.float() for t in (out_scale, out_bias, stream_scale, stream_bias))
        return cls(scale, stream, scale * bias + stream * shift)

    def __call__(self, out: Tensor, stream: Tensor) -> Tensor:
        """Join `out` [..., hidden], of any floating dtype, to the float32 stream [..., hidden], left as it is."""
        return torch.addcmul(self.shift, stream, self.stream_scale).addcmul_(out.float(), self.out_scale)
