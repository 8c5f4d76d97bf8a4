"""One parameter's matrices to stored tensors, by whatever finds their scales and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zaya_tools.errors import NonFiniteError, ZayaError
from zaya_tools.quantization.gptq import gptq
from zaya_tools.quantization.kernels import Scales, nearest
from zaya_tools.quantization.polish import Rounded, damped, polish, spread
from zaya_tools.quantization.quantize import Quantized, global_scale, largest, quantize
from zaya_tools.quantization.scheme import GPTQ, MINMAX, MSE, Kind, Observer, Scheme
from zaya_tools.quantization.weighted import encode, weighted_scales

AT_A_TIME = {"cpu": 1 << 23, "cuda": 1 << 28}
"""Weights that are worked on together; each needs some 30 bytes meanwhile."""


@dataclass(frozen=True)
class Task:
    """`weight` [matrices, rows, columns] of one parameter: one matrix, or one an expert, gate above up.

    Each is stored as `parts` equal row blocks. `dtype` is that of the weights as trained, which scales take on;
    `expert` is the number of the first where they are experts: those may be only some of the parameter's.
    """

    name: str
    weight: Tensor
    parts: int
    scheme: Scheme
    observer: Observer
    dtype: torch.dtype
    expert: int | None = None

    def which(self, index: int) -> str:
        """The matrix of this index, as errors name it."""
        return self.name if self.expert is None else f"{self.name}, expert {self.expert + index}"


def fit(task: Task, hessians: Tensor | None) -> list[Quantized]:
    """The stored tensors of every part of every matrix, in order.

    `hessians` [matrices, columns, columns] are what the observers that look at inputs need. NonFiniteError where a
    weight, ZayaError where a scale is not finite and positive.
    """
    for index, matrix in enumerate(task.weight):  # one by one: torch makes several tensors of this on the way
        if not bool(matrix.isfinite().all()):
            raise NonFiniteError(f"{task.which(index)}: weights are NaN or infinite", "the checkpoint is broken")
    if task.observer in (MINMAX, MSE):
        return [made for matrix in task.weight for made in _plain(task, matrix)]
    if hessians is None:
        raise ZayaError(f"{task.name}: {task.observer} needs to know the inputs", "give --stats or --data")
    count, rows, columns = task.weight.shape
    step = max(1, AT_A_TIME[task.weight.device.type] // (rows * columns))
    found: list[Quantized] = []
    for first in range(0, count, step):
        expert = None if task.expert is None else task.expert + first
        some = replace(task, weight=task.weight[first : first + step], expert=expert)
        found += _fitted(some, hessians[first : first + step])
    return found


def _plain(task: Task, matrix: Tensor) -> list[Quantized]:
    scheme = task.scheme
    if not scheme.rows:  # one scale for the whole matrix, and for the parts that are fused into it
        return _encoded(task, matrix, matrix, weighted_scales(matrix, scheme, torch.ones_like(matrix[0]), task.dtype))
    amax = largest(matrix) if scheme.shared else None
    parts = matrix.to(task.dtype).chunk(task.parts)
    return [quantize(part.contiguous(), scheme, task.observer, amax=amax) for part in parts]


def _fitted(task: Task, hessians: Tensor) -> list[Quantized]:
    scheme, dtype, weights = task.scheme, task.dtype, task.weight
    whole = [
        torch.tensor([global_scale(largest(matrix), dtype)], device=matrix.device)
        if scheme.kind is Kind.NVFP4
        else None
        for matrix in weights
    ]
    firm = damped(hessians)
    found = [
        weighted_scales(matrix, scheme, torch.diagonal(hessian), dtype, one)
        for matrix, hessian, one in zip(weights, firm, whole, strict=True)
    ]
    rows, columns = weights.shape[1:]
    values = torch.stack([_grid(scales.value, rows, columns, scheme) for scales in found])
    _check(task, values)
    if task.observer == GPTQ:
        rounded = gptq(weights, values, hessians, scheme, dtype)
    else:
        numbers = nearest(weights.float() / spread(values, columns), scheme.kind)
        rounded = polish(weights, Rounded(numbers, values), firm, scheme, dtype)
    moved = rounded.weight()
    made = []
    for index, scales in enumerate(found):
        kept = scales if scheme.kind in (Kind.NVFP4, Kind.MXFP4) or not scheme.rows else Scales(
            rounded.scales[index].flatten().to(dtype), rounded.scales[index].flatten()
        )  # fmt: skip
        made += _encoded(task, moved[index], weights[index], kept, whole[index])
    return made


def _grid(values: Tensor, rows: int, columns: int, scheme: Scheme) -> Tensor:
    """Scales [G] as [rows, groups]."""
    if not scheme.rows:
        return values.view(1, 1).expand(rows, 1)
    return values.view(rows, scheme.groups(columns))


def _encoded(
    task: Task, moved: Tensor, trained: Tensor, scales: Scales, whole: Tensor | None = None
) -> list[Quantized]:
    """A matrix's parts with the scales that belong to their rows."""
    made = []
    rows = moved.shape[0] // task.parts
    grid = len(scales.value) // task.parts if task.scheme.rows else 0
    for part in range(task.parts):
        own = (
            scales if not grid else Scales(*(s[part * grid : (part + 1) * grid] for s in (scales.stored, scales.value)))
        )
        at = slice(part * rows, (part + 1) * rows)
        made.append(encode(moved[at].float(), task.scheme, own, whole, original=trained[at].float()))
    return made


def _check(task: Task, scales: Tensor) -> None:
    if not bool((scales > 0).all()) or not bool(scales.isfinite().all()):
        wrong = int(torch.nonzero(~((scales > 0) & scales.isfinite()))[0, 0])
        raise ZayaError(f"{task.which(wrong)}: a scale is not a finite number above zero", "the weights are broken")


def restored(task: Task, stored: Sequence[Mapping[str, Tensor]], dtype: torch.dtype = torch.float32) -> Tensor:
    """What the stored tensors mean, as [matrices, rows, columns] in `dtype`."""
    from zaya_tools.quantization.dequantize import dequantize

    count, rows, columns = task.weight.shape
    out = torch.empty(count * task.parts, rows // task.parts, columns, dtype=dtype, device=task.weight.device)
    for place, tensors in zip(out, stored, strict=True):
        place.copy_(dequantize(tensors, task.scheme, (rows // task.parts, columns)))
    return out.view(count, rows, columns)
