"""Whether scales can be true: finite, positive, of a sane size, and filling the range of the numbers they scale.

Scales are read whole, a block at a time; of the weights only a few rows of each matrix, so a 74B checkpoint costs
about as much as its scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from zaya_tools.checkpoint.source import stretches
from zaya_tools.dtypes import SIZES
from zaya_tools.evaluation.findings import Finding, about
from zaya_tools.evaluation.quantized import CHECK, Matrix
from zaya_tools.evaluation.ranges import check_ranges, top
from zaya_tools.evaluation.stored import as_tensor
from zaya_tools.model.weights import TORCH
from zaya_tools.parameters import Role
from zaya_tools.tensors import TensorInfo

LARGEST_WEIGHT = 1e4
"""No weight of a trained model is larger; a scale that says so is wrong."""

BOUNDS = {
    # An activation's largest value is 6 to 448 steps: activations between 1e-6 and 1e7 are allowed.
    "input_scale": (1e-9, 1e6),
    # The other way round: 2688 over the largest value.
    "input_global_scale": (1e-5, 1e10),
    "weight_global_scale": (1e-2, 1e12),
}
"""Smallest and largest believable value of scales that no weight vouches for."""

SPREAD = 1e4
"""Largest believable scale within a tensor, over their geometric mean."""

APART = 10.0
"""Powers of two by which a tensor's scales may differ from those of the same matrix in other blocks."""


@dataclass(frozen=True)
class _Values:
    """One tensor of scales: how many are NaN or infinite, zero or negative, and the span of the others."""

    tensor: TensorInfo
    suffix: str
    nonfinite: int
    nonpositive: int
    smallest: float
    largest: float
    mean_log2: float

    @property
    def broken(self) -> bool:
        return self.nonfinite + self.nonpositive > 0


def check_scales(ready: Sequence[Matrix]) -> tuple[list[Finding], dict[str, Any]]:
    """Findings about the scales of quantized matrices, and figures."""
    values = {v.tensor.name: v for v in _read_all(ready)}
    findings = [*_broken(values.values()), *_implausible(ready, values), *_shapes(ready), *_halves(ready, values)]
    broken = {name for name, v in values.items() if v.broken}
    whole = [m for m in ready if not any(s.tensor.name in broken for s in m.slab.stored().values())]
    from_ranges, range_use = check_ranges(whole)
    return [*findings, *from_ranges], {"scale_tensors": len(values), "range_use": range_use}


def _fail(one: str, more: str, items: Sequence[tuple[str, str]]) -> Finding:
    return about(CHECK, "fail", one, more, items)


def _read_all(ready: Iterable[Matrix]) -> Iterator[_Values]:
    seen: set[str] = set()
    for matrix in ready:
        for local, stretch in matrix.slab.stored().items():
            readable = stretch.tensor.dtype in TORCH  # another type is not what the scheme stores, and was said so
            if local.endswith("scale") and readable and stretch.tensor.name not in seen:
                seen.add(stretch.tensor.name)
                yield _read(stretch.tensor, local)


def _read(tensor: TensorInfo, suffix: str) -> _Values:
    nonfinite = nonpositive = count = 0
    smallest, largest, logs = np.inf, 0.0, 0.0
    for _, data in stretches(tensor):
        scale = as_tensor(data, tensor.dtype, (data.size // SIZES[tensor.dtype],))
        numbers = exponents(scale) if tensor.dtype == "U8" else scale.float()
        values = numbers.double().numpy()
        finite = values[np.isfinite(values)]
        good = finite[finite > 0]
        nonfinite += values.size - finite.size
        nonpositive += finite.size - good.size
        if good.size:
            smallest, largest = min(smallest, float(good.min())), max(largest, float(good.max()))
            logs += float(np.log2(good).sum())
            count += good.size
    return _Values(tensor, suffix, nonfinite, nonpositive, smallest, largest, logs / max(count, 1))


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """Scales of the MX formats as float32: uint8 is 2 ** (value - 127), 255 is NaN (OCP MX specification)."""
    values = torch.exp2(scale.float() - 127)
    return torch.where(scale == 255, torch.nan, values)


def _broken(values: Iterable[_Values]) -> Iterator[Finding]:
    by_suffix: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for v in values:
        if v.broken:
            kinds = ((v.nonfinite, "NaN or infinite"), (v.nonpositive, "zero or negative"))
            detail = ", ".join(f"{count:,} of {v.tensor.numel:,} {kind}" for count, kind in kinds if count)
            by_suffix[v.suffix].append((v.tensor.name, detail))
    for suffix, items in by_suffix.items():
        yield _fail(f"{suffix} is not finite and positive", f"{suffix} tensors are not finite and positive", items)


def _implausible(ready: Sequence[Matrix], values: dict[str, _Values]) -> Iterator[Finding]:
    wild: dict[str, tuple[str, str]] = {}
    typical: dict[tuple[Role, str | None], list[tuple[str, float]]] = defaultdict(list)
    for matrix in ready:
        stored = matrix.slab.stored()
        for local, stretch in stored.items():
            v = values.get(stretch.tensor.name)
            if v is None or v.broken or matrix.decoder is None:
                continue
            low, high = BOUNDS.get(local, (0.0, np.inf))
            if not low <= v.smallest <= v.largest <= high:
                wild[v.tensor.name] = (v.tensor.name, f"{v.smallest:.3g} to {v.largest:.3g}")
            if local == "weight_scale":
                shared = values.get(stored["weight_global_scale"].tensor.name) if "weight_global_scale" in stored else v
                unit = shared.smallest if shared is not None and shared is not v and not shared.broken else 1.0
                if v.largest / unit * top(matrix.decoder) > LARGEST_WEIGHT:
                    wild[v.tensor.name] = (v.tensor.name, f"up to {v.largest:.3g}: a weight of "
                                           f"{v.largest / unit * top(matrix.decoder):.3g}")  # fmt: skip
                elif v.largest / 2**v.mean_log2 > SPREAD:
                    wild[v.tensor.name] = (v.tensor.name, f"one is {v.largest / 2**v.mean_log2:.3g} times their mean")
                key = (matrix.parameter.role, matrix.units[0].half or matrix.parameter.local)
                typical[key].append((v.tensor.name, v.mean_log2 - float(np.log2(unit))))
    for group in typical.values():
        middle = median(log for _, log in group)
        for name, log in group:
            if abs(log - middle) > APART:
                wild.setdefault(name, (name, f"{2 ** (log - middle):.3g} times those of its kind"))
    if wild:
        yield _fail("scale is of an impossible size", "scales are of an impossible size", list(wild.values()))


def _shapes(ready: Iterable[Matrix]) -> Iterator[Finding]:
    """`weight_shape` says how many columns a packed matrix has, and runtimes believe it."""
    wrong = []
    for matrix in ready:
        stretch = matrix.slab.stored().get("weight_shape")
        if stretch is None or matrix.slab.copies > 1 or stretch.tensor.numel != 2:
            continue
        shape = stretch.read().tolist()
        if shape != [matrix.slab.rows, matrix.slab.columns]:
            wrong.append((stretch.tensor.name, f"{shape}, expected {[matrix.slab.rows, matrix.slab.columns]}"))
    if wrong:
        yield _fail("weight_shape is wrong", "weight_shape tensors are wrong", wrong)


# Runtimes run gate and up as one matrix: one of the two numbers is used for both.
_SHARED = ("weight_global_scale", "input_scale", "input_global_scale")


def _halves(ready: Iterable[Matrix], values: dict[str, _Values]) -> Iterator[Finding]:
    """Gate and up of an expert see the same input, so what does not belong to rows has to be the same for both."""
    pairs: dict[tuple[int | None, int | None], dict[str, Matrix]] = defaultdict(dict)
    for matrix in ready:
        unit = matrix.units[0]
        if unit.half in ("gate", "up") and len(matrix.units) == 1:
            pairs[matrix.parameter.block, unit.expert][unit.half] = matrix
    odd = []
    for pair in pairs.values():
        if len(pair) < 2:
            continue
        gate, up = pair["gate"].slab.stored(), pair["up"].slab.stored()
        for local in _SHARED:
            if local in gate and local in up:
                first, second = (values.get(half[local].tensor.name) for half in (gate, up))
                if not first or not second or first.broken or second.broken:
                    continue
                if first.largest != second.largest:
                    odd.append((second.tensor.name, f"{second.largest:.6g}, the gate half's is {first.largest:.6g}"))
    if odd:
        yield _fail("scale of an expert's gate and up differs", "scales of experts' gate and up differ", odd)
