"""`zaya inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zaya_tools.cli.convert import ConfigOption, IterationOption, VocabularyOption, show_drops
from zaya_tools.cli.output import Output, count, size

if TYPE_CHECKING:
    from zaya_tools.checkpoint.inspection import Inspection

_LISTED = 20


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint folder or file, or a hub id like org/name.")],
    iteration: IterationOption = None,
    config: ConfigOption = None,
    vocab_size: VocabularyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Say what a checkpoint is, what is missing or surplus, and whether convert would take it. Reads no weights.

    Exit code 1 when tensors are missing, surplus or malformed.
    """
    from zaya_tools.checkpoint.inspection import inspect as look
    from zaya_tools.checkpoint.opening import Reading

    report = look(path, Reading(iteration, config, vocab_size))
    out = Output(as_json)
    out.document(report.as_dict())
    show(out, report)
    if not report.complete:
        raise typer.Exit(1)


def show(out: Output, report: Inspection) -> None:
    """The report for people."""
    _geometry(out, report)
    _contents(out, report)
    _skip(out, report)
    _findings(out, report)
    out.heading(f"verdict: {report.verdict}")


def _geometry(out: Output, report: Inspection) -> None:
    a = report.architecture
    held = f"{report.tensors:,} tensors in {report.files} file{'s' if report.files > 1 else ''}"
    out.heading(f"{report.name}: {report.layout} layout, {held}, {size(report.nbytes)}")
    out.text(
        f"{count(report.parameters)} parameters, {count(report.active)} active per token "
        f"({count(report.active - report.embedding)} without the embedding)"
    )
    out.text(
        f"{a.blocks} blocks, hidden {a.hidden_size}, {a.query_heads} query and {a.kv_heads} key/value heads "
        f"of {a.head_dim}, {a.experts} experts of {a.expert_width}, router {a.router_width}, "
        f"vocabulary {a.vocab_size:,} ({'tied' if a.tied else 'untied'} head)"
    )
    if any(a.sliding):
        out.text(f"{sum(a.sliding)} of {a.blocks} blocks attend to {a.sliding_window:,} tokens, self included")


def _contents(out: Output, report: Inspection) -> None:
    out.table(
        "What it holds",
        ["role", "dtype", "tensors", "bytes"],
        [[h.role, h.dtype, f"{h.tensors:,}", size(h.nbytes)] for h in report.held],
    )
    for q in report.quantization:
        stated = q.format or "format not stated"
        out.text(f"quantized: {q.quantized:,} of {q.total:,} tensors of role {q.role} ({stated})")


def _skip(out: Output, report: Inspection) -> None:
    if report.skip and not any(s.reachable for s in report.skip):
        out.text(f"skip class: proven unreachable in all {len(report.skip)} blocks")
        return
    out.table(
        "Skip class",
        ["block", "bias", "largest expert bias", "state"],
        [[str(s.block), f"{s.bias:.4g}", f"{s.largest_expert_bias:.4g}", s.state] for s in report.skip],
    )


def _findings(out: Output, report: Inspection) -> None:
    for title, names in (("missing", report.missing), ("surplus", report.surplus)):
        for name in names[:_LISTED]:
            out.text(f"{title}: {name}")
        if len(names) > _LISTED:
            out.text(f"{title}: and {len(names) - _LISTED:,} more (--json lists all)")
    show_drops(out, "would be dropped", report.dropped)
    if report.sides.missing:
        out.text(f"side files not there: {', '.join(report.sides.missing)}")
    for note in report.notes:
        out.text(f"note: {note}")
    for warning in report.warnings[:1]:
        out.warn(warning)
    for problem in report.problems:
        out.text(f"problem: {problem}")
