"""Likelihoods and divergences straight from final states, without ever holding the logits of a whole text.

The vocabulary is gone through in slices. Sums over it are carried with a running maximum, as in the online softmax
(Milakov and Gimelshein, arXiv 1805.02867), for both models at once where two are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_tools.model.ends import Ends

SLICE_BYTES = 8 * 2**20
"""Bytes of float32 logits held at a time, for each model: few enough to stay cached between passes over them."""


@dataclass(frozen=True)
class Scored:
    """Per row: `nll` float32 in nats and `top` int64, the most likely token."""

    nll: Tensor
    top: Tensor


@dataclass(frozen=True)
class Compared:
    """Both models' scores of the same rows, and `kl` float32: KL(reference || model) in nats, not below 0."""

    model: Scored
    reference: Scored
    kl: Tensor


class _Running:
    """Running maximum, sum of exponentials, logit of the target and best token of rows of logits."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.maximum = torch.full(targets.shape, -torch.inf)
        self.sum = torch.zeros(targets.shape)
        self.target = torch.zeros(targets.shape)
        self.top = torch.zeros_like(targets)

    def add(self, logits: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Take logits [rows, slice] from vocabulary entry `start` on.

        Returns exp(logits - maximum) of that shape, and the factor by which earlier sums shrink.
        """
        best, where = logits.max(dim=-1)
        self.top = torch.where(best > self.maximum, where + start, self.top)
        maximum = torch.maximum(self.maximum, best)
        shrink = torch.exp(self.maximum - maximum)
        weights = torch.exp(logits - maximum[:, None])
        self.sum = self.sum * shrink + weights.sum(dim=-1)
        self.maximum = maximum
        inside = (self.targets >= start) & (self.targets < start + logits.shape[-1])
        place = (self.targets - start).clamp(0, logits.shape[-1] - 1)[:, None]
        self.target = torch.where(inside, logits.gather(-1, place)[:, 0], self.target)
        return weights, shrink

    def scored(self) -> Scored:
        # The maximum first: next to a large one, the logarithm of the sum would be rounded away.
        return Scored((self.maximum - self.target) + self.sum.log(), self.top)


def _slices(rows: int, vocabulary: int) -> range:
    return range(0, vocabulary, max(1, SLICE_BYTES // (4 * max(1, rows))))


def score(ends: Ends, finished: Tensor, targets: Tensor) -> Scored:
    """Score `targets` int64 [rows] under the model whose final normed states are `finished` [rows, hidden]."""
    running = _Running(targets)
    vocabulary = len(ends.head)
    slices = _slices(len(targets), vocabulary)
    with torch.inference_mode():
        for start in slices:
            running.add(ends.logits(finished, start, min(start + slices.step, vocabulary)).float().cpu(), start)
    return running.scored()


def compare(ends: Ends, finished: Tensor, reference: Ends, reference_finished: Tensor, targets: Tensor) -> Compared:
    """Score `targets` under a model and its reference, and how far the model's distributions are from the reference's.

    KL = E_r[l_r - l_m] - log Z_r + log Z_m with logits l and normalisers Z; equal logits give exactly 0.
    """
    model, other = _Running(targets), _Running(targets)
    gap = torch.zeros(targets.shape)
    vocabulary = len(ends.head)
    slices = _slices(len(targets), vocabulary)
    with torch.inference_mode():
        for start in slices:
            stop = min(start + slices.step, vocabulary)
            logits = ends.logits(finished, start, stop).float().cpu()
            wanted = reference.logits(reference_finished, start, stop).float().cpu()
            model.add(logits, start)
            weights, shrink = other.add(wanted, start)
            gap = gap * shrink + (weights * wanted.sub_(logits)).sum(dim=-1)
    kl = (gap / other.sum + (model.maximum - other.maximum)) + (model.sum.log() - other.sum.log())
    return Compared(model.scored(), other.scored(), kl.clamp_min(0))
