"""`zaya validate`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zaya_tools.cli.output import Output, count, size
from zaya_tools.errors import DestinationError
from zaya_tools.evaluation.vllm_process import PATIENCE

if TYPE_CHECKING:
    from zaya_tools.evaluation.validation import Validation


class Dtype(StrEnum):
    """Types to compute in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Engine(StrEnum):
    """What runs the model."""

    stream = "stream"
    transformers = "transformers"
    vllm = "vllm"


def validate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder of any layout, or a hub id.")],
    reference: Annotated[
        str | None, typer.Option(metavar="REF", help="What it was made from, in any layout.", show_default=False)
    ] = None,
    data: Annotated[
        str,
        typer.Option(help="Text: a file or pipe (.txt, .jsonl, .parquet), -, or a hub dataset ORG/NAME:CONFIG@SPLIT."),
    ] = "held-out",
    field: Annotated[str, typer.Option(help="Field of jsonl, parquet and datasets that holds the text.")] = "text",
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder with tokenizer.json, if not MODEL or REF.", show_default=False),
    ] = None,
    checks: Annotated[
        str, typer.Option(help="Which checks, joined by commas.")
    ] = "structure,weights,likelihood,generation",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of text to use at most.")] = 16_384,
    context: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 512,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from window to window (default: no overlap).", show_default=False)
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 24,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Type to compute in.")] = Dtype.float32,
    engine: Annotated[
        Engine,
        typer.Option(help="stream: block by block, any size. transformers: all in memory. vllm: as it is served."),
    ] = Engine.stream,
    vllm_python: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Interpreter of the environment with vLLM, if not this.", show_default=False),
    ] = None,
    vllm_timeout: Annotated[
        float, typer.Option(metavar="MINUTES", help="Silence after which vLLM is given up.")
    ] = PATIENCE,
    max_perplexity_ratio: Annotated[float | None, typer.Option(help="Default by scheme.", show_default=False)] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Mean KL, nats a token. Default by scheme.", show_default=False)
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option(help="Share of equal top tokens. Default by scheme.", show_default=False)
    ] = None,
    min_router_agreement: Annotated[
        float | None, typer.Option(help="Least share of any block. Default by scheme.", show_default=False)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report: .html, .md or .json.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Check structure, weights, likelihood and generation of a checkpoint, and say PASS (exit 0) or FAIL (exit 1)."""
    from zaya_tools.evaluation.report import check_suffix, write_report
    from zaya_tools.evaluation.validation import Settings
    from zaya_tools.evaluation.validation import validate as run

    if report is not None:
        check_suffix(report)
        for folder in filter(None, (model, reference)):
            if report.resolve().parent.is_relative_to(Path(folder).expanduser().resolve()):
                raise DestinationError(
                    f"{report} would be written into the checkpoint {folder}", "choose another place"
                )
    out = Output(as_json)
    settings = Settings(
        checks=tuple(check.strip() for check in checks.split(",") if check.strip()),
        data=data,
        text_field=field,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        context=context,
        stride=stride,
        device=device,
        dtype=dtype.value,
        engine=engine.value,
        vllm_python=vllm_python,
        vllm_timeout=vllm_timeout,
        new_tokens=new_tokens,
        limits={
            "max_perplexity_ratio": max_perplexity_ratio,
            "max_kl": max_kl,
            "min_top1": min_top1,
            "min_router_agreement": min_router_agreement,
        },
    )
    result = run(model, reference, settings, report=out.step)
    if report is not None:
        write_report(result.document, report)
    out.document(result.document)
    show(out, result)
    if report is not None:
        out.text(f"report: {report}")
    if not result.passed:
        raise typer.Exit(1)


def show(out: Output, result: Validation) -> None:
    """The verdict and the figures that matter most, for people."""
    document = result.document
    for role in ("model", "reference"):
        if document[role]:
            d = document[role]
            out.text(
                f"{role}: {d['name']}, {d['layout']} layout, {count(d['parameters'])} parameters, {size(d['bytes'])}"
            )
    checks = document["checks"]
    out.table(
        "Checks",
        ["check", "result", "figures"],
        [[name, "passed" if c["passed"] else "FAILED", _figures(name, c["figures"])] for name, c in checks.items()],
    )
    for kind in ("warnings", "notes"):
        for line in document[kind]:
            out.text(f"{kind[:-1]}: {line}")
    for reason in document["reasons"]:
        out.text(f"reason: {reason}")
    out.heading(f"verdict: {document['verdict']}")


def _figures(check: str, figures: dict[str, Any]) -> str:
    """A check's most telling figures in a line."""
    if check == "likelihood":
        found = [f"perplexity {_with_error(figures['perplexity'])} over {figures['tokens']:,} tokens"]
        if "stream_gap" in figures:
            gap = figures["stream_gap"]["median"]
            found.append(f"vLLM {figures['vllm']}, {gap:.2g} nats from the block-by-block engine (median)")
        if "perplexity_ratio" in figures:
            found.append(f"{_with_error(figures['perplexity_ratio'], 5)} times the reference's")
        if "kl" in figures:
            found.append(f"KL {figures['kl']['mean']['value']:.3g}, top token {figures['same_top_token']['value']:.2%}")
        return ", ".join(found)
    if check == "generation":
        text = f"{figures['prompts']} prompts, {figures['new_tokens']} tokens each, gap {figures['largest_gap']:.2g}"
        return text + (f", {figures['agreement']:.0%} as the reference" if "agreement" in figures else "")
    plain = {
        key: value for key, value in figures.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return ", ".join(f"{key.replace('_', ' ')} {value:,}" for key, value in list(plain.items())[:4])


def _with_error(estimate: dict[str, float], digits: int = 4) -> str:
    return f"{estimate['value']:.{digits}f} +- {estimate['error']:.{digits}f}"
