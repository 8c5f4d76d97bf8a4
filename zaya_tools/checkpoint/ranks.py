"""Megatron's torch format: a pickle a model-parallel rank, put together to one model without loading any."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from blake3 import blake3

from zaya_tools.checkpoint.header import Header
from zaya_tools.checkpoint.pieces import joined
from zaya_tools.checkpoint.source import Source, read_stretch
from zaya_tools.checkpoint.statedict import (
    arguments,
    config_of,
    header_of,
    iteration,
    model_parts,
    notes_on,
    sizes_of,
    stated_in,
)
from zaya_tools.checkpoint.torchfile import read_torch_file
from zaya_tools.errors import LayoutError, SourceError, listing
from zaya_tools.layouts.config_values import Config
from zaya_tools.layouts.megatron import expert_of, layer_of, tensor_parallel_split, with_expert, with_layer
from zaya_tools.tensors import TensorInfo

FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
FILES = ("model_optim_rng.pt", "model_rng.pt")
"""What a rank's file is called: the second where each rank's optimizer is in a file of its own."""
_SAMPLE = 64 * 2**10


@dataclass(frozen=True)
class _Rank:
    """One rank: its place in the grid of tensor-, pipeline- and expert-parallel ranks, and its tensors by stage."""

    name: str
    place: tuple[int, int, int]
    stages: list[dict[str, TensorInfo]]
    args: Mapping[str, Any] | None
    iteration: int | None
    header: Header


def is_ranks(folder: Path) -> bool:
    """Whether a folder holds ranks of the torch format."""
    return folder.is_dir() and any(FOLDER.fullmatch(entry.name) for entry in folder.iterdir())


def open_ranks(folder: Path, override: Config) -> Source:
    """The model whose ranks are the folders in `folder`; `override` completes the saved arguments.

    Stages and experts are numbered through; tensor-parallel parts are joined where it is known how they were cut.
    SourceError for a rank that is missing, doubled or of another iteration, LayoutError where they do not fit.
    """
    names = sorted(entry.name for entry in folder.iterdir() if FOLDER.fullmatch(entry.name))
    first = _read(folder, names[0], (0, 0, 0))
    sizes = _sizes(first, names, folder)
    places = _grid(sizes, names, folder)
    ranks = [first, *(_read(folder, name, place) for name, place in places.items() if name != first.name)]
    _check_alike(ranks, folder)
    args = first.args or {}
    config = {**config_of(args, {name: tensor for stage in first.stages for name, tensor in stage.items()}), **override}
    if not config:
        raise SourceError(
            f"{folder}: {first.name} has no saved arguments: the model's geometry is not known",
            "--config FILE gives it: a config.json of this model",
        )
    _check_experts(ranks, sizes["ep"], config)
    tensors, replicas = _merge(ranks, sizes, config)
    count = f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''}"
    step = "" if first.iteration is None else f" of iteration {first.iteration}"
    said = f"{count}{step}; optimizer and random state were not read"
    return Source(
        folder,
        config,
        tensors,
        tuple(rank.header for rank in ranks),
        notes=(said, *notes_on({**args, **override}, tensors)) if args else (said,),
        replicas=tuple(replicas),
    )  # fmt: skip


def _read(folder: Path, name: str, place: tuple[int, int, int]) -> _Rank:
    file = next((folder / name / known for known in FILES if (folder / name / known).exists()), None)
    if file is None:
        raise SourceError(f"{folder / name} has no {FILES[0]}", "the checkpoint is not complete")
    opened = read_torch_file(file, f"{folder.name}/{name}/{file.name}")
    stages = model_parts(opened)
    everything = {name: tensor for stage in stages for name, tensor in stage.items()}
    header = header_of(opened, everything, opened.where)
    return _Rank(name, place, stages, arguments(opened), iteration(opened), header)


def _sizes(first: _Rank, names: Sequence[str], folder: Path) -> dict[str, int]:
    if first.args is None:
        if len(names) > 1:
            raise SourceError(
                f"{folder}: {first.name} has no saved arguments: of {len(names)} ranks it is not known which are "
                "pipeline stages and which hold other experts",
                "the trainer saves them as 'args' in every rank's file",
            )
        return {"tp": 1, "pp": 1, "ep": 1}
    return sizes_of(first.args)


def _grid(sizes: Mapping[str, int], names: Sequence[str], folder: Path) -> dict[str, tuple[int, int, int]]:
    """The place of every folder; SourceError when the folders are not exactly those that the sizes ask for."""
    expected = {}
    for tp, pp, ep in product(*(range(sizes[key]) for key in ("tp", "pp", "ep"))):
        stage, part = (f"_{n:03d}" if sizes[key] > 1 else "" for key, n in (("pp", pp), ("ep", ep)))
        name = f"mp_rank_{tp:02d}{stage}{part}"
        expected[name] = (tp, pp, ep)
    said = ", ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "one rank"
    missing = [name for name in expected if name not in names]
    if missing:
        raise SourceError(
            f"{folder}: {len(missing)} of {len(expected)} ranks ({said}) are missing: {listing(missing)}",
            "copy the folders of all ranks: every one holds weights of its own",
        )
    surplus = [name for name in names if name not in expected]
    if surplus:
        raise SourceError(
            f"{folder}: {listing(surplus)} is no rank of this checkpoint ({said})", "the folder mixes two checkpoints"
        )
    return expected


def _check_alike(ranks: Sequence[_Rank], folder: Path) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        if rank.iteration != first.iteration:
            raise SourceError(
                f"{folder}: {first.name} is of iteration {first.iteration}, {rank.name} of {rank.iteration}",
                "the folder mixes two checkpoints: copy all ranks of one again",
            )
        if rank.args is None or sizes_of(rank.args) != sizes_of(first.args or {}):
            raise SourceError(
                f"{folder}: {rank.name} was saved by a run with other parallel sizes than {first.name}",
                "the folder mixes two checkpoints",
            )
    named = re.fullmatch(r"iter_(\d{7,})", folder.name)
    if named and first.iteration is not None and int(named[1]) != first.iteration:
        raise SourceError(f"{folder} holds iteration {first.iteration}", "the folder has another checkpoint's name")


def _numbered(ranks: Sequence[_Rank]) -> dict[str, dict[tuple[int, int, int], TensorInfo]]:
    """Every rank's tensors under the names that they have in the whole model: name, place, tensor."""
    starts = _stage_starts(ranks)
    found: dict[str, dict[tuple[int, int, int], TensorInfo]] = {}
    for rank in ranks:
        _, pp, ep = rank.place
        each = _experts_of(rank)
        for number, stage in enumerate(rank.stages):
            for name, tensor in stage.items():
                whole = with_expert(with_layer(name, starts[pp, number]), ep * each)
                renamed = TensorInfo(whole, tensor.dtype, tensor.shape, tensor.file, tensor.start, tensor.nbytes)
                if rank.place in found.setdefault(whole, {}):
                    raise SourceError(f"{rank.name}: {whole} is in two pipeline stages", "the rank's file is damaged")
                found[whole][rank.place] = renamed
    return found


def _stage_starts(ranks: Sequence[_Rank]) -> dict[tuple[int, int], int]:
    """The first half-layer of every (pipeline rank, virtual stage): virtual stages go round the ranks in turn."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for number, stage in enumerate(rank.stages):
            layers = sorted({layer for name in stage if (layer := layer_of(name)) is not None})
            key = (number, rank.place[1])
            if layers != list(range(len(layers))):
                raise LayoutError(
                    f"{rank.name} has half-layers {layers[:4]}..: a stage's are numbered from 0 without a gap",
                    "a half-layer is missing from this rank's file",
                )
            if counts.setdefault(key, len(layers)) != len(layers):
                raise LayoutError(f"{rank.name} has {len(layers)} half-layers, another rank of its stage {counts[key]}")
    starts, start = {}, 0
    for number, pp in sorted(counts):
        starts[pp, number] = start
        start += counts[number, pp]
    return starts


def _experts_of(rank: _Rank) -> int:
    """How many experts every MoE half-layer of a rank has; LayoutError unless they are 0 .. n - 1 in each."""
    held: dict[tuple[int, int], set[int]] = {}
    for number, stage in enumerate(rank.stages):
        for name in stage:
            expert, layer = expert_of(name), layer_of(name)
            if expert is not None and layer is not None:
                held.setdefault((number, layer), set()).add(expert)
    count = max((len(experts) for experts in held.values()), default=0)
    for (_, layer), experts in held.items():
        if experts != set(range(count)):
            raise LayoutError(
                f"{rank.name}: half-layer {layer} has experts {listing([str(e) for e in sorted(experts)])}, "
                f"expected 0 to {count - 1}",
                "a rank's experts are numbered from 0, the same in every half-layer",
            )
    return count


def _merge(
    ranks: Sequence[_Rank], sizes: Mapping[str, int], config: Config
) -> tuple[dict[str, TensorInfo], list[tuple[TensorInfo, TensorInfo]]]:
    # Where nothing else is said, what the trainer calls attention heads are the query heads.
    stated = {"query_heads": config.get("num_attention_heads"), **stated_in(config)}
    tensors: dict[str, TensorInfo] = {}
    replicas: list[tuple[TensorInfo, TensorInfo]] = []
    for name, places in _numbered(ranks).items():
        slices: dict[int, TensorInfo] = {}
        for (tp, _, _), tensor in sorted(places.items()):
            if tp in slices:
                replicas.append((slices[tp], tensor))
            else:
                slices[tp] = tensor
        if len(slices) < sizes["tp"]:
            raise LayoutError(f"{name} is in {len(slices)} of {sizes['tp']} tensor-parallel ranks")
        parts = [slices[tp] for tp in sorted(slices)]
        whole = _whole(name, parts, stated) if len(parts) > 1 else parts[0]
        if whole is parts[0]:
            replicas += [(whole, part) for part in parts[1:]]
        tensors[name] = whole
    for first, other in replicas:
        if (first.dtype, first.shape) != (other.dtype, other.shape):
            raise LayoutError(
                f"{first.name} is {first.dtype} {list(first.shape)} in {first.file.parent.name}, {other.dtype} "
                f"{list(other.shape)} in {other.file.parent.name}",
                "ranks hold it in common, so it must be the same in all of them",
            )
    return tensors, replicas


def _whole(name: str, parts: Sequence[TensorInfo], stated: Mapping[str, Any]) -> TensorInfo:
    """One tensor out of its tensor-parallel ranks': the first where all hold the whole, else their parts joined."""
    shapes = {part.shape for part in parts}
    if len(shapes) > 1 or len({part.dtype for part in parts}) > 1:
        raise LayoutError(f"{name} has different shapes or dtypes in the tensor-parallel ranks: {sorted(shapes)}")
    known = tensor_parallel_split(name)
    if known is None:
        return parts[0]  # a cut one would have a shape that the table refuses
    axis, fields, stacks = known
    shape = parts[0].shape
    full = stacks
    for field in fields:
        if not stated.get(field):
            raise LayoutError(
                f"{name} is in {len(parts)} tensor-parallel ranks, and the saved arguments do not say {field}",
                "--config FILE completes them",
            )
        full *= stated[field]
    if len(shape) <= axis or shape[axis] * len(parts) != full or shape[axis] % stacks:
        if len(shape) > axis and shape[axis] == full:
            return parts[0]
        raise LayoutError(
            f"{name} has shape {list(shape)} in each of {len(parts)} tensor-parallel ranks, which does not make "
            f"{full:,} along axis {axis}",
            "how this tensor was cut is not known: let the trainer save with tensor-parallel size 1",
        )
    return joined(name, parts, axis, stacks)


def _check_experts(ranks: Sequence[_Rank], size: int, config: Config) -> None:
    """Every expert-parallel rank has its share, and none the share of another."""
    total = stated_in(config).get("experts")
    counts = {rank.name: count for rank in ranks if (count := _experts_of(rank))}
    for name, count in counts.items():
        if count != next(iter(counts.values())) or total not in (None, count * size):
            share = f"{total} experts over {size} ranks" if total else f"the first rank's {next(iter(counts.values()))}"
            raise LayoutError(
                f"{name} holds {count} experts of a half-layer, which does not fit {share}",
                "an expert would be there twice, or not at all",
            )
    seen: dict[tuple[int, int, str], str] = {}
    for rank in ranks if size > 1 else ():
        sample = _sample(rank)
        key = (rank.place[0], rank.place[1], sample)
        if sample and key in seen:
            raise SourceError(
                f"{seen[key]} and {rank.name} hold the same experts",
                "one rank's file was copied to the other's place: copy all ranks again",
            )
        seen[key] = rank.name


def _sample(rank: _Rank) -> str:
    """A digest of the first bytes of a rank's first expert; empty where it has none, or zeros."""
    stage = next((stage for stage in rank.stages if any(expert_of(name) == 0 for name in stage)), None)
    if stage is None:
        return ""
    tensor = stage[min(name for name in stage if expert_of(name) == 0)]
    data = read_stretch(tensor, 0, min(_SAMPLE, tensor.nbytes))
    return blake3(data.data).hexdigest() if data.any() else ""
