"""Which sequences feed the experts that text at large starves."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAN = 2.0


def choose(counts: Tensor, samples: int) -> list[int]:
    """Indices, sorted, of `samples` sequences that together feed all experts as evenly as a greedy search finds.

    `counts` [sequences, experts] are the tokens that each sequence gives each expert of each block. Every step takes
    the sequence that adds most to the sum over experts of -1 / tokens: an expert with few tokens weighs most, and
    one that no sequence feeds weighs nothing in the choice.
    """
    left = counts.double()
    sequences = len(left)
    if samples >= sequences:
        return list(range(sequences))
    # Half a fair share: below it an expert counts as hungry, and the first steps are not ruled by single tokens.
    unit = float(left.sum(1).mean()) / max(1, left.shape[1]) / 2 + 1e-9
    held = torch.zeros(left.shape[1], dtype=torch.float64)
    free = torch.ones(sequences, dtype=torch.bool)
    for _ in range(samples):
        before = (held / unit + 1) ** -_LEAN
        after = ((held + left) / unit + 1) ** -_LEAN
        gain = (before - after).sum(1)
        gain[~free] = -torch.inf
        best = int(gain.argmax())
        free[best] = False
        held += left[best]
    # One round of exchanges: what came early was chosen before it was known what would be missing.
    for index in torch.nonzero(~free).flatten().tolist():
        rest = held - left[index]
        gain = -(((rest + left) / unit + 1) ** -_LEAN).sum(1)
        gain[~free] = -torch.inf
        gain[index] = -(((held / unit) + 1) ** -_LEAN).sum()
        best = int(gain.argmax())
        if best != index:
            free[index], free[best] = True, False
            held = rest + left[best]
    return torch.nonzero(~free).flatten().tolist()
