"""`zaya convert`: any layout to native or back to raw, bit-exact, in bounded memory, published whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Literal

from zaya_tools.architecture import native_config
from zaya_tools.checkpoint import skip
from zaya_tools.checkpoint.carried import carried_quantization
from zaya_tools.checkpoint.handover import as_run, is_run
from zaya_tools.checkpoint.hub import locate
from zaya_tools.checkpoint.opening import Reading, open_checkpoint
from zaya_tools.checkpoint.plan import BAKE, KEEP, Plan, Shard, build_plan, parse_size, target_layout
from zaya_tools.checkpoint.pump import ShardDigest, report_nonfinite, write_shard
from zaya_tools.checkpoint.run import Advance, Conversion, Converted, execute
from zaya_tools.checkpoint.sidefiles import side_files
from zaya_tools.checkpoint.source import Source, same_bytes
from zaya_tools.checkpoint.torchwriter import TorchShard, write_torch_shard
from zaya_tools.dtypes import NAMES
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.match import Match, match, require
from zaya_tools.layouts.megatron import MEGATRON
from zaya_tools.layouts.megatron_config import arguments_of
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config
from zaya_tools.parameters import Role, parameters

Target = Literal["native", "raw", "megatron"]


def plan_conversion(
    source: str | Path,
    *,
    to: Target = "native",
    dtype: str = KEEP,
    max_shard_size: str | int = "5GB",
    reading: Reading | None = None,
) -> Conversion:
    """Read a checkpoint's headers and plan its conversion; nothing is written.

    `source` is a folder, a file or a hub id, `dtype` one of keep, bfloat16, float16, float32, `max_shard_size` bytes or
    a size like "5GB", `reading` what completes the source. Raises a ZayaError for everything that would stop the
    conversion, bad numbers aside.
    """
    if to not in ("native", "raw", "megatron"):
        raise ZayaError(f"unknown layout {to!r}", "choose native, raw or megatron")
    if dtype != KEEP and dtype not in NAMES:
        raise ZayaError(f"unknown dtype {dtype!r}", f"choose {KEEP}, {', '.join(NAMES)}")
    limit = parse_size(str(max_shard_size))
    folder, name = locate(str(source))
    opened = open_checkpoint(folder, reading)
    found = require(match(opened.tensors, opened.config, str(folder)))
    work = plan_match(opened, found, name, to=to, dtype=dtype, max_shard_bytes=limit)
    check_tied_head(found)
    return work


def plan_match(
    opened: Source,
    found: Match,
    name: str,
    *,
    to: Target = "native",
    dtype: str = KEEP,
    max_shard_bytes: int = 5 * 10**9,
) -> Conversion:
    """Plan the conversion of an opened checkpoint whose match has no problems, from headers and small tensors alone."""
    _refuse_same_layout(opened, found, to, dtype, name)
    geometry = found.architecture
    written = replace(
        geometry,
        clamp_temp=geometry.clamp_temp and to != "native",
        dtype=geometry.dtype if dtype == KEEP else dtype,
    )
    target = _target(found, to)
    plan = build_plan(found, target, written, dtype=NAMES.get(dtype, KEEP), max_shard_bytes=max_shard_bytes)
    if to == "megatron":
        plan = as_run(plan, written)
        config = arguments_of(written)
    else:
        config = raw_config(written) if to == "raw" else native_config(written)
    quantization = carried_quantization(found, opened.config)
    if quantization is not None:
        config["quantization_config"] = quantization
    classes = skip.skip_classes(found)
    check_biases(found, classes)
    return Conversion(
        source=opened,
        name=name,
        found=found,
        plan=plan,
        config=config,
        sides=side_files(opened.side_folder, opened.weight_names),
        options={"to": to, "dtype": dtype, "max_shard_bytes": max_shard_bytes, **opened.stamp},
        skip=classes,
        notes=plan_notes(plan, opened, found),
        warnings=tuple(skip.warnings(classes)),
    )


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: Target = "native",
    dtype: str = KEEP,
    max_shard_size: str | int = "5GB",
    resume: bool = False,
    force: bool = False,
    workers: int | None = None,
    advance: Advance | None = None,
    reading: Reading | None = None,
    planned: Conversion | None = None,
) -> Converted:
    """Convert a checkpoint to `destination`, which appears whole or not at all.

    Options as in `plan_conversion`, whose result may be given as `planned`; `workers` are threads (default: the
    cores and two more), `advance` is called with source bytes done. Raises a ZayaError; after one, or after a
    kill, `resume=True` continues with the shards that were finished.
    """
    if workers is not None and workers < 1:
        raise ZayaError(f"{workers} workers cannot do anything", "give at least one")
    work = planned or plan_conversion(source, to=to, dtype=dtype, max_shard_size=max_shard_size, reading=reading)
    threads = workers or (os.cpu_count() or 1) + 2
    report = advance or (lambda _: None)

    def write(shard: Shard, file: Path) -> ShardDigest:
        if isinstance(shard, TorchShard):
            return write_torch_shard(shard, file, report)
        return write_shard(shard, file, threads, report)

    return execute(work, destination, write, resume=resume, force=force, advance=report)


def _target(found: Match, to: str) -> Layout:
    return {"raw": RAW, "megatron": MEGATRON}.get(to) or target_layout(found)


def _refuse_same_layout(opened: Source, found: Match, to: str, dtype: str, name: str) -> None:
    native = found.layout in (NATIVE, NATIVE_PER_EXPERT)
    target = _target(found, to)
    stored = all(header.file.suffix == ".safetensors" for header in opened.headers)
    if found.layout is target and stored and not found.renamed and dtype == KEEP:
        other = "go back with --to raw" if native else "convert it with --to native"
        raise LayoutError(f"{name} is already {to}; nothing was written", f"use it as it is, or {other}")


def check_biases(found: Match, classes: Sequence[skip.SkipClass]) -> None:
    """NonFiniteError for balancing biases that are no numbers: known before the start, since they are read."""
    broken = {c.block for c in classes if not (isfinite(c.bias) and isfinite(c.largest_expert_bias))}
    for parameter in parameters(found.architecture):
        tensor = found.bound[parameter.name][0].tensor
        if parameter.role is Role.BALANCING and parameter.block in broken and tensor is not None:
            report_nonfinite(tensor)


def check_tied_head(found: Match) -> None:
    """LayoutError where a head that is stored though tied is not the embedding."""
    if found.head_alias is None:
        return
    embedding = found.bound["model.embed_tokens.weight"][0].tensor
    if embedding is None or not same_bytes(found.head_alias, embedding):
        raise LayoutError(
            "lm_head.weight differs from the embedding although the config ties them",
            "set tie_word_embeddings to false in config.json if the head was trained apart",
        )


def plan_notes(plan: Plan, source: Source, found: Match) -> tuple[str, ...]:
    """What is worth saying about a source, its tensors, and a plan that is otherwise a renaming."""
    notes = [*source.notes, *found.notes]
    if any(output.operation == BAKE for output in plan.outputs()):
        notes.append("clamp_temp: exp(clamp(temp, 1e-7, 2)) was baked into the key temperatures, in float32")
    if is_run(plan):
        notes.append("what only a trainer keeps (balancing optimiser, first router's scale) is as when training begins")
    for ignored in source.ignored:
        notes.append(f"{ignored} is not part of the checkpoint (its index does not name it) and was left alone")
    return tuple(notes)
