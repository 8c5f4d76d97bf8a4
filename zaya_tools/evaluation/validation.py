"""`zaya validate`: structure, weights, likelihood and generation of a checkpoint, and one verdict."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from zaya_tools import __version__
from zaya_tools.checkpoint.hub import locate
from zaya_tools.checkpoint.opening import open_checkpoint
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation import transformers_engine, vllm_engine, vllm_process
from zaya_tools.evaluation.findings import CheckResult
from zaya_tools.evaluation.generation import check_generation
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.evaluation.text import FIELD, HELD_OUT, read_tokenizer, tokenize
from zaya_tools.evaluation.verdict import DEFAULTS, Limits, judge, scheme_class
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.evaluation.windows import Windows, cut
from zaya_tools.layouts.match import Match, match
from zaya_tools.model.device import choose_device
from zaya_tools.model.streaming import BUDGET
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import total

CHECKS = ("structure", "weights", "likelihood", "generation")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ENGINES = ("stream", "transformers", "vllm")
_RUN = {"likelihood", "generation"}
"""Checks that run the model."""
_PROMPTS, _PROMPT_TOKENS = 4, 24

Report = Callable[[str], None]


def compute_dtype(name: str) -> torch.dtype:
    """The dtype to compute in that is asked for by name; ZayaError for another than those of DTYPES."""
    if name not in DTYPES:
        raise ZayaError(f"unknown dtype {name!r}", f"choose {' or '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class Settings:
    """What to check, on what text and how. `limits` override the scheme's own where they are not None.

    `vllm_python` is the interpreter of the environment that vLLM is in, for that engine; None: this one. It is given up
    where it says nothing for `vllm_timeout` minutes.
    """

    checks: Sequence[str] = CHECKS
    data: str = HELD_OUT
    text_field: str = FIELD
    tokenizer: str | None = None
    max_tokens: int = 16_384
    context: int = 512
    stride: int | None = None
    device: str = "auto"
    dtype: str = "float32"
    engine: str = "stream"
    vllm_python: str | None = None
    vllm_timeout: float = vllm_process.PATIENCE
    new_tokens: int = 24
    budget: int = BUDGET
    limits: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """The verdict and everything that it rests on."""

    passed: bool
    reasons: tuple[str, ...]
    results: tuple[CheckResult, ...]
    document: dict[str, Any]


def validate(
    model: str | Path,
    reference: str | Path | None = None,
    settings: Settings | None = None,
    *,
    report: Report | None = None,
) -> Validation:
    """Validate a checkpoint, a folder or a hub id of any layout, against a reference in any layout where one is given.

    `report` is called with a line when a check begins. Raises a ZayaError for settings that make no sense and for a
    reference, text or tokenizer that cannot be read; what is wrong with the model itself is in the result.
    """
    wanted = settings or Settings()
    _check_settings(wanted)
    say = report or (lambda _: None)
    runs = bool(_RUN & set(wanted.checks))
    if wanted.engine == "vllm" and runs:
        # Before anything is read: that may take long.
        vllm_process.check_interpreter(wanted.vllm_python)
    folder, name = locate(str(model))
    other = locate(str(reference)) if reference is not None else None
    against = other[0] if other else None
    if wanted.engine == "vllm" and runs:
        vllm_engine.check_servable(folder)
    if runs and folder.exists():
        read_tokenizer(_tokenizer_folder(folder, against, wanted))

    results: list[CheckResult] = []
    if "structure" in wanted.checks:
        say("structure")
        results.append(check_structure(folder, against))
    sound = not any(result.failures for result in results)
    if "weights" in wanted.checks and sound:
        say("weights")
        results.append(check_weights(folder, against))
    described = _describe(folder, name)
    limits = DEFAULTS[described["scheme_class"]] if described else next(iter(DEFAULTS.values()))
    limits = replace(limits, **{key: value for key, value in wanted.limits.items() if value is not None})
    # A model whose tensors are not all there cannot be run, and its other checks would only repeat that.
    if sound and runs:
        results += _run(folder, against, wanted, limits, say)
    skipped = [check for check in wanted.checks if check not in {result.check for result in results}]
    return _conclude(results, skipped, described, other and _describe(*other), wanted, limits)


def _run(folder: Path, against: Path | None, wanted: Settings, limits: Limits, say: Report) -> list[CheckResult]:
    device = choose_device(wanted.device)
    dtype = compute_dtype(wanted.dtype)
    weights = Weights.open(folder, dtype=dtype, device=device)
    reference = Weights.open(against, dtype=dtype, device=device) if against else None
    source = _tokenizer_folder(folder, against, wanted)
    tokens = tokenize(source, wanted.data, wanted.max_tokens, wanted.text_field)
    if len(tokens) < 2:
        raise ZayaError(f"{wanted.data} gives {len(tokens)} tokens", "give more text: a likelihood needs at least two")
    if max(tokens, default=0) >= weights.architecture.vocab_size:
        raise ZayaError(
            f"the tokenizer gives token {max(tokens)}, the model has {weights.architecture.vocab_size:,}",
            "give the model's own tokenizer with --tokenizer",
        )
    positions = weights.architecture.max_positions
    if min(wanted.context, len(tokens)) > positions:
        raise ZayaError(
            f"a context of {wanted.context:,} tokens, where the model has {positions:,} positions", "take a shorter one"
        )
    results = []
    windows = cut(tokens, min(wanted.context, len(tokens)), wanted.stride)
    served = None
    if wanted.engine == "vllm":
        say("vLLM")
        served = _serve(folder, windows, tokens, wanted)
    if "likelihood" in wanted.checks:
        say("likelihood")
        if served is not None:
            results.append(vllm_engine.judge(served, weights, windows, limits, reference))
        elif wanted.engine == "transformers":
            found = transformers_engine.measure(folder, windows, against, dtype)
            results.append(judge(found, limits, weights.architecture.vocab_size))
        else:
            found = measure(weights, windows, reference, budget=wanted.budget)
            results.append(judge(found, limits, weights.architecture.vocab_size))
    if "generation" in wanted.checks:
        say("generation")
        result, mine, theirs = check_generation(
            weights,
            _prompts(tokens),
            wanted.new_tokens,
            reference,
            made=served.generated if served else None,
            # Of two tokens as close as engines are apart, either is a right choice.
            tolerance=max(1e-2, 5 * vllm_engine.typical(weights)) if served else None,
        )
        result.figures["texts"] = _texts(source, mine, theirs)
        results.append(result)
    return results


def _serve(folder: Path, windows: Windows, tokens: list[int], wanted: Settings) -> vllm_engine.Served:
    prompts = _prompts(tokens) if "generation" in wanted.checks else []
    scored = windows if "likelihood" in wanted.checks else Windows(windows.ids[:0], windows.scored[:0])
    return vllm_engine.serve(
        folder, scored, prompts, wanted.new_tokens, wanted.dtype, wanted.vllm_python, patience=wanted.vllm_timeout
    )


def _check_settings(wanted: Settings) -> None:
    unknown = [check for check in wanted.checks if check not in CHECKS]
    if unknown or not wanted.checks:
        what = f"unknown check {unknown[0]!r}" if unknown else "no checks"
        raise ZayaError(what, f"choose among {', '.join(CHECKS)}")
    compute_dtype(wanted.dtype)
    if wanted.engine not in ENGINES:
        raise ZayaError(f"unknown engine {wanted.engine!r}", f"choose {' or '.join(ENGINES)}")
    if not wanted.vllm_timeout > 0:
        raise ZayaError(f"{wanted.vllm_timeout:g} minutes are no time to wait for vLLM", "give more than none")
    if wanted.vllm_python is not None and wanted.engine != "vllm":
        raise ZayaError(f"an interpreter for vLLM, but the engine is {wanted.engine}", "add --engine vllm")
    for name, value in wanted.limits.items():
        ceiling = 1.0 if name.startswith("min_") else math.inf
        if value is not None and not 0 <= value <= ceiling:
            raise ZayaError(f"{name} = {value} is not a limit", f"give a number from 0 to {ceiling:g}")
    if wanted.new_tokens < 1:
        raise ZayaError(f"{wanted.new_tokens} new tokens cannot be judged", "generate at least one")


def _tokenizer_folder(folder: Path, against: Path | None, wanted: Settings) -> Path:
    if wanted.tokenizer:
        return Path(wanted.tokenizer)
    if not (folder / "tokenizer.json").is_file() and against is not None:
        return against
    return folder


def _prompts(tokens: list[int]) -> list[list[int]]:
    """A few beginnings of equal length, spread over the text."""
    length = min(_PROMPT_TOKENS, max(1, len(tokens) // 2))
    count = max(1, min(_PROMPTS, len(tokens) // length))
    step = len(tokens) // count
    return [tokens[start : start + length] for start in range(0, step * count, step)][:count]


def _texts(folder: Path, mine: Sequence[Any], theirs: Sequence[Any]) -> list[dict[str, Any]]:
    tokenizer = read_tokenizer(folder)
    others = list(theirs) or [None] * len(mine)
    return [
        {
            "prompt": tokenizer.decode(list(one.prompt)),
            "text": tokenizer.decode(list(one.tokens)),
            "reference_text": tokenizer.decode(list(other.tokens)) if other else None,
        }
        for one, other in zip(mine, others, strict=True)
    ]


def _describe(folder: Path, name: str) -> dict[str, Any] | None:
    """What a checkpoint is, None where that cannot be told."""
    try:
        source = open_checkpoint(folder)
        found: Match = match(source.tensors, source.config, str(folder))
    except ZayaError:
        return None
    stated = source.config.get("quantization_config")
    return {
        "name": name,
        "layout": found.layout.name,
        "parameters": total(found.architecture),
        "bytes": source.nbytes,
        "blocks": found.architecture.blocks,
        "experts": found.architecture.experts,
        "scheme": stated.get("format") if isinstance(stated, dict) else None,
        "scheme_class": scheme_class(source.config, found.quantized),
    }


def _conclude(
    results: Sequence[CheckResult],
    skipped: Sequence[str],
    model: dict[str, Any] | None,
    reference: dict[str, Any] | None,
    wanted: Settings,
    limits: Limits,
) -> Validation:
    def messages(severity: str) -> list[str]:
        return [f"{f.check}: {f.message}" for result in results for f in result.findings if f.severity == severity]

    reasons = messages("fail")
    notes = messages("note")
    for check in skipped:
        notes.append(f"{check} was not checked: the structure is not sound")
    document = {
        "verdict": "FAIL" if reasons else "PASS",
        "reasons": reasons,
        "warnings": messages("warn"),
        "notes": notes,
        "model": model,
        "reference": reference,
        "settings": {
            "checks": list(wanted.checks),
            "data": wanted.data,
            "max_tokens": wanted.max_tokens,
            "context": wanted.context,
            "stride": wanted.stride or wanted.context,
            "dtype": wanted.dtype,
            "device": str(choose_device(wanted.device)),
            "engine": wanted.engine,
        },
        "thresholds": limits.as_dict(),
        "tool": {"zaya_tools": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "checks": {
            result.check: {
                "passed": not result.failures,
                "findings": [finding.as_dict() for finding in result.findings],
                "figures": result.figures,
            }
            for result in results
        },
    }
    return Validation(not reasons, tuple(reasons), tuple(results), document)
