"""A short greedy continuation, with state as a server keeps it, against one pass over the whole text.

Likelihoods can be right while generation is not: they never use a key/value cache, a convolution's history or a
delayed value. So prompts are fed in chunks, continued token by token, and every choice is checked in a full pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zaya_tools.evaluation.findings import CheckResult, Finding
from zaya_tools.model.ends import Ends
from zaya_tools.model.model import ZayaModel
from zaya_tools.model.session import Session
from zaya_tools.model.streaming import stream
from zaya_tools.model.weights import Weights

CHECK = "generation"
CHUNK = 7
"""Tokens of a prompt that are fed at a time: shorter than any prompt, so that chunks meet inside it."""
_NGRAM = 4
# How far below the best token a chosen one may be in the full pass, in logits: rounding, not another answer.
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.1}


@dataclass(frozen=True)
class Continuation:
    """One prompt's greedy continuation; `gap` is the largest distance, in logits, to the full pass's best token.

    `entropy` is the mean over new tokens of the next-token distribution's entropy in nats, `repetition` the share
    of 4-token runs that stood before in the continuation.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gap: float
    entropy: float
    repetition: float


def generate(weights: Weights, prompts: Sequence[Sequence[int]], tokens: int) -> list[Continuation]:
    """Continue equally long prompts by `tokens` tokens each and measure the continuations.

    Blocks are held in memory where they fit, else read again for every step.
    """
    fits = weights.fits()
    ends = weights.ends().cast() if fits else weights.ends()
    blocks = weights.resident() if fits else weights
    model = ZayaModel(weights.architecture, ends, blocks)
    length = len(prompts[0])
    session = Session(model, slots=len(prompts), capacity=length + tokens)
    return measure_made(weights, prompts, session.generate(prompts, tokens, chunk=CHUNK))


def measure_made(
    weights: Weights, prompts: Sequence[Sequence[int]], made: Sequence[Sequence[int]]
) -> list[Continuation]:
    """Measure continuations of equal length that some engine made of equally long prompts."""
    ends, length = weights.ends(), len(prompts[0])
    finished = _full_pass(weights, ends, [[*prompt, *new[:-1]] for prompt, new in zip(prompts, made, strict=True)])
    result = []
    for row, (prompt, new) in enumerate(zip(prompts, made, strict=True)):
        gap, entropy = _judge(ends, finished[row][length - 1 :], new)
        result.append(Continuation(tuple(prompt), tuple(new), gap, entropy, _repetition(new)))
    return result


def _full_pass(weights: Weights, ends: Ends, texts: Sequence[Sequence[int]]) -> Tensor:
    layers = list(stream(weights, ends, torch.tensor(texts)))
    return ends.finish(layers[-1].hidden.read(0, len(texts)).to(weights.device))


def _judge(ends: Ends, finished: Tensor, chosen: Sequence[int]) -> tuple[float, float]:
    """(largest gap, mean entropy) of chosen tokens under final normed states [tokens, hidden], token by token."""
    gaps, entropy = [], 0.0
    with torch.inference_mode():
        for state, token in zip(finished, chosen, strict=True):
            logits = ends.logits(state).float()
            gaps.append((logits.max() - logits[token]).item())
            entropy += torch.special.entr(logits.softmax(-1)).sum().item()
    return _largest(gaps), entropy / len(chosen)


def _largest(values: Sequence[float]) -> float:
    """The largest value, NaN if there is one: max() would lose it."""
    return next((value for value in values if math.isnan(value)), max(values))


def _repetition(tokens: Sequence[int]) -> float:
    runs = [tuple(tokens[i : i + _NGRAM]) for i in range(len(tokens) - _NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def check_generation(
    model: Weights, prompts: Sequence[Sequence[int]], tokens: int, reference: Weights | None = None,
    *, made: Sequence[Sequence[int]] | None = None, tolerance: float | None = None,
) -> tuple[CheckResult, list[Continuation], list[Continuation]]:  # fmt: skip
    """Findings about a model's continuations, with the continuations themselves and the reference's.

    `made` are those of another engine; `tolerance`, in logits, replaces what is rounding by the dtype.
    """
    mine = generate(model, prompts, tokens) if made is None else measure_made(model, prompts, made)
    theirs = generate(reference, prompts, tokens) if reference is not None else []
    figures = _figures(mine, theirs, tokens)
    findings = tuple(Finding(CHECK, "fail", message) for message in _faults(figures, model, tolerance))
    return CheckResult(CHECK, findings, figures), mine, theirs


def _figures(mine: Sequence[Continuation], theirs: Sequence[Continuation], tokens: int) -> dict[str, Any]:
    def average(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    figures = {
        "prompts": len(mine),
        "new_tokens": tokens,
        "largest_gap": _largest([c.gap for c in mine]),
        "entropy": average([c.entropy for c in mine]),
        "repetition": average([c.repetition for c in mine]),
    }
    if theirs:
        figures |= {
            "reference_entropy": average([c.entropy for c in theirs]),
            "reference_repetition": average([c.repetition for c in theirs]),
            "agreement": average([_shared(a, b) for a, b in zip(mine, theirs, strict=True)]),
        }
    return figures


def _faults(figures: dict[str, Any], model: Weights, tolerance: float | None = None) -> list[str]:
    faults = []
    tolerance = _TOLERANCE[model.dtype] if tolerance is None else tolerance
    if not (math.isfinite(figures["largest_gap"]) and math.isfinite(figures["entropy"])):
        return ["the logits of the continuations are not finite"]
    if figures["largest_gap"] > tolerance:
        faults.append(
            f"decoding with state chose a token that one full pass puts {figures['largest_gap']:.3g} logits below "
            f"its best (at most {tolerance:g} is rounding): the state is wrong"
        )
    uniform = math.log(model.architecture.vocab_size)
    if figures["entropy"] > 0.9 * uniform:
        faults.append(f"the model only guesses: {figures['entropy']:.2f} nats a token, {uniform:.2f} is uniform")
    if figures["repetition"] > 0.8 and figures.get("reference_repetition", 1.0) < 0.5:
        faults.append(
            f"the model repeats itself ({figures['repetition']:.0%} of its 4-token runs) where the reference does "
            f"not ({figures['reference_repetition']:.0%})"
        )
    return faults


def _shared(one: Continuation, other: Continuation) -> float:
    """Share of the continuation before the first token that differs."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    same = next((index for index, (a, b) in enumerate(pairs) if a != b), len(one.tokens))
    return same / len(one.tokens)
