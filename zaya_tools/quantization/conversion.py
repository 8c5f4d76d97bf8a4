"""`zaya quantize`: any layout to a native checkpoint in fewer bits, in one streaming pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zaya_tools.architecture import Architecture, native_config
from zaya_tools.checkpoint import skip
from zaya_tools.checkpoint.conversion import check_biases, check_tied_head, plan_notes
from zaya_tools.checkpoint.destination import check_destination, settle
from zaya_tools.checkpoint.hub import locate
from zaya_tools.checkpoint.opening import Reading, open_checkpoint
from zaya_tools.checkpoint.plan import Shard, build_plan, parse_size
from zaya_tools.checkpoint.pump import ShardDigest
from zaya_tools.checkpoint.run import Advance, Conversion, Converted, Extras, complete, execute
from zaya_tools.checkpoint.sidefiles import side_files
from zaya_tools.checkpoint.writer import recover
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.layouts.match import match, require
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.parameters import Role, parameters
from zaya_tools.quantization.card import model_card
from zaya_tools.quantization.planning import QuantizedOutput, regrouping
from zaya_tools.quantization.recipe import Recipe, load_recipe
from zaya_tools.quantization.resolve import Resolved, resolve
from zaya_tools.quantization.serving import quantization_config

if TYPE_CHECKING:
    from zaya_tools.quantization.calibrated import Calibration, Prepared, Report

ExpertLayout = Literal["per-expert", "stacked"]
CARD = "README.md"


@dataclass(frozen=True)
class Quantization(Conversion):
    """A quantization that is planned and checked, before a byte is written."""

    recipe: Recipe
    resolved: Resolved

    @cached_property
    def matrices(self) -> Mapping[str, QuantizedOutput]:
        """What is quantized, by the name of the weight: the tensor that has its values."""
        found = (output for output in self.plan.outputs() if isinstance(output, QuantizedOutput) and output.bulk)
        return {output.matrix.name: output for output in found}


def plan_quantization(
    source: str | Path,
    recipe: str | Path | Recipe,
    *,
    max_shard_size: str | int = "5GB",
    tensor_parallel: int = 1,
    expert_layout: ExpertLayout = "per-expert",
    target_vllm: str | None = None,
    reading: Reading | None = None,
) -> Quantization:
    """Read a checkpoint's headers and plan its quantization; nothing is written.

    `source` is a folder or file of any layout or a hub id, `recipe` a name, a file or a Recipe, `reading` what
    completes the source. Raises a ZayaError for everything that would stop the run, bad numbers aside.
    """
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    limit = parse_size(str(max_shard_size))
    if expert_layout not in ("per-expert", "stacked"):
        raise ZayaError(f"unknown expert layout {expert_layout!r}", "choose per-expert or stacked")
    folder, name = locate(str(source))
    opened = open_checkpoint(folder, reading)
    found = require(match(opened.tensors, opened.config, str(folder)))
    if found.quantized:
        raise LayoutError(
            f"{name} is quantized already: scales on top of scales would cost quality twice",
            "quantize the full-precision checkpoint that it was made from",
        )
    resolved = resolve(chosen, found.architecture, tensor_parallel=tensor_parallel, target_vllm=target_vllm)
    stacked = expert_layout == "stacked" or not _quantizes_experts(resolved, found.architecture)
    written = replace(found.architecture, clamp_temp=False)
    plan = build_plan(
        found, NATIVE if stacked else NATIVE_PER_EXPERT, written, max_shard_bytes=limit,
        regroup=regrouping(resolved.decisions, stacked),
    )  # fmt: skip
    config = native_config(written)
    stated = quantization_config(resolved, target_vllm, stacked=stacked)
    if stated:
        config["quantization_config"] = stated
    classes = skip.skip_classes(found)
    check_biases(found, classes)
    check_tied_head(found)
    return Quantization(
        source=opened,
        name=name,
        found=found,
        plan=plan,
        config=config,
        sides=side_files(opened.side_folder, opened.weight_names),
        options={
            "recipe": resolved.as_dict(),
            "max_shard_bytes": limit,
            "tensor_parallel": tensor_parallel,
            "expert_layout": expert_layout,
            "target_vllm": target_vllm,
            **opened.stamp,
        },
        skip=classes,
        notes=plan_notes(plan, opened, found),
        warnings=(*_idle_rules(resolved), *skip.warnings(classes)),
        recipe=chosen,
        resolved=resolved,
    )


def _idle_rules(resolved: Resolved) -> list[str]:
    """Rules that match, but nowhere decide."""
    return [
        f"rule `{match.rule}` decides nothing: other rules win wherever it matches"
        for match in resolved.rules
        if not match.decided
    ]


def _quantizes_experts(resolved: Resolved, architecture: Architecture) -> bool:
    decided = (resolved.decisions.get(p.name) for p in parameters(architecture) if p.role is Role.EXPERT)
    return any(decision is not None and decision.scheme is not None for decision in decided)


def quantize(
    source: str | Path,
    destination: str | Path,
    recipe: str | Path | Recipe = "fp8",
    *,
    device: str = "auto",
    max_shard_size: str | int = "5GB",
    tensor_parallel: int = 1,
    expert_layout: ExpertLayout = "per-expert",
    target_vllm: str | None = None,
    resume: bool = False,
    force: bool = False,
    workers: int | None = None,
    advance: Advance | None = None,
    reading: Reading | None = None,
    planned: Quantization | None = None,
    calibration: Calibration | None = None,
    report: Report | None = None,
    files: Mapping[str, bytes] | None = None,
    warn: Callable[[str], None] | None = None,
) -> Converted:
    """Quantize a checkpoint to `destination`, which appears whole or not at all.

    Options as in `plan_quantization`, whose result may be given as `planned`; `device` is auto, cpu, cuda or cuda:N,
    `workers` are threads (default: the cores and one more), `advance` is called with source bytes done. Recipes that
    learn from inputs take them from `calibration`, `warn` is told what the data lack, and `report` is called after each
    block; `files` are small ones to add, by name. Raises a ZayaError; after one, or after a kill, `resume=True`
    continues with the shards, or blocks, that were finished.

    Under `torchrun`, every process calls this: GPTQ's work on a block is shared out among them, each with a GPU of its
    own, and the first one writes.
    """
    import torch

    from zaya_tools.quantization.calibrated import Calibration, learn, needs_calibration, prepared, tidy
    from zaya_tools.quantization.group import joined, own_device
    from zaya_tools.quantization.native import usable
    from zaya_tools.quantization.stream import write_quantized

    if workers is not None and workers < 1:
        raise ZayaError(f"{workers} workers cannot do anything", "give at least one")
    work = planned or plan_quantization(
        source, recipe, max_shard_size=max_shard_size, tensor_parallel=tensor_parallel, expert_layout=expert_layout,
        target_vllm=target_vllm, reading=reading,
    )  # fmt: skip
    threads = workers or (os.cpu_count() or 1) + 1
    moved, tell = advance or (lambda _: None), warn or (lambda _: None)

    def write(work: Quantization, done: Prepared | None) -> Converted:
        def one(shard: Shard, file: Path) -> ShardDigest:
            made = write_quantized(done.shard(shard) if done else shard, file, threads, moved, place)
            return done.digest(made, shard) if done else made

        # A worker a core, each on its own: torch's own threads would only wait for each other.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return execute(
                work, destination, one, resume=resume, force=force, advance=moved,
                finish=lambda digests: _extras(work, digests, files or {}),
            )  # fmt: skip
        finally:
            torch.set_num_threads(before)

    def led(work: Quantization, done: Prepared | None) -> Converted:
        """What the first process writes, as all of a group know it."""

        def first() -> tuple[dict[str, ShardDigest], bool]:
            result = write(work, done)
            return result.digests, result.already_complete

        return Converted(settle(destination), work, *group.lead(first))

    with joined() as group:
        place = group.run(lambda: own_device(device, group))
        if work.resolved.schemes:
            usable(torch.empty(1, device=place))  # a wish for kernels that there are not ends the run at once
        if not needs_calibration(work):
            return led(work, None)
        given = calibration or Calibration()
        learned = group.run(lambda: learn(work, given, place, group))
        for note in learned.notes:
            tell(note)
        work = replace(work, options={**work.options, "calibration": dict(learned.record)})
        target = settle(destination)

        def is_complete() -> bool:
            recover(target)
            if resume and complete(target, work):
                tidy(work, target, learned)
                return True
            # Now, not after hours of work on the blocks.
            check_destination(target, work.source.folder, force)
            return False

        if group.lead(is_complete):
            return led(work, None)
        with prepared(work, target, learned, given, resume=resume, force=force, group=group, report=report) as done:
            return led(work, done)


def _extras(work: Quantization, digests: Mapping[str, ShardDigest], files: Mapping[str, bytes]) -> Extras:
    """The model card, and the recipe and what was measured for the manifest."""
    measured: dict[str, Mapping[str, Any]] = {}
    for digest in digests.values():
        measured |= digest.facts
    if work.matrices.keys() != measured.keys():  # the quantized set has to be the declared one
        odd = sorted(work.matrices.keys() ^ measured.keys())
        raise LayoutError(f"{odd[0]} was not quantized as the recipe says", "this is a fault of zaya: please report it")
    record = {"recipe": work.resolved.as_dict(), "quantized": dict(sorted(measured.items()))}
    return Extras({CARD: model_card(work, measured).encode(errors="replace"), **files}, record)
