"""What stands before and after the blocks: embedding, final norm, output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_tools.model.norm import rms_norm


@dataclass(frozen=True)
class Ends:
    """`embedding` and `head` [vocabulary, hidden] of any floating dtype (one tensor where tied); the rest float32.

    `dtype` is the compute dtype, in which logits come; `head_bias` [vocabulary] is of it, or None.
    """

    embedding: Tensor
    scale: Tensor
    bias: Tensor
    norm: Tensor
    head: Tensor
    head_bias: Tensor | None
    eps: float
    dtype: torch.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] to the float32 residual stream [..., hidden]: (embedding + bias) * scale."""
        return F.embedding(ids, self.embedding).float().add_(self.bias).mul_(self.scale)

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm of the float32 stream [..., hidden], in the compute dtype."""
        return rms_norm(hidden, self.norm, self.eps, self.dtype)

    def logits(self, finished: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Logits [..., stop - start] of the vocabulary from `start` to `stop`, for what `finish` gave [..., hidden].

        A head of another dtype is cast for these entries alone, so slices bound the memory of a large vocabulary.
        """
        bias = None if self.head_bias is None else self.head_bias[start:stop]
        return F.linear(finished, self.head[start:stop].to(self.dtype), bias)
