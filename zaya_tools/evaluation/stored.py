"""Tensors as they lie on disk, and quantized ones back in numbers through compressed-tensors' own decompressors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Any

import torch
from torch import Tensor

from zaya_tools.checkpoint.source import read_stretch
from zaya_tools.dtypes import FLOATS, SIZES, Bytes
from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.units import as_matrix
from zaya_tools.layouts.match import Bound
from zaya_tools.model.weights import TORCH
from zaya_tools.parameters import Parameter, Role
from zaya_tools.tensors import TensorInfo

NAMES = {dtype: name for name, dtype in TORCH.items()}
"""safetensors names of torch's types."""

PACK_ROWS = 32
"""Zero points are packed along rows: a block of rows has to begin where a 32-bit word does, whatever the bits."""


FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What the library raises, by release and format, for tensors that do not fit a scheme."""


def as_tensor(data: Bytes, dtype: str, shape: Sequence[int]) -> Tensor:
    """Bytes as a torch tensor of a safetensors dtype, without a copy."""
    return torch.from_numpy(data).view(TORCH[dtype]).reshape(tuple(shape))


@dataclass(frozen=True)
class Stretch:
    """A tensor, or the part of it that belongs to one expert of a stack: bytes from `offset`, of its own `shape`."""

    tensor: TensorInfo
    offset: int
    shape: tuple[int, ...]

    def read(self, first: int = 0, last: int | None = None) -> Tensor:
        """Entries [first, last) along the first axis (all of them without `last`)."""
        shape, start = self.shape, 0
        size = SIZES[self.tensor.dtype]
        if last is not None:
            row = prod(self.shape[1:]) * size
            shape, start = (last - first, *self.shape[1:]), first * row
        return as_tensor(read_stretch(self.tensor, self.offset + start, prod(shape) * size), self.tensor.dtype, shape)


@dataclass(frozen=True)
class Slab:
    """One matrix of a layout: rows x columns, elements of the parameter from `start`, and what stores it.

    A stack of experts has `copies` slabs in the same tensors, this one being number `index`.
    """

    bound: Bound
    rows: int
    columns: int
    start: int
    index: int = 0
    copies: int = 1

    @property
    def name(self) -> str:
        """Name of the tensor, as stored."""
        tensor = self.bound.tensor or next(iter(self.bound.companions.values()), None)
        return tensor.name if tensor else self.bound.part.name

    @property
    def present(self) -> bool:
        """Whether a weight is there in any form."""
        return self.bound.tensor is not None or "weight_packed" in self.bound.companions

    @property
    def full(self) -> Stretch | None:
        """The full-precision weight, None where it is quantized, missing or of another shape."""
        tensor = self.bound.tensor
        if tensor is None or self.bound.quantized or tensor.shape != self.bound.part.shape:
            return None
        return Stretch(tensor, self.index * (tensor.nbytes // self.copies), (self.rows, self.columns))

    def stored(self) -> dict[str, Stretch]:
        """What stores a quantized slab, by compressed-tensors' local names; the weight is `weight` or packed."""
        found: dict[str, TensorInfo] = dict(self.bound.companions)
        if self.bound.tensor is not None:
            # Stacks of packed experts keep the plain name.
            found["weight_packed" if self.bound.tensor.dtype in ("U8", "I32") else "weight"] = self.bound.tensor
        return {local: self._share(local, tensor) for local, tensor in sorted(found.items())}

    def _share(self, local: str, tensor: TensorInfo) -> Stretch:
        if self.copies == 1 or tensor.shape[:1] != (self.copies,) or local == "weight_shape":
            return Stretch(tensor, 0, tensor.shape)
        shape = tensor.shape[1:] or (1,)
        return Stretch(tensor, self.index * (tensor.nbytes // self.copies), shape)


def slabs(parameter: Parameter, bounds: Sequence[Bound]) -> Iterator[Slab]:
    """The slabs of a parameter, in order."""
    start = 0
    for bound in bounds:
        shape = bound.part.shape
        stacked = parameter.role is Role.EXPERT and len(shape) == 3
        copies = shape[0] if stacked else 1
        rows, columns = shape[1:] if stacked else as_matrix(shape)
        for index in range(copies):
            yield Slab(bound, rows, columns, start, index, copies)
            start += rows * columns


@dataclass(frozen=True)
class Decoder:
    """A scheme and the format that its tensors have on disk."""

    scheme: Any
    format: str

    @property
    def label(self) -> str:
        """The scheme in words, as in "float 8 bits per channel"."""
        weights = self.scheme.weights
        strategy = getattr(weights.strategy, "value", weights.strategy)
        grouped = f" of {weights.group_size}" if weights.group_size and weights.group_size > 0 else ""
        return f"{getattr(weights.type, 'value', weights.type)} {weights.num_bits} bits per {strategy}{grouped}"

    @property
    def step(self) -> int:
        """Rows of a slab are decoded from a multiple of this on."""
        block = self.scheme.weights.block_structure
        return PACK_ROWS * block[0] // gcd(PACK_ROWS, block[0]) if block else PACK_ROWS

    def values(self, slab: Slab, first: int, last: int) -> Tensor:
        """Rows [first, last) as stored, float32 [last - first, columns]; any `first` will do.

        Float scales are widened before the library multiplies, so that nothing is rounded but what was stored.
        LayoutError when the tensors do not fit the scheme or the library has no such format.
        """
        return self._decode(slab, first, last, unit=False)

    def levels(self, slab: Slab, first: int, last: int) -> Tensor:
        """The same rows in steps of their scales: what is stored, less the zero point. Float32."""
        return self._decode(slab, first, last, unit=True)

    def _decode(self, slab: Slab, first: int, last: int, *, unit: bool) -> Tensor:
        from compressed_tensors.compressors import BaseCompressor

        begin = first // self.step * self.step
        try:
            compressor = BaseCompressor.get_value_from_registry(self.format)
            state = self._rows(slab, begin, last)
            if unit:
                state |= {local: _one(state[local]) for local in state if local.endswith("scale")}
            if self.scheme.weights.block_structure:
                state["weight"] = _whole_blocks(state["weight"], self.scheme.weights.block_structure)
            weight = compressor.decompress(state, self.scheme)["weight"]
            if self.scheme.weights.block_structure:
                weight = weight[: last - begin, : slab.columns]
        except FAULTS as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise LayoutError(f"{slab.name} cannot be decoded as {self.format}: {reason}") from error
        if weight.shape != (last - begin, slab.columns):
            raise LayoutError(f"{slab.name} decodes to {list(weight.shape)}, expected {[last - begin, slab.columns]}")
        return weight[first - begin :].detach().float()  # type: ignore[no-any-return]

    def _rows(self, slab: Slab, first: int, last: int) -> dict[str, Tensor]:
        weights = self.scheme.weights
        state = {}
        for local, stretch in slab.stored().items():
            if local.startswith("input") or local == "weight_shape":
                continue
            rows = (first, last)
            if weights.strategy == "block" and local in ("weight_scale", "weight_zero_point"):
                height = weights.block_structure[0]
                rows = (first // height, ceil(last / height))
            elif local == "weight_zero_point" and stretch.tensor.dtype == "I32":
                rows = (first * weights.num_bits // 32, ceil(last * weights.num_bits / 32))
            elif len(stretch.shape) < 2 or stretch.shape[0] != slab.rows:
                state[local] = stretch.read()
                continue
            state[local] = stretch.read(rows[0], min(rows[1], stretch.shape[0]))
        state["weight_shape"] = torch.tensor([last - first, slab.columns])
        return {local: value.float() if NAMES[value.dtype] in FLOATS else value for local, value in state.items()}


def _whole_blocks(weight: Tensor, block: Sequence[int]) -> Tensor:
    """A matrix with zeros up to whole blocks: compressed-tensors 0.17 spreads the scales evenly over a partial one."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.view(torch.uint8), (0, -columns % block[1], 0, -rows % block[0]))
    return padded.view(weight.dtype)


def _one(scale: Tensor) -> Tensor:
    """A scale of 1 everywhere; the exponent format holds the power of two, biased by 127."""
    return torch.full_like(scale.float(), 127 if scale.dtype is torch.uint8 else 1).to(scale.dtype)


def expected(decoder: Decoder, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """(safetensors dtype, shape) of every tensor that a scheme stores for a matrix, as compressed-tensors makes them.

    LayoutError when the scheme does not fit the shape (a group that does not divide the columns).
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import initialize_module_for_quantization

    weights = decoder.scheme.weights
    if weights.group_size and weights.group_size > 0 and columns % weights.group_size:
        raise LayoutError(f"groups of {weights.group_size} do not divide {columns:,} columns")
    try:
        module = torch.nn.Linear(columns, rows, bias=False, device="meta", dtype=torch.bfloat16)
        initialize_module_for_quantization(module, decoder.scheme.model_copy(deep=True))
        BaseCompressor.get_value_from_registry(decoder.format).compress_module(module)
    except FAULTS as error:
        reason = " ".join(str(error).split())[:200]
        raise LayoutError(f"compressed-tensors has no form of {decoder.label} ({decoder.format}): {reason}") from error
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = {local: (NAMES[tensor.dtype], tuple(tensor.shape)) for local, tensor in tensors.items()}
    if decoder.format == "pack-quantized" and "weight_zero_point" in found:
        # Releases differ in whether they pack the zero points of a tensor without data.
        groups = found["weight_scale"][1][-1]
        found["weight_zero_point"] = ("I32", (ceil(rows * weights.num_bits / 32), groups))
    return found
