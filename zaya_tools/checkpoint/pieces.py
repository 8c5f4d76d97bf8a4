"""Tensors that are put together from parts: of ranks, of the chunks of a distributed checkpoint, of two matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from pathlib import Path

from zaya_tools.dtypes import SIZES
from zaya_tools.errors import LayoutError, SourceError
from zaya_tools.tensors import NOWHERE, Chunk, TensorInfo

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk, along every axis."""


def joined(name: str, parts: Sequence[TensorInfo], axis: int, stacks: int = 1) -> TensorInfo:
    """The concatenation along axis 0 or 1 of equal contiguous parts.

    With two stacks (axis 0 only) it is that of all first halves, then that of all second halves.
    """
    first = parts[0]
    shape = list(first.shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    row = prod(first.shape[1:]) * SIZES[first.dtype]
    chunks = []
    if axis == 0:
        pitch, each = row, first.shape[0] // stacks
        for stack in range(stacks):
            for number, part in enumerate(parts):
                at = (stack * len(parts) + number) * each
                chunks.append(Chunk(part.file, part.start + stack * each * row, at, each, 0, row))
    else:
        pitch = row * len(parts)
        chunks = [Chunk(part.file, part.start, 0, part.shape[0], n * row, row) for n, part in enumerate(parts)]
    return _chunked(name, first.dtype, tuple(shape), tuple(chunks), pitch)


def assembled(name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[Box, Path, int]]) -> TensorInfo:
    """A tensor out of chunks (box, file, first byte), each stored row-major.

    SourceError unless the boxes fill the tensor exactly once, LayoutError for a cut along more than two axes.
    """
    if any(len(entry) != len(shape) for box, _, _ in parts for entry in box):
        raise SourceError(f"{name}: chunks of another rank than the tensor's", "the checkpoint is damaged")
    inside = all(o >= 0 and s >= 0 and o + s <= n for (offsets, sizes), _, _ in parts
                 for o, s, n in zip(offsets, sizes, shape, strict=True))  # fmt: skip
    covered = sum(prod(sizes) for (_, sizes), _, _ in parts)
    overlap = covered != prod(shape) or any(_overlap(one[0], other[0]) for one, other in combinations(parts, 2))
    if not inside or overlap:
        raise SourceError(
            f"{name} of shape {list(shape)}: {len(parts)} chunks hold {covered:,} of its {prod(shape):,} values, "
            "or hold some twice",
            "a rank's file is missing, or files of two checkpoints are mixed",
        )
    if len(parts) == 1:
        ((_, file, start),) = parts
        return TensorInfo(name, dtype, shape, file, start, prod(shape) * SIZES[dtype])
    cut = [axis for axis in range(len(shape)) if any(box[1][axis] != shape[axis] for box, _, _ in parts)]
    last = cut[-1]
    if any(axis not in (0, last) for axis in cut):
        raise LayoutError(f"{name} is cut along axes {cut}: only cuts along the first and one more are known")
    inner, size = prod(shape[last + 1 :]), SIZES[dtype]
    between = prod(shape[1:last])
    chunks = []
    for (offsets, sizes), file, start in parts:
        row, rows = (offsets[0] * between, sizes[0] * between) if last else (offsets[0], sizes[0])
        column, width = (offsets[last] * inner * size, sizes[last] * inner * size) if last else (0, inner * size)
        if rows and width:
            chunks.append(Chunk(file, start, row, rows, column, width))
    pitch = (shape[last] if last else 1) * inner * size
    return _chunked(name, dtype, shape, tuple(chunks), pitch)


def _overlap(one: Box, other: Box) -> bool:
    pairs = zip(*one, *other, strict=True)
    return all(max(o, p) < min(o + s, p + t) for o, s, p, t in pairs)


def _chunked(name: str, dtype: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...], pitch: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, chunks[0].file, NOWHERE, prod(shape) * SIZES[dtype], chunks, pitch)


def first_rows(tensor: TensorInfo, rows: int) -> TensorInfo:
    """The first `rows` rows of a tensor."""
    shape = (rows, *tensor.shape[1:])
    return replace(tensor, shape=shape, nbytes=prod(shape) * SIZES[tensor.dtype])


_GATE = re.compile(r"(.*\.mlp\.experts)\.w1(?:\.weight)?$")


def with_fused_gates(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Tensors with expert stacks in three matrices (w1 gate, w3 up, w2 down, as prime-rl's trainer has them) in two.

    w1 and w3 [experts, width, hidden] become gate_up_proj [experts, 2 width, hidden]; LayoutError where they do not
    fit one another. Where the names are others, nothing changes.
    """
    result = dict(tensors)
    for name, gate in tensors.items():
        found = _GATE.fullmatch(name)
        if not found:
            continue
        others = [name.replace(".w1", f".{matrix}") for matrix in ("w3", "w2")]
        absent = [other for other in others if other not in tensors]
        if absent:
            raise LayoutError(f"{name} is there without {absent[0]}", "an expert has three matrices: w1, w2 and w3")
        up, down = (tensors[other] for other in others)
        experts = found[1]
        fused = _beside(f"{experts}.gate_up_proj", gate, up)
        for old in (name, *others):
            del result[old]
        result[fused.name] = fused
        result[f"{experts}.down_proj"] = replace(down, name=f"{experts}.down_proj")
    return result


def _beside(name: str, gate: TensorInfo, up: TensorInfo) -> TensorInfo:
    if gate.shape != up.shape or gate.dtype != up.dtype or len(gate.shape) != 3:
        raise LayoutError(
            f"{gate.name} is {gate.dtype} {list(gate.shape)} but {up.name} is {up.dtype} {list(up.shape)}",
            "gate and up of an expert have one shape",
        )
    experts, rows, columns = gate.shape
    half = rows * columns * SIZES[gate.dtype]
    chunks = []
    for number, part in enumerate((gate, up)):
        own = part.chunks or (Chunk(part.file, part.start, 0, experts, 0, half),)
        if part.chunks and part.pitch != half:
            raise LayoutError(f"{part.name} is cut within its experts: only cuts between experts are known")
        chunks += [replace(chunk, column=chunk.column + number * half) for chunk in own]
    return _chunked(name, gate.dtype, (experts, 2 * rows, columns), tuple(chunks), 2 * half)
