"""`zaya quantize`."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zaya_tools.cli.convert import (
    ConfigOption,
    IterationOption,
    TokenizerOption,
    VocabularyOption,
    show_totals,
    summary,
)
from zaya_tools.cli.output import Output, size
from zaya_tools.errors import ZayaError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zaya_tools.checkpoint.run import Converted
    from zaya_tools.quantization.auto import Auto
    from zaya_tools.quantization.calibrated import Calibration
    from zaya_tools.quantization.conversion import Quantization
    from zaya_tools.quantization.summary import Measured


class ExpertLayout(StrEnum):
    """How quantized experts are stored."""

    per_expert = "per-expert"
    stacked = "stacked"


def quantize(
    context_: typer.Context,
    source: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Full-precision checkpoint, a folder or file of any layout, or a hub id."),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder to create; it appears whole or not at all.")
    ],
    recipe: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A recipe of `zaya recipe list`, a YAML file, or auto.")
    ] = "fp8",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file, like 5GB or 512MiB.")] = "5GB",
    tensor_parallel: Annotated[
        int, typer.Option("--tp", min=1, metavar="N", help="Tensor-parallel size that the result must be served with.")
    ] = 1,
    expert_layout: Annotated[
        ExpertLayout, typer.Option(help="Quantized experts one by one, or stacked by block.")
    ] = ExpertLayout.per_expert,
    target_vllm: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Write a config that this vLLM reads.", show_default=False)
    ] = None,
    stats: Annotated[
        str | None,
        typer.Option(
            metavar="STATS", help="Statistics of `zaya calibrate`, for recipes that use them.", show_default=False
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text for recipes that learn from it, as in `zaya calibrate`.", show_default=False),
    ] = None,
    field: Annotated[str, typer.Option(help="Field of jsonl, parquet and datasets with text or turns.")] = "text",
    samples: Annotated[int, typer.Option(min=1, help="Sequences of text to learn from.")] = 256,
    context: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Decides the order in which text is taken.")] = 0,
    target_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="For --recipe auto: bytes of tensors at most, like 5GB.", show_default=False),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(metavar="BITS", help="For --recipe auto: bits per weight at most, like 4.6.", show_default=False),
    ] = None,
    iteration: IterationOption = None,
    config: ConfigOption = None,
    vocab_size: VocabularyOption = None,
    tokenizer: TokenizerOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done and write nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an unfinished run of the same kind.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier run of zaya wrote at DST.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads (default: cores + 1).", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Quantize a ZAYA1 checkpoint for vLLM: experts and attention by a recipe, everything protected byte for byte."""
    from zaya_tools.calibration.data import Choice
    from zaya_tools.checkpoint.destination import check_destination, settle
    from zaya_tools.checkpoint.opening import Reading
    from zaya_tools.checkpoint.plan import parse_size
    from zaya_tools.quantization.calibrated import Calibration, needs_calibration
    from zaya_tools.quantization.conversion import plan_quantization
    from zaya_tools.quantization.conversion import quantize as run
    from zaya_tools.quantization.group import joined, own_device
    from zaya_tools.quantization.recipe import AUTO

    group = context_.with_resource(joined())
    out = Output(as_json, silent=not group.leads)
    choice = Choice(data, field, samples, context, seed) if data else None
    calibration = Calibration(statistics=stats, choice=choice, tokenizer=str(tokenizer) if tokenizer else None)
    reading = Reading(iteration, config, vocab_size, tokenizer)
    planning: dict[str, Any] = {
        "max_shard_size": max_shard_size, "tensor_parallel": tensor_parallel, "expert_layout": expert_layout.value,
        "target_vllm": target_vllm,
    }  # fmt: skip
    with ExitStack() as kept:  # what auto has found is there until the checkpoint is
        auto = None
        if recipe == AUTO:
            target = (parse_size(target_size) if target_size is not None else None, target_bits)
            options = {"device": device, "resume": resume, "force": force, "reading": reading, "planning": planning}
            auto = group.lead(lambda: _choose(out, kept, source, destination, calibration, target, **options))
        elif target_size is not None or target_bits is not None:
            raise ZayaError("a target size is for --recipe auto alone", "add --recipe auto, or leave the target out")
        work = plan_quantization(source, auto.recipe if auto else recipe, reading=reading, **planning)
        for warning in _warnings(work, calibration, dry_run=dry_run, kernels=device in ("auto", "cpu")):
            out.warn(warning)
        group.run(lambda: own_device(device, group))  # known to be there before anything else is said
        if auto is not None:
            show_choice(out, auto)
        if dry_run:
            if not resume:
                check_destination(settle(destination), work.source.folder, force)
            show_plan(out, work, auto)
            out.document({"destination": str(destination), "written": False, **document(work), **_chosen(auto)})
            return
        learning = needs_calibration(work)
        # Where blocks are worked on first, they are what takes the time.
        with ExitStack() as stack:
            step = stack.enter_context(out.counting("learning from inputs")) if learning else None
            label = f"quantizing to {work.recipe.name}"
            advance = None if learning else stack.enter_context(out.progress(label, work.plan.read_bytes))
            result = run(
                source, destination, device=device, resume=resume, force=force, workers=workers, advance=advance,
                planned=work, calibration=calibration,
                report=(lambda stage: step(stage.block + 1, stage.blocks, stage.name)) if step else None,
                files=auto.files if auto else None, warn=out.warn,
            )  # fmt: skip
        measured = facts(result) if not result.already_complete else recorded(result.destination)
        out.document({
            "destination": str(destination), "written": True, "already_complete": result.already_complete,
            **document(work), "quantized": measured, **_chosen(auto),
        })  # fmt: skip
        if result.already_complete:
            out.heading(f"{destination} is already complete")
            return
        show_result(out, work, destination, measured)


def _warnings(work: Quantization, calibration: Calibration, *, dry_run: bool, kernels: bool) -> Iterator[str]:
    from zaya_tools.quantization.calibrated import lacking, needs_calibration
    from zaya_tools.quantization.native import missing
    from zaya_tools.quantization.recipe import AUTO

    yield from work.warnings
    if work.recipe.name != AUTO and not needs_calibration(work) and (calibration.statistics or calibration.choice):
        yield f"recipe {work.recipe.name} takes nothing from data: --stats and --data are not used"
    error = lacking(work, calibration)
    if dry_run and error is not None:
        yield f"{error.message}: {error.hint}"
    if not dry_run and kernels and work.resolved.schemes and (reason := missing()):
        yield f"the fast kernels could not be built, torch is several times slower: {reason}"


def _choose(
    out: Output, kept: ExitStack, source: str, destination: Path, calibration: Calibration,
    target: tuple[int | None, float | None], **options: Any,
) -> Auto:  # fmt: skip
    from zaya_tools.quantization.auto import choosing

    with out.counting("weighing schemes") as step:
        return kept.enter_context(choosing(
            source, destination, calibration, size=target[0], bits=target[1], **options,
            report=lambda stage: step(stage.block + 1, stage.blocks, stage.name),
        ))  # fmt: skip


def show_choice(out: Output, auto: Auto) -> None:
    """What was chosen for every unit, and what the other schemes would have cost there."""
    from zaya_tools.quantization.auto import explanation

    rows = [
        [role, str(block), scheme, size(option.nbytes), f"{option.damage:.2g}",
         ", ".join(f"{other.scheme or 'full'} {other.damage:.2g}" for other in unit.options if other != option)]
        for role, block, scheme, unit, option in explanation(auto)
    ]  # fmt: skip
    out.table("Chosen, by what it costs", ["role", "block", "scheme", "bytes", "KL", "KL of the others"], rows)
    out.text(f"{size(auto.chosen.nbytes)} of tensors, expected KL {auto.chosen.damage:.2g} nats a token")


def _chosen(auto: Auto | None) -> dict[str, Any]:
    return {"auto": {**auto.as_dict(), "recipe": auto.text}} if auto else {}


def facts(result: Converted) -> dict[str, Mapping[str, Any]]:
    """What was measured on every quantized weight."""
    return {name: entry for digest in result.digests.values() for name, entry in digest.facts.items()}


def recorded(folder: Path) -> dict[str, Any]:
    """What the manifest of a finished quantization says was measured."""
    from zaya_tools.checkpoint.sidefiles import MANIFEST
    from zaya_tools.checkpoint.source import read_json

    found = read_json(folder / MANIFEST).get("quantized")
    return found if isinstance(found, dict) else {}


def show_plan(out: Output, work: Quantization, auto: Auto | None) -> None:
    """What would be done, before anything is."""
    show_rules(out, work)
    show_roles(out, work)
    show_totals(out, work)
    out.text(auto.text if auto else "")


def show_rules(out: Output, work: Quantization) -> None:
    """Every rule of the recipe with what it matched."""
    rows = [
        [str(match.rule), match.rule.observer or "-", f"{match.matched:,}", f"{match.decided:,} of {match.of:,}"]
        for match in work.resolved.rules
    ]
    out.table(f"Recipe {work.recipe.name}", ["rule", "scales by", "matrices matched", "decided"], rows)


def show_roles(out: Output, work: Quantization) -> None:
    """What happens to each role, and what that does to the size."""
    from zaya_tools.quantization.summary import summarize

    found = summarize(work)
    rows = []
    for entry in found.roles:
        kept = "as it is (protected)" if entry.protected else "as it is"
        counts = f"{entry.quantized:,}/{entry.matrices:,}" if entry.matrices else "-"
        rows.append([entry.role.value, ", ".join(entry.schemes) or kept, counts, size(entry.nbytes)])
    out.table(f"{work.name} to {work.recipe.name}", ["role", "stored as", "matrices quantized", "bytes"], rows)
    out.text(
        f"{size(found.before)} before, {size(found.after)} after, {found.bits:.2f} bits per weight; "
        f"largest tensor-parallel size {work.resolved.max_tensor_parallel}"
    )


def show_result(out: Output, work: Quantization, destination: Path, measured: Measured) -> None:
    """What was written and how far it is from the source."""
    from zaya_tools.quantization.summary import decibels, typical, worst

    out.heading(f"wrote {destination}")
    show_roles(out, work)
    errors = typical(measured)
    if errors is not None:
        rows = [
            [name, entry["scheme"], f"{entry['relative_error']:.4f}", decibels(entry),
             f"{100 * entry['clipped_fraction']:.3f} %"]
            for name, entry in worst(measured)
        ]  # fmt: skip
        out.table("Largest errors", ["weight", "scheme", "relative error", "SQNR, dB", "clipped"], rows)
        out.text(f"relative error of a weight: {errors[0]:.4f} in the median, {errors[1]:.4f} at most")
    show_totals(out, work)


def document(work: Quantization) -> dict[str, Any]:
    """The quantization as plain values, stable in names and order."""
    from zaya_tools.quantization.summary import summarize

    return {**summary(work), "recipe": work.resolved.as_dict(), "sizes": summarize(work).as_dict()}
