"""A model's weights off the disk, one block at a time, from any layout, with the next block read ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.opening import open_checkpoint
from zaya_tools.checkpoint.ranges import Files, read_range
from zaya_tools.checkpoint.source import Source
from zaya_tools.dtypes import SIZES
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.detect import RAW_FAMILY
from zaya_tools.layouts.match import Bound, Match, match, require
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.model.block import Block
from zaya_tools.model.ends import Ends
from zaya_tools.model.loading import build_block, build_ends
from zaya_tools.model.quantized import QuantizedExperts, QuantizedLinear, Schemes, expert, read_schemes
from zaya_tools.model.rows import StoredRows
from zaya_tools.parameters import Parameter, Role, parameters
from zaya_tools.tensors import TensorInfo

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""torch's types by their safetensors names."""

Seen = Callable[[Parameter, TensorInfo, memoryview], None]
"""Takes a parameter, a stored tensor that is part of it, and that tensor's bytes."""


class _Buffers:
    """Memory for the tensors of one block, allocated once and filled again for every other block.

    Two sets take turns: one is computed with while the other is being read.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = (name, torch.Size(shape), dtype)
        if key not in self._held:
            self._held[key] = torch.empty(shape, dtype=dtype)
        return self._held[key]


def read_tensor(stored: list[TensorInfo], out: Tensor) -> Tensor:
    """Fill `out` with the concatenation of stored tensors, whose dtype it has; returns it."""
    flat = out.view(-1).view(torch.uint8).numpy()
    position = 0
    with Files() as files:
        for tensor in stored:
            read_range(tensor, 0, flat[position : position + tensor.nbytes], files)
            position += tensor.nbytes
    return out


class Weights:
    """The weights of a checkpoint folder, any layout, quantized or not, for the model to run on block by block."""

    def __init__(self, source: Source, found: Match, dtype: torch.dtype, device: torch.device | str) -> None:
        """Use `Weights.open`."""
        self.source, self.found = source, found
        self.dtype, self.device = dtype, torch.device(device)
        self._schemes: Schemes | None = read_schemes(source.config) if found.quantized else None
        self._rows: dict[int | None, list[Parameter]] = {}
        for parameter in parameters(found.architecture):
            self._rows.setdefault(parameter.block, []).append(parameter)

    @classmethod
    def open(cls, folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Weights:
        """Open a complete checkpoint; `dtype` is the compute dtype. Raises a ZayaError as reading and matching do."""
        source = open_checkpoint(folder)
        return cls(source, require(match(source.tensors, source.config, str(folder))), dtype, device)

    @property
    def architecture(self) -> Architecture:
        """The geometry as run: temperatures come with the clamp baked in."""
        return replace(self.found.architecture, clamp_temp=False)

    def ends(self) -> Ends:
        """Embedding, final norm and head; the large ones stay on disk, quantized ones are in the compute dtype."""
        tensors: dict[str, Tensor] = {}
        stored: dict[str, StoredRows] = {}
        head_input = None
        for parameter in self._rows[None]:
            (bound,) = self.found.bound[parameter.name]
            if not bound.quantized and bound.tensor is not None and len(parameter.shape) == 2:
                stored[parameter.name] = StoredRows(bound.tensor, TORCH[bound.tensor.dtype], self.device)
                continue
            if not bound.quantized:
                tensors[parameter.name] = self._dense(parameter, _Buffers())
                continue
            linear = self._linear(parameter, bound, _Buffers())
            tensors[parameter.name] = linear.weight()
            if parameter.role is Role.HEAD:
                head_input = linear.quantize_input
        ends = build_ends(self.architecture, tensors, stored=stored, dtype=self.dtype, device=self.device)
        return replace(ends, head_input=head_input)

    def __iter__(self) -> Iterator[Block]:
        return self.blocks()

    def fits(self) -> bool:
        """Whether half of the memory that is free now, on the device too, holds every block as it computes."""
        stored = [bound.tensor for parts in self.found.bound.values() for bound in parts if not bound.quantized]
        wider = sum(t.numel * max(0, self.dtype.itemsize - SIZES[t.dtype]) for t in stored if t is not None)
        needed = self.source.nbytes + wider
        if self.device.type == "cuda" and 2 * needed >= torch.cuda.mem_get_info(self.device)[0]:
            return False
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        return 2 * needed < free

    def resident(self) -> tuple[Block, ...]:
        """All blocks, each in memory of its own."""
        return tuple(self._block(index, _Buffers(), cast=True) for index in range(self.found.architecture.blocks))

    def blocks(self, first: int = 0) -> Iterator[Block]:
        """Every block from `first` on, each valid until the next is asked for: its memory is used again."""
        sets = (_Buffers(), _Buffers())
        count = self.found.architecture.blocks
        if first >= count:
            return
        with ThreadPoolExecutor(max_workers=1) as reader:
            ahead: Future[Block] | None = reader.submit(self._block, first, sets[first % 2])
            for index in range(first, count):
                assert ahead is not None
                block = ahead.result()
                following = index + 1
                ahead = reader.submit(self._block, following, sets[following % 2]) if following < count else None
                yield block

    def dense(self, index: int, seen: Seen | None = None) -> dict[str, Tensor]:
        """All tensors of an unquantized block by native local name, as stored, in memory of their own on the device.

        `seen` is called with every parameter, each tensor of the source that holds some of it, and the bytes read.
        """
        held = _Buffers()
        return {p.local: self._dense(p, held, seen).to(self.device) for p in self._rows[index]}

    def _dense(self, parameter: Parameter, buffers: _Buffers, seen: Seen | None = None) -> Tensor:
        stored = [bound.tensor for bound in self.found.bound[parameter.name] if bound.tensor is not None]
        dtypes = {tensor.dtype for tensor in stored}
        if len(dtypes) != 1:
            raise LayoutError(f"{parameter.name} is stored in several dtypes: {', '.join(sorted(dtypes))}")
        tensor = read_tensor(stored, buffers(parameter.local, parameter.shape, TORCH[dtypes.pop()]))
        if seen is not None:
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for part in stored:
                seen(parameter, part, data[: part.nbytes])
                data = data[part.nbytes :]
        if parameter.role is Role.TEMPERATURE and self.found.architecture.clamp_temp:
            return tensor.float().clamp(1e-7, 2.0).exp()
        return tensor

    def _block(self, index: int, buffers: _Buffers, cast: bool = False) -> Block:
        dense: dict[str, Tensor] = {}
        linears: dict[str, QuantizedLinear] = {}
        experts: dict[Parameter, tuple[Bound, ...]] = {}
        for parameter in self._rows[index]:
            bound = self.found.bound[parameter.name]
            if not any(part.quantized for part in bound):
                dense[parameter.local] = self._dense(parameter, buffers)
            elif parameter.role is Role.EXPERT:
                experts[parameter] = bound
            else:
                linears[parameter.local.removesuffix(".weight")] = self._linear(parameter, bound[0], buffers)
        for module, linear in linears.items():
            bias = dense.get(f"{module}.bias")
            linear.bias = None if bias is None else bias.to(self.device, self.dtype)
        return build_block(
            self.architecture, index, dense, dtype=self.dtype, device=self.device, linears=linears.get,
            experts=self._experts(index, experts, buffers) if experts else None, cast_experts=cast,
        )  # fmt: skip

    def _linear(self, parameter: Parameter, bound: Bound, buffers: _Buffers) -> QuantizedLinear:
        """A quantized matrix as one layer; the first of them where `bound` is a stack of experts."""
        return self._linears(parameter, bound, buffers)[0]

    def _linears(self, parameter: Parameter, bound: Bound, buffers: _Buffers) -> list[QuantizedLinear]:
        """The quantized matrices that one part of a parameter holds: one, or one an expert where they are stacked."""
        stored: dict[str, TensorInfo] = dict(bound.companions)
        if bound.tensor is not None:
            # Stacks of packed experts keep the plain name.
            stored["weight_packed" if bound.tensor.dtype in ("U8", "I32") else "weight"] = bound.tensor
        module = bound.part.name.removesuffix(".weight")
        key = module.split(".", 3)[-1]
        state = {
            suffix: read_tensor([tensor], buffers(f"{key}:{suffix}", tensor.shape, TORCH[tensor.dtype]))
            for suffix, tensor in stored.items()
        }
        scheme = self._scheme(module, parameter, bound)
        *stack, rows, columns = bound.part.shape
        count = stack[0] if stack else 1
        each = [
            {suffix: expert(suffix, tensor, index, count) for suffix, tensor in state.items()} if stack else state
            for index in range(count)
        ]
        return [QuantizedLinear(module, scheme, own, (rows, columns), self.dtype, self.device) for own in each]

    def _scheme(self, module: str, parameter: Parameter, bound: Bound) -> tuple[Any, str]:
        """What the config says of a module under the name that it is stored by, or under those that runtimes give it.

        Runtimes judge a stack of experts by the first of them.
        """
        if self._schemes is None:
            raise LayoutError(f"{module} is quantized but config.json does not say how")
        runtime = NATIVE_PER_EXPERT.parts(parameter, self.found.architecture)
        names = [part.name.removesuffix(".weight") for part in runtime if part.expert in (None, bound.part.expert or 0)]
        kind = "Embedding" if parameter.role is Role.EMBEDDING else "Linear"
        return self._schemes.of(module, *names, kind=kind, single=self.found.layout in RAW_FAMILY)

    def _experts(self, index: int, held: Mapping[Parameter, tuple[Bound, ...]], buffers: _Buffers) -> QuantizedExperts:
        if len(held) != 2:
            raise LayoutError(f"block {index}: only some of the experts' matrices are quantized")
        count = self.found.architecture.experts
        matrices = {}
        for parameter, bound in held.items():
            linears = [linear for part in bound for linear in self._linears(parameter, part, buffers)]
            each = len(linears) // count
            matrices[parameter.local] = [linears[e * each : (e + 1) * each] for e in range(count)]
        gate_up, down = (matrices[local] for local in sorted(matrices, key=lambda name: "down" in name))
        return QuantizedExperts(gate_up, [part for (part,) in down])
