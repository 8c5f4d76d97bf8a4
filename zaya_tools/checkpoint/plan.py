"""The plan: which shards are written, and of which source bytes each of their tensors is made. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import Any

from blake3 import blake3

from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.header import Header, build_header
from zaya_tools.dtypes import FLOATS, SIZES, holds
from zaya_tools.errors import LayoutError, ZayaError
from zaya_tools.layouts.base import Layout, Part
from zaya_tools.layouts.match import Bound, Match
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.parameters import Parameter, Role, parameters
from zaya_tools.tensors import TensorInfo

KEEP = "keep"
COPY, CAST, BAKE = "copy", "cast", "bake clamp"

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Bytes [offset, offset + nbytes) of a source tensor."""

    tensor: TensorInfo
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Output:
    """One tensor to write: its pieces, concatenated in order, then `operation` element by element."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source_dtype: str
    pieces: tuple[Piece, ...]
    operation: str
    role: Role

    @property
    def nbytes(self) -> int:
        """Bytes as written."""
        return prod(self.shape) * SIZES[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes of the source that are read for it."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its tensors in file order."""

    filename: str
    outputs: tuple[Output, ...]

    @cached_property
    def header(self) -> bytes:
        """Length prefix and header as written."""
        return build_header([(output.name, output.dtype, output.shape) for output in self.outputs])

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(output.nbytes for output in self.outputs)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.data_bytes


@dataclass(frozen=True)
class Plan:
    """Everything a run will do. Dry run, resume, progress, disk preflight and tests all read it."""

    shards: tuple[Shard, ...]
    architecture: Architecture
    layout: Layout
    drops: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors as written: the index's total_size."""
        return sum(shard.data_bytes for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards as written."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def read_bytes(self) -> int:
        """Bytes of the source that are read."""
        return sum(output.read_bytes for output in self.outputs())

    def outputs(self) -> Iterator[Output]:
        """Every tensor to write."""
        for shard in self.shards:
            yield from shard.outputs

    def index(self) -> dict[str, Any]:
        """The content of model.safetensors.index.json."""
        weight_map = {output.name: shard.filename for shard in self.shards for output in shard.outputs}
        return {"metadata": {"total_size": self.data_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def parse_size(text: str) -> int:
    """Bytes from "5GB" (decimal), "512MiB" (binary) or a plain number; ZayaError when it is none of these."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ZayaError(f"{text!r} is not a size", "write it like 5GB, 512MiB or 4000000000")
    return max(1, int(float(found[1]) * _UNITS[found[2].upper()]))


def output_dtype(parameter: Parameter, source: str, requested: str, native: bool) -> str:
    """The safetensors dtype in which a full-precision tensor is written.

    `requested` is "keep" or a safetensors dtype. Protected roles follow it only where no value can change.
    """
    if source not in FLOATS:
        return source
    if parameter.float32 and native:
        return "F32"
    if requested == KEEP or (parameter.protected and not holds(requested, source)):
        return source
    return requested


def target_layout(found: Match) -> Layout:
    """The native layout that fits: experts stacked, as transformers has them, or one by one where they are quantized.

    Quantized experts that are stacked already stay so.
    """
    experts = (p for p in parameters(found.architecture) if p.role is Role.EXPERT)
    quantized = any(bound.quantized for p in experts for bound in found.bound[p.name])
    return NATIVE_PER_EXPERT if quantized and found.layout is not NATIVE else NATIVE


Group = tuple[Output, ...]
"""Tensors that are made together and lie side by side."""
Regroup = Callable[[Parameter, Sequence[Part], Sequence[Output]], Iterable[Group]]
"""Makes groups out of a parameter's parts and the full-precision outputs that they would be."""


def _alone(_: Parameter, __: Sequence[Part], outputs: Sequence[Output]) -> Iterable[Group]:
    return ((output,) for output in outputs)


def build_plan(
    found: Match,
    target: Layout,
    architecture: Architecture,
    *,
    dtype: str = KEEP,
    max_shard_bytes: int = 5 * 10**9,
    regroup: Regroup = _alone,
) -> Plan:
    """Plan the conversion of a complete match to `target`.

    `architecture` is the geometry as written; `dtype` is "keep" or a safetensors dtype; `regroup` may put other
    tensors in the place of full-precision ones. LayoutError names tensors that cannot be joined or carried.
    """
    native = target in (NATIVE, NATIVE_PER_EXPERT)
    bake = found.architecture.clamp_temp and not architecture.clamp_temp
    groups: list[Group] = []
    for parameter in parameters(architecture):
        sources = found.bound[parameter.name]
        parts = target.parts(parameter, architecture)
        if any(bound.quantized for bound in sources):
            groups += [(output,) for output in _carry(parameter, sources, parts, native)]
            continue
        operation = BAKE if bake and parameter.role is Role.TEMPERATURE else None
        outputs = [_join(parameter, sources, part, index, len(parts), dtype, native, operation)
                   for index, part in enumerate(parts)]  # fmt: skip
        groups += regroup(parameter, parts, outputs)
    drops = dict(found.drops)
    if found.head_alias is not None:
        drops[found.head_alias.name] = "tied to the embedding, which holds the same bytes"
    return Plan(_cut(groups, max_shard_bytes), architecture, target, drops)


def _join(
    parameter: Parameter, sources: Sequence[Bound], part: Part, index: int, count: int, requested: str, native: bool,
    operation: str | None,
) -> Output:  # fmt: skip
    """The `index`-th of `count` equal stretches of a parameter, out of whatever tensors hold it."""
    tensors = [bound.tensor for bound in sources if bound.tensor is not None]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        odd = next(tensor for tensor in tensors if tensor.dtype != tensors[0].dtype)
        raise LayoutError(
            f"{odd.name} is {odd.dtype} but {tensors[0].name}, which goes into the same tensor, is {tensors[0].dtype}",
            "convert the source to one dtype first: nothing is rounded behind your back",
        )
    (source,) = dtypes
    elements = parameter.numel // count
    pieces = _slices(tensors, index * elements, elements)
    written = "F32" if operation == BAKE else output_dtype(parameter, source, requested, native)
    return Output(part.name, written, part.shape, source, pieces, operation or (COPY if written == source else CAST),
                  parameter.role)  # fmt: skip


def _slices(tensors: Sequence[TensorInfo], start: int, elements: int) -> tuple[Piece, ...]:
    """The pieces that hold elements [start, start + elements) of the tensors' concatenation."""
    pieces = []
    position = 0
    for tensor in tensors:
        low, high = max(start, position), min(start + elements, position + tensor.numel)
        if low < high:
            size = SIZES[tensor.dtype]
            pieces.append(Piece(tensor, (low - position) * size, (high - low) * size))
        position += tensor.numel
    return tuple(pieces)


def _carry(parameter: Parameter, sources: Sequence[Bound], parts: Sequence[Part], native: bool) -> list[Output]:
    """A quantized parameter with its companions: tensor by tensor, or each source tensor cut into equal row blocks."""
    if not native:
        raise LayoutError(f"{sources[0].part.name} is quantized, and the raw layout has no quantized form",
                          "convert the unquantized checkpoint")  # fmt: skip
    cuts, rest = divmod(len(parts), len(sources))
    if rest or not cuts:
        raise LayoutError(f"{sources[0].part.name}: quantized experts of this layout cannot be regrouped")
    outputs = []
    for number, part in enumerate(parts):
        bound, index = sources[number // cuts], number % cuts
        stored: dict[str, TensorInfo] = dict(bound.companions)
        if bound.tensor is not None:
            stored[""] = bound.tensor
        for suffix in sorted(stored):
            tensor = stored[suffix]
            name = part.companion(suffix) if suffix else part.name
            outputs.append(_cut_rows(parameter, bound.part, tensor, name, index, cuts))
    return outputs


def _cut_rows(parameter: Parameter, whole: Part, tensor: TensorInfo, name: str, index: int, cuts: int) -> Output:
    if cuts > 1 and not _divides(tensor, whole.shape[0], cuts):
        raise LayoutError(
            f"{tensor.name} of shape {list(tensor.shape)} is shared by an expert's gate and up halves",
            "only scales that belong to rows can be carried across; quantize the unquantized checkpoint instead",
        )
    rows = (tensor.shape[0] // cuts,) if cuts > 1 else tensor.shape[:1]
    piece = Piece(tensor, index * tensor.nbytes // cuts, tensor.nbytes // cuts)
    return Output(name, tensor.dtype, (*rows, *tensor.shape[1:]), tensor.dtype, (piece,), COPY, parameter.role)


def _divides(tensor: TensorInfo, rows: int, cuts: int) -> bool:
    """Whether a tensor with an entry for every 2**n of a matrix's rows can be cut where the matrix is cut."""
    if len(tensor.shape) < 2 or not tensor.shape[0] or tensor.shape[0] % cuts:
        return False
    # A block that only partly lies inside the matrix would make this rest, or a step that is no power of two.
    step, rest = divmod(rows, tensor.shape[0])
    return not rest and step & (step - 1) == 0


def _cut(groups: Sequence[Group], max_bytes: int) -> tuple[Shard, ...]:
    """Files of at most `max_bytes` of tensors (one group is never divided), each tensor at a multiple of its element.

    The tensors of a group are neighbours, except where that would move one off such a multiple.
    """
    files: list[list[Group]] = [[]]
    size = 0
    for group in groups:
        nbytes = sum(output.nbytes for output in group)
        if files[-1] and size + nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(group)
        size += nbytes
    total = len(files)
    return tuple(
        Shard(f"model-{number:05d}-of-{total:05d}.safetensors", tuple(_aligned(file)))
        for number, file in enumerate(files, 1)
    )


def _aligned(groups: Sequence[Group]) -> Iterator[Output]:
    """Groups in order, those first whose bytes are multiples of 8, then of 4, 2 and 1: each begins at such a one."""
    units: list[Group] = []
    for group in groups:
        units += [group] if _fits(group) else [(output,) for output in group]
    for unit in sorted(units, key=lambda unit: -_multiple(unit)):
        yield from unit


def _multiple(group: Group) -> int:
    return gcd(8, sum(output.nbytes for output in group))


def _fits(group: Group) -> bool:
    """Whether every tensor of a group lies right when the group begins at a multiple of its own `_multiple`."""
    offset = 0
    for output in group:
        if gcd(offset, _multiple(group)) % SIZES[output.dtype]:
            return False
        offset += output.nbytes
    return True


def _place(piece: Piece) -> list[Any]:
    tensor = piece.tensor
    chunks = [[c.file.name, c.start, c.row, c.rows, c.column, c.width] for c in tensor.chunks]
    return [tensor.file.name, tensor.start + piece.offset, *([piece.offset, chunks] if chunks else [])]


def stamps(headers: Sequence[Header]) -> list[list[Any]]:
    """What tells source files from others or from later ones: name, size, time of writing and digest of the header."""
    return [[h.name, h.size, h.file.stat().st_mtime_ns, blake3(h.raw).hexdigest()] for h in headers]


def fingerprint(plan: Plan, headers: Sequence[Header], extra: Mapping[str, Any]) -> str:
    """A digest of everything that decides the output: plan, source files and `extra`."""
    digest = blake3()
    for stamp in stamps(headers):
        digest.update(json.dumps(stamp).encode())
    for shard in plan.shards:
        digest.update(shard.filename.encode() + shard.header)
        for output in shard.outputs:
            pieces = [[*_place(p), p.nbytes] for p in output.pieces]
            digest.update(json.dumps([output.operation, output.source_dtype, pieces]).encode())
    digest.update(json.dumps(extra, sort_keys=True).encode())
    return digest.hexdigest()
