"""What stands before and after the blocks: embedding, final norm, output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_tools.model.norm import rms_norm
from zaya_tools.model.rows import StoredRows


@dataclass(frozen=True)
class Ends:
    """`embedding` and `head` [vocabulary, hidden] of any floating dtype (one where tied); the rest float32.

    Both may stay on disk: then only the rows in use are in memory. `dtype` is the compute dtype, in which logits come;
    `head_bias` [vocabulary] is of it, or None. `head_input`, where there is one, rounds what the head sees, as a
    quantized head's kernel does.
    """

    embedding: Tensor | StoredRows
    scale: Tensor
    bias: Tensor
    norm: Tensor
    head: Tensor | StoredRows
    head_bias: Tensor | None
    eps: float
    dtype: torch.dtype
    head_input: Callable[[Tensor], Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.scale.device

    def cast(self) -> Ends:
        """The same with embedding and head in memory, in the compute dtype."""
        embedding = self.embedding[:].to(self.dtype)
        return replace(self, embedding=embedding, head=embedding if self.tied else self.head[:].to(self.dtype))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head is self.embedding

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] to the float32 residual stream [..., hidden]: (embedding + bias) * scale."""
        table = self.embedding
        rows = F.embedding(ids, table) if isinstance(table, Tensor) else table.lookup(ids)
        return rows.float().add_(self.bias).mul_(self.scale)

    def finish(self, hidden: Tensor) -> Tensor:
        """Final norm of the float32 stream [..., hidden], in the compute dtype."""
        return rms_norm(hidden, self.norm, self.eps, self.dtype)

    def logits(self, finished: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Logits [..., stop - start] of the vocabulary from `start` to `stop`, for what `finish` gave [..., hidden].

        A head of another dtype is cast for these entries alone, so slices bound the memory of a large vocabulary.
        """
        bias = None if self.head_bias is None else self.head_bias[start:stop]
        seen = finished if self.head_input is None else self.head_input(finished)
        return F.linear(seen, self.head[start:stop].to(self.dtype), bias)
