"""Whether quantized numbers fill the range that they are stored in: a scale that is too large or small forbids it.

Of each matrix only a few rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.findings import Finding, about
from zaya_tools.evaluation.quantized import CHECK, Matrix
from zaya_tools.evaluation.stored import Decoder, Slab

SAMPLE_ROWS = 16
Numbers = npt.NDArray[Any]

IDLE = 0.25
"""Half the rows (groups, blocks) of a matrix have to reach this part of the range of the numbers they are stored in.

Scales from the largest value reach all of it, GPTQ and clipped ones more than half.
"""

CROWDED = {True: 0.5, False: 0.2}
"""Part of the numbers, by "has at most 4 bits", that may sit at the end of the range before the scale is too small."""


@dataclass(frozen=True)
class _Use:
    """How a sample of a matrix fills its range: the middle row's part, and the part of numbers at its end."""

    middle: float
    crowded: float


def check_ranges(ready: Iterable[Matrix]) -> tuple[list[Finding], dict[str, Any] | None]:
    """Findings about the ranges of quantized matrices, and how much of them the middle row of each uses."""
    uses: list[tuple[Matrix, _Use]] = []
    unreadable = []
    for matrix in ready:
        if matrix.decoder is None:
            continue
        try:
            use = _use(matrix.slab, matrix.decoder)
        except LayoutError as error:
            unreadable.append((matrix.slab.name, error.message))
            continue
        if use is not None:
            uses.append((matrix, use))
    findings = list(_range(uses))
    if unreadable:
        findings.append(_fail("matrix cannot be decoded", "matrices cannot be decoded", unreadable))
    middles = [use.middle for _, use in uses]
    if not middles:
        return findings, None
    return findings, {
        "matrices": len(middles),
        "median": round(median(middles), 4),
        "min": round(min(middles), 4),
    }


def _fail(one: str, more: str, items: Sequence[tuple[str, str]]) -> Finding:
    return about(CHECK, "fail", one, more, items)


def top(decoder: Decoder) -> float:
    """The largest number of a scheme, in steps of its scale."""
    from compressed_tensors.quantization.utils import calculate_range

    return float(calculate_range(decoder.scheme.weights, "cpu")[1])


def _use(slab: Slab, decoder: Decoder) -> _Use | None:
    """How two samples of rows fill their range; None where they hold zeros only."""
    reaches, crowds = [], []
    for first in sorted({0, slab.rows // 2}):
        rows = decoder.levels(slab, first, min(first + SAMPLE_ROWS, slab.rows))
        # numpy: on so few numbers torch's threads cost a hundred times what they save.
        reach, crowded = _reach(_grouped(rows, decoder).numpy(), decoder)
        reaches.append(reach)
        crowds.append(crowded)
    reach, crowded = np.concatenate(reaches), np.concatenate(crowds)
    if not len(reach):
        return None
    single = decoder.scheme.weights.strategy == "tensor"
    return _Use(float(reach.max() if single else np.median(reach)), float(crowded.mean()))


def _reach(groups: Numbers, decoder: Decoder) -> tuple[Numbers, Numbers]:
    """Of every group that is not all zeros: the part of the range that it spans, the part of it at the range's end."""
    weights, largest = decoder.scheme.weights, top(decoder)
    groups = groups[groups.any(axis=1)]
    low, high = groups.min(axis=1, initial=0), groups.max(axis=1, initial=0)
    if weights.symmetric:
        return np.maximum(-low, high) / largest, (np.abs(groups) >= largest).mean(axis=1)
    reach = (high - low) / (2**weights.num_bits - 1)
    ends = (groups == low[:, None]) | (groups == high[:, None])
    return reach, ends.mean(axis=1) * (reach >= 1)


def _grouped(rows: torch.Tensor, decoder: Decoder) -> torch.Tensor:
    """[rows, columns] as [scales that the sample touches, numbers of each]."""
    weights = decoder.scheme.weights
    if weights.strategy in ("group", "tensor_group"):
        return rows.reshape(-1, weights.group_size)
    if weights.strategy == "block":
        width = weights.block_structure[1]
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % width))
        return padded.reshape(len(rows), -1, width).transpose(0, 1).reshape(-1, len(rows) * width)
    return rows.reshape(1, -1) if weights.strategy == "tensor" else rows


def _range(uses: Iterable[tuple[Matrix, _Use]]) -> Iterator[Finding]:
    idle, crowded = [], []
    for matrix, use in uses:
        if matrix.decoder is None:
            continue
        weights = matrix.decoder.scheme.weights
        # A tensor's one scale is set by its largest outlier, which a few rows do not show.
        limit = IDLE / 8 if weights.strategy == "tensor" else IDLE
        if use.middle < limit:
            idle.append((matrix.slab.name, f"{use.middle:.2%} of the range"))
        if use.crowded > CROWDED[weights.num_bits <= 4]:
            crowded.append((matrix.slab.name, f"{use.crowded:.0%} of the numbers"))
    if idle:
        yield _fail(
            "matrix hardly uses its range, the scale is too large",
            "matrices hardly use their range, the scales are too large",
            idle,
        )
    if crowded:
        yield _fail(
            "matrix sits at the end of its range, the scale is too small",
            "matrices sit at the end of their range, the scales are too small",
            crowded,
        )
