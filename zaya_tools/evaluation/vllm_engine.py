"""A checkpoint in vLLM itself, run in its own environment and compared with the block-by-block engine.

What vLLM computes is what will be served, so its perplexity is the one that counts; and the two engines have little
code in common, so what they agree on is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zaya_tools.checkpoint.opening import open_checkpoint
from zaya_tools.checkpoint.source import open_source
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.evaluation import statistics
from zaya_tools.evaluation.findings import CheckResult, Finding
from zaya_tools.evaluation.likelihood import score_tokens
from zaya_tools.evaluation.statistics import Values
from zaya_tools.evaluation.verdict import CHECK, Limits
from zaya_tools.evaluation.vllm_process import PATIENCE, ask, check_interpreter
from zaya_tools.evaluation.windows import Windows
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.detect import detect
from zaya_tools.layouts.match import match, require
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.model.quantized import read_schemes
from zaya_tools.model.weights import Weights

OURS, NATIVE_MODULE = "zaya_tools.vllm_plugin.", "vllm.model_executor.models.zaya"
"""Where the class that serves ZAYA1 may come from. vLLM falls back to others, which run and are wrong."""

_EXACT, _ROUNDED_INPUTS, _ROUNDED = 1e-4, 0.02, 0.1


@dataclass(frozen=True)
class Served:
    """vLLM's answers: by window, nats of the log-probability of every token but the first and whether it was the
    most likely one; and the continuation of each prompt."""

    version: str
    model_class: str
    logprobs: tuple[Values, ...]
    first: tuple[Values, ...]
    generated: tuple[tuple[int, ...], ...]

    @property
    def trusted(self) -> bool:
        """Whether a class that knows ZAYA1 served."""
        return self.model_class.startswith((OURS, NATIVE_MODULE))

    @property
    def ours(self) -> bool:
        """Whether that class was this package's."""
        return self.model_class.startswith(OURS)


def serve(
    folder: Path,
    windows: Windows,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    dtype: str,
    python: str | None = None,
    engine: dict[str, Any] | None = None,
    patience: float = PATIENCE,
) -> Served:
    """Score the windows and continue the prompts greedily in vLLM, under the interpreter `python` (default: this one).

    `engine` are further arguments of vllm.LLM. LayoutError for a checkpoint that is not native, ZayaError where there
    is no vLLM or an old one, no zaya-tools beside it, and where it fails, with its own reason, or is silent for
    `patience` minutes.
    """
    source = open_source(folder)
    found = require(match(source.tensors, source.config, str(folder)))
    _check_layout(found.layout, folder)
    request = {
        "model": str(folder.resolve()),
        "dtype": dtype,
        "windows": [ids[: _length(row)].tolist() for ids, row in zip(windows.ids, windows.scored, strict=True)],
        "prompts": [list(prompt) for prompt in prompts],
        "new_tokens": new_tokens,
        "engine": engine or {},
    }
    answer = ask(check_interpreter(python), request, patience)
    return Served(
        answer["vllm"],
        answer["model_class"],
        tuple(np.array(row, np.float64) for row in answer["logprobs"]),
        tuple(np.array(row, np.float64) for row in answer["ranked_first"]),
        tuple(tuple(row) for row in answer["generated"]),
    )


def check_servable(folder: Path) -> None:
    """LayoutError for a checkpoint of a layout that vLLM cannot serve, told by its names alone.

    One that cannot be read at all is left to those who read it.
    """
    try:
        layout = detect(open_checkpoint(folder).tensors, str(folder))
    except ZayaError:
        return
    _check_layout(layout, folder)


def _check_layout(layout: Layout, folder: Path) -> None:
    if layout not in (NATIVE, NATIVE_PER_EXPERT):
        raise LayoutError(f"{folder} has the {layout.name} layout, which vLLM cannot serve", "`zaya convert` it first")


def _length(scored: torch.Tensor) -> int:
    """Tokens of a window up to the last that counts; what follows is padding."""
    return int(scored.nonzero().max()) + 1


def judge(
    served: Served, weights: Weights, windows: Windows, limits: Limits, reference: Weights | None = None
) -> CheckResult:
    """vLLM's likelihoods against those of the block-by-block engine for the same checkpoint, and a reference's.

    Fails where the engines disagree by more than rounding (median difference, perplexity ratio), where the class that
    served does not know ZAYA1, and where the limits for a reference are passed.
    """
    keep = [row[1 : _length(row)].numpy() for row in windows.scored]
    mine = -np.concatenate([found[rows] for found, rows in zip(served.logprobs, keep, strict=True)])
    first = np.concatenate([found[rows] for found, rows in zip(served.first, keep, strict=True)])
    theirs, top = score_tokens(weights, windows)
    gap = np.abs(mine - theirs)
    targets = torch.cat([ids[1:][row[1:]] for ids, row in zip(windows.ids, windows.scored, strict=True)]).numpy()
    ratio = statistics.mean(mine - theirs, np.exp)
    figures: dict[str, Any] = {
        "engine": "vllm",
        "vllm": served.version,
        "model_class": served.model_class,
        "tokens": len(mine),
        "perplexity": statistics.mean(mine, np.exp).as_dict(),
        "stream_perplexity": statistics.mean(theirs, np.exp).as_dict(),
        "stream_ratio": ratio.as_dict(),
        "stream_gap": {"median": float(np.median(gap)), "90": float(np.percentile(gap, 90)), "max": float(gap.max())},
        "stream_same_first": float((first == (top == targets)).mean()),
    }
    faults = list(_faults(served, mine, figures, weights, limits))
    if reference is not None:
        wanted, _ = score_tokens(reference, windows)
        against = statistics.mean(mine - wanted, np.exp)
        figures |= {
            "reference_perplexity": statistics.mean(wanted, np.exp).as_dict(),
            "perplexity_ratio": against.as_dict(),
        }
        if not against.value <= limits.max_perplexity_ratio:
            faults.append(
                f"perplexity in vLLM is {against.value:.4f} +- {against.error:.4f} times the reference's, "
                f"at most {limits.max_perplexity_ratio:g} passes"
            )
    return CheckResult(CHECK, tuple(Finding(CHECK, "fail", fault) for fault in faults), figures)


def _faults(served: Served, nll: Values, figures: dict[str, Any], weights: Weights, limits: Limits) -> Sequence[str]:
    if not served.trusted:
        return [
            f"vLLM {served.version} served it with {served.model_class}, which does not know ZAYA1: install zaya-tools "
            "beside vLLM"
        ]
    if not np.isfinite(nll).all():
        return ["vLLM's log-probabilities are not finite"]
    faults = []
    allowed = typical(weights)
    median, ratio = figures["stream_gap"]["median"], figures["stream_ratio"]["value"]
    if not median <= allowed:
        faults.append(
            f"vLLM's log-probabilities are {median:.3g} nats from those of the block-by-block engine (median), "
            f"at most {allowed:g} is rounding"
        )
    if not 1 / limits.max_perplexity_ratio <= ratio <= limits.max_perplexity_ratio:
        faults.append(
            f"perplexity in vLLM is {ratio:.5f} times that of the block-by-block engine, "
            f"at most {limits.max_perplexity_ratio:g} either way is rounding"
        )
    return faults


def typical(weights: Weights) -> float:
    """The largest median difference of a token's log-probability, in nats, that is rounding between two engines.

    Medians, not maxima: one token sent to another expert by rounding is far away with every right engine.
    """
    if weights.dtype != torch.float32:
        return _ROUNDED
    # Where activations are rounded to few bits, the last bit of float32 decides which way now and then.
    groups = read_schemes(weights.source.config).groups if weights.found.quantized else ()
    return _ROUNDED_INPUTS if any(scheme.input_activations is not None for _, scheme, _ in groups) else _EXACT
