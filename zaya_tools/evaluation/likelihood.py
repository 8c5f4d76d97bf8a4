"""How likely a model finds a text, and how far it is from its reference on every token of it, block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zaya_tools.errors import LayoutError
from zaya_tools.evaluation import head, statistics
from zaya_tools.evaluation.statistics import Estimate, Values
from zaya_tools.evaluation.windows import Windows
from zaya_tools.model.ends import Ends
from zaya_tools.model.streaming import BUDGET, TOKENS, Layer, States, stream
from zaya_tools.model.weights import Weights

PERCENTILES = (50, 90, 95, 99, 99.9)
BINS = np.concatenate([[0.0], np.logspace(-6, 1, 43)])
"""Edges of the histogram of KL, in nats: zero to 1e-6, then six bins a decade."""

Advance = Callable[[int], None]


@dataclass(frozen=True)
class BlockFigures:
    """One block over all scored tokens.

    `coverage` counts tokens a class, experts then skip. With a reference, `agreement` is the share of tokens that
    both route alike and `error` the relative Frobenius error of the hidden states after the block.
    """

    block: int
    coverage: tuple[int, ...]
    agreement: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Divergence:
    """A model against its reference over all scored tokens; KL is KL(reference || model) in nats a token."""

    reference_perplexity: Estimate
    ratio: Estimate
    kl: Estimate
    percentiles: dict[str, float]
    maximum: float
    top1: Estimate
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class Likelihood:
    """Perplexity (exp of the mean nats a token) and what the blocks did; `divergence` where there is a reference."""

    tokens: int
    perplexity: Estimate
    blocks: tuple[BlockFigures, ...]
    divergence: Divergence | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, stable in names and order."""
        found: dict[str, Any] = {"tokens": self.tokens, "perplexity": self.perplexity.as_dict()}
        if self.divergence is not None:
            d = self.divergence
            found |= {
                "reference_perplexity": d.reference_perplexity.as_dict(),
                "perplexity_ratio": d.ratio.as_dict(),
                "kl": {"mean": d.kl.as_dict(), "percentiles": d.percentiles, "max": d.maximum},
                "same_top_token": d.top1.as_dict(),
                "kl_histogram": {"edges": BINS.tolist(), "counts": list(d.histogram)},
            }
        found["blocks"] = [
            {
                "block": b.block,
                "expert_tokens": list(b.coverage[:-1]),
                "skipped_tokens": b.coverage[-1],
                "router_agreement": b.agreement,
                "hidden_error": b.error,
            }
            for b in self.blocks
        ]
        return found


def measure(
    model: Weights, windows: Windows, reference: Weights | None = None, *, budget: int = BUDGET,
    advance: Advance | None = None,
) -> Likelihood:  # fmt: skip
    """Run the windows through a model, and through its reference block by block beside it.

    `budget` bytes of states a model are kept in memory, the rest on disk; `advance` is called with 1 after every
    block. LayoutError where the two models cannot be compared.
    """
    if reference is None:
        return _alone(model, windows, budget, advance or (lambda _: None))
    _comparable(model, reference)
    return _beside(model, windows, reference, budget, advance or (lambda _: None))


def score_tokens(model: Weights, windows: Windows, budget: int = BUDGET) -> tuple[Values, npt.NDArray[np.int64]]:
    """Of each scored token: nats (its negative log-likelihood), and the token that was most likely in its place."""
    ends = model.ends()
    (last,) = deque(stream(model, ends, windows.ids, budget=budget), maxlen=1)
    scored = _score(ends, last, windows, model)
    top = torch.cat([part.top for part in scored]).numpy()
    return torch.cat([part.nll for part in scored]).double().numpy(), top


def _score(ends: Ends, last: Layer, windows: Windows, model: Weights) -> list[head.Scored]:
    return [head.score(ends, ends.finish(rows), targets) for rows, targets in _rows(last.hidden, windows, model.device)]


def _alone(model: Weights, windows: Windows, budget: int, advance: Advance) -> Likelihood:
    ends = model.ends()
    blocks = []
    last: Layer | None = None
    for last in stream(model, ends, windows.ids, budget=budget):
        if last.index >= 0:
            blocks.append(BlockFigures(last.index, _coverage(last, windows, model.architecture.experts)))
            advance(1)
    assert last is not None
    scored = _score(ends, last, windows, model)
    nll = torch.cat([part.nll for part in scored]).double().numpy()
    return Likelihood(len(nll), statistics.mean(nll, np.exp), tuple(blocks), None)


def _beside(model: Weights, windows: Windows, reference: Weights, budget: int, advance: Advance) -> Likelihood:
    ends, others = model.ends(), reference.ends()
    blocks = []
    pairs = zip(
        stream(model, ends, windows.ids, budget=budget),
        stream(reference, others, windows.ids, budget=budget),
        strict=True,
    )
    mine: Layer | None = None
    theirs: Layer | None = None
    for mine, theirs in pairs:
        if mine.index < 0:
            continue
        alike = (mine.choice == theirs.choice)[windows.scored].double().mean().item()
        coverage = _coverage(mine, windows, model.architecture.experts)
        blocks.append(BlockFigures(mine.index, coverage, alike, _error(mine.hidden, theirs.hidden, windows)))
        advance(1)
    assert mine is not None
    assert theirs is not None
    compared = [
        head.compare(ends, ends.finish(rows), others, others.finish(wanted), targets)
        for (rows, targets), (wanted, _) in zip(
            _rows(mine.hidden, windows, model.device), _rows(theirs.hidden, windows, reference.device), strict=True
        )
    ]
    nll, wanted = (
        torch.cat([scored.nll for scored in scores]).double().numpy()
        for scores in ([part.model for part in compared], [part.reference for part in compared])
    )
    kl: Values = torch.cat([part.kl for part in compared]).double().numpy()
    same: Values = torch.cat([part.model.top == part.reference.top for part in compared]).double().numpy()
    return Likelihood(len(nll), statistics.mean(nll, np.exp), tuple(blocks), divergence(nll, wanted, kl, same))


def divergence(nll: Values, wanted: Values, kl: Values, same: Values) -> Divergence:
    """Summarise tokens: both models' nats [tokens], KL [tokens], and 1 where the most likely token is the same."""
    return Divergence(
        reference_perplexity=statistics.mean(wanted, np.exp),
        # Paired: most of what makes a text hard is common to both, so the ratio is known far better than either.
        ratio=statistics.mean(nll - wanted, np.exp),
        kl=statistics.mean(kl),
        percentiles={f"{p:g}": float(np.percentile(kl, p)) for p in PERCENTILES},
        maximum=float(kl.max()),
        top1=statistics.mean(same),
        histogram=tuple(int(n) for n in np.histogram(np.minimum(kl, BINS[-1]), BINS)[0]),
    )


def _rows(hidden: States, windows: Windows, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(states [rows, hidden] that predict, targets int64 [rows]) of the scored tokens, some windows at a time."""
    step = max(1, TOKENS // windows.ids.shape[1])
    for start in range(0, len(windows.ids), step):
        stop = min(start + step, len(windows.ids))
        scored = windows.scored[start:stop, 1:]
        states = hidden.read(start, stop)[:, :-1][scored].to(device)
        yield states, windows.ids[start:stop, 1:][scored]


def _coverage(layer: Layer, windows: Windows, experts: int) -> tuple[int, ...]:
    counts = torch.bincount(layer.choice[windows.scored].long(), minlength=experts + 1)
    return tuple(int(n) for n in counts)


def _error(mine: States, theirs: States, windows: Windows) -> float:
    step = max(1, TOKENS // windows.ids.shape[1])
    gap, size = 0.0, 0.0
    for start in range(0, len(windows.ids), step):
        stop = min(start + step, len(windows.ids))
        scored = windows.scored[start:stop]
        wanted = theirs.read(start, stop)[scored]
        gap += (mine.read(start, stop)[scored] - wanted).double().square().sum().item()
        size += wanted.double().square().sum().item()
    return float((gap / size) ** 0.5) if size else 0.0


def _comparable(model: Weights, reference: Weights) -> None:
    for field in ("blocks", "hidden_size", "experts", "vocab_size"):
        mine, theirs = getattr(model.architecture, field), getattr(reference.architecture, field)
        if mine != theirs:
            raise LayoutError(f"the model has {field} = {mine}, the reference {theirs}", "they are not the same model")
