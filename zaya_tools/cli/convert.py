"""`zaya convert`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zaya_tools.cli.output import Output, size

if TYPE_CHECKING:
    from zaya_tools.checkpoint.run import Conversion


IterationOption = Annotated[
    str | None,
    typer.Option(metavar="N", help="Iteration of a training run: a number, latest or release.", show_default=False),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keys that complete or replace those of the config.", show_default=False),
]
VocabularyOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Rows of the embedding to keep; the rest is padding.", show_default=False),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of tokenizer, chat template, generation config.", show_default=False),
]


class To(StrEnum):
    """Layouts that can be written."""

    native = "native"
    raw = "raw"
    megatron = "megatron"


class Dtype(StrEnum):
    """Element types that can be asked for."""

    keep = "keep"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder or file, or a hub id like org/name.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to create; it appears whole or not at all.")
    ],
    to: Annotated[To, typer.Option(help="Layout to write.")] = To.native,
    dtype: Annotated[Dtype, typer.Option(help="Element type; protected tensors never lose precision.")] = Dtype.keep,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file, like 5GB or 512MiB.")] = "5GB",
    iteration: IterationOption = None,
    config: ConfigOption = None,
    vocab_size: VocabularyOption = None,
    tokenizer: TokenizerOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished run of the same conversion.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier run of zaya wrote at DST.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads (default: cores + 2).", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Convert any ZAYA1 checkpoint to the layout that transformers and vLLM read, or back, bit for bit."""
    from zaya_tools.checkpoint.conversion import convert as run
    from zaya_tools.checkpoint.conversion import plan_conversion
    from zaya_tools.checkpoint.destination import check_destination, settle
    from zaya_tools.checkpoint.opening import Reading

    out = Output(as_json)
    reading = Reading(iteration, config, vocab_size, tokenizer)
    work = plan_conversion(source, to=to.value, dtype=dtype.value, max_shard_size=max_shard_size, reading=reading)
    for warning in work.warnings:
        out.warn(warning)
    if dry_run:
        if not resume:
            check_destination(settle(destination), work.source.folder, force)
        show_plan(out, work)
        out.document({"destination": str(destination), "written": False, **summary(work)})
        return
    with out.progress(f"converting to {to.value}", work.plan.read_bytes) as advance:
        result = run(source, destination, resume=resume, force=force, workers=workers, advance=advance, planned=work)
    out.document({"destination": str(destination), "written": True, "already_complete": result.already_complete,
                  **summary(work)})  # fmt: skip
    if result.already_complete:
        out.heading(f"{destination} is already complete")
        return
    show_result(out, work, destination)


def show_plan(out: Output, work: Conversion) -> None:
    """The plan as a table."""
    plan = work.plan
    out.table(
        f"Plan: {work.name} ({work.found.layout.name}) to {plan.layout.name}",
        ["file", "tensors", "bytes", "first tensor"],
        [[s.filename, f"{len(s.outputs):,}", size(s.nbytes), s.outputs[0].name] for s in plan.shards],
    )
    show_totals(out, work)


def show_totals(out: Output, work: Conversion) -> None:
    """Counts, drops, side files and notes."""
    from zaya_tools.checkpoint.plan import CAST

    plan = work.plan
    outputs = list(plan.outputs())
    out.text(
        f"{len(work.source.tensors):,} source tensors become {len(outputs):,} in {len(plan.shards)} files, "
        f"{size(plan.data_bytes)} of tensors"
    )
    changed = [output for output in outputs if output.operation == CAST]
    if changed:
        roles = sorted({output.role.value for output in changed})
        out.text(f"dtype changes in {len(changed):,} tensors ({', '.join(roles)})")
    show_drops(out, "dropped", plan.drops)
    out.text(f"side files copied: {', '.join(work.sides.copied) or 'none'}")
    if work.sides.missing:
        out.text(f"side files not there to copy: {', '.join(work.sides.missing)}")
    if work.sides.left:
        out.text(f"left behind: {', '.join(work.sides.left)}")
    if work.skip and not any(block.reachable for block in work.skip):
        out.text(f"skip class: proven unreachable in all {len(work.skip)} blocks")
    for note in work.notes:
        out.text(f"note: {note}")


def show_drops(out: Output, said: str, drops: Mapping[str, str]) -> None:
    """Tensors that are left behind, with the reason; one line for many of one reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in drops.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1:,} more (--json lists all)" if len(names) > 1 else ""
        out.text(f"{said}: {names[0]}{more}: {reason}")


def show_result(out: Output, work: Conversion, destination: Path) -> None:
    """What was written."""
    out.heading(f"wrote {destination}")
    show_totals(out, work)


def summary(work: Conversion) -> dict[str, Any]:
    """The conversion as plain values, stable in names and order."""
    plan = work.plan
    return {
        "source": work.name,
        "from": work.found.layout.name,
        "to": plan.layout.name,
        "source_tensors": len(work.source.tensors),
        "tensors": len(list(plan.outputs())),
        "bytes": plan.data_bytes,
        "shards": [{"file": s.filename, "tensors": len(s.outputs), "bytes": s.nbytes} for s in plan.shards],
        "dropped": dict(plan.drops),
        "side_files": {
            "copied": list(work.sides.copied),
            "missing": list(work.sides.missing),
            "left": list(work.sides.left),
        },
        "notes": list(work.notes),
        "warnings": list(work.warnings),
    }
