"""Every source tensor against the table: what it is, what is missing, what has no place."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zaya_tools.architecture import Architecture
from zaya_tools.dtypes import FLOATS, SIZES
from zaya_tools.errors import LayoutError, listing
from zaya_tools.layouts import raw_config
from zaya_tools.layouts.base import COMPANIONS, Layout, Part
from zaya_tools.layouts.config_values import Config
from zaya_tools.layouts.detect import RAW_FAMILY, detect
from zaya_tools.layouts.geometry import resolve
from zaya_tools.layouts.megatron import MEGATRON
from zaya_tools.parameters import Parameter, Role, parameters
from zaya_tools.tensors import TensorInfo

QUANTIZABLE = frozenset({Role.EXPERT, Role.ATTENTION, Role.EMBEDDING, Role.HEAD})
"""Roles whose tensors may come with quantization companions."""


@dataclass(frozen=True)
class Bound:
    """A part, the tensor that fills it (None where `weight_packed` stands in for it), its companions by suffix."""

    part: Part
    tensor: TensorInfo | None
    companions: Mapping[str, TensorInfo]

    @property
    def quantized(self) -> bool:
        """Whether the part is stored in fewer bits than it was trained in."""
        return bool(self.companions) or (self.tensor is not None and self.tensor.dtype not in FLOATS)


@dataclass(frozen=True)
class Match:
    """A checkpoint read against the table. With `problems` empty, every tensor is accounted for.

    `bound` gives, by native parameter name, what fills it; `drops` are source tensors without a place in a served
    model, with the reason; `head_alias` is an output head stored though tied, to be compared with the embedding
    before it is dropped; `renamed` says that a native checkpoint uses older spellings.
    """

    layout: Layout
    architecture: Architecture
    bound: Mapping[str, tuple[Bound, ...]]
    drops: Mapping[str, str]
    head_alias: TensorInfo | None
    missing: tuple[str, ...]
    surplus: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    renamed: bool

    @property
    def quantized(self) -> bool:
        """Whether any part is stored quantized."""
        return any(bound.quantized for parts in self.bound.values() for bound in parts)


def match(tensors: Mapping[str, TensorInfo], config: Config, where: str = "checkpoint") -> Match:
    """Read tensors and config against the table.

    LayoutError where no geometry can be told (unknown layout, contradicting config); all else is listed in the
    result's `problems`, each one line, so that a report can show them together.
    """
    layout = detect(tensors, where)
    canonical, problems = _canonical(layout, tensors)
    embedding = canonical.get(layout.embedding)
    shapes = {name: tensor.shape for name, tensor in canonical.items()}
    try:
        architecture = resolve(layout, config, shapes, embedding.dtype if embedding else None)
    except LayoutError as error:
        if layout is not MEGATRON:
            raise
        # A trainer has no config.json: the same was said by the arguments that it saved.
        message = error.message.replace("config.json", "the run's config")
        raise LayoutError(message, "--config FILE completes or replaces what the trainer saved") from error

    bound: dict[str, tuple[Bound, ...]] = {}
    used: set[str] = set()
    missing: list[str] = []
    for parameter in parameters(architecture):
        parts = tuple(_bind(part, parameter, canonical) for part in layout.parts(parameter, architecture))
        for entry in parts:
            if entry.tensor is not None:
                used.add(entry.part.name)
            used.update(entry.part.companion(suffix) for suffix in entry.companions)
            if entry.tensor is None and "weight_packed" not in entry.companions:
                missing.append(entry.part.name)
            problems += _check(entry, parameter)
        problems += _check_alike(parts)
        bound[parameter.name] = parts

    drops: dict[str, str] = {}
    surplus: list[str] = []
    head_alias = None
    for name in sorted(canonical.keys() - used):
        reason = layout.unused(name)
        if name == layout.head and architecture.tied:
            head_alias = canonical[name]
        elif reason:
            drops[canonical[name].name] = reason
        else:
            surplus.append(name)
    # What is there under a wrong name explains what is missing, so it comes first.
    problems += _surplus_problems(surplus, canonical.keys(), used | set(missing), layout, architecture)
    problems += _missing_problems(missing, architecture)
    notes = tuple(raw_config.notes(config)) if layout in RAW_FAMILY else ()
    renamed = any(name != tensor.name for name, tensor in canonical.items())
    return Match(layout, architecture, bound, drops, head_alias, tuple(missing), tuple(surplus), tuple(problems), notes,
                 renamed)  # fmt: skip


def _canonical(layout: Layout, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], list[str]]:
    result: dict[str, TensorInfo] = {}
    problems = []
    for name, tensor in tensors.items():
        spelling = layout.canonical(name)
        if spelling in result:
            problems.append(f"one tensor under two names: {result[spelling].name} and {name}")
        result[spelling] = tensor
    return result, problems


def _bind(part: Part, parameter: Parameter, tensors: Mapping[str, TensorInfo]) -> Bound:
    if parameter.role not in QUANTIZABLE:
        return Bound(part, tensors.get(part.name), {})
    companions = {s: tensors[name] for s in COMPANIONS if (name := part.companion(s)) in tensors}
    return Bound(part, tensors.get(part.name), companions)


def _check(bound: Bound, parameter: Parameter) -> list[str]:
    tensor, part = bound.tensor, bound.part
    if bound.quantized and "weight_scale" not in bound.companions:
        stored = next(iter(bound.companions.values())) if tensor is None or tensor.dtype in FLOATS else tensor
        if SIZES[stored.dtype] < 8 and parameter.role in QUANTIZABLE:
            return [f"{stored.name} is {stored.dtype} but there is no {part.companion('weight_scale')} beside it"]
    if tensor is None:
        return []
    if "weight_packed" in bound.companions:
        return [f"one tensor in two forms: {tensor.name} and {bound.companions['weight_packed'].name}"]
    if tensor.dtype not in FLOATS and (parameter.role not in QUANTIZABLE or SIZES[tensor.dtype] == 8):
        return [f"{tensor.name} is {tensor.dtype}: a {parameter.role} must be a floating type of 16 or 32 bits"]
    # Two FP4 values share a byte, so a packed matrix has half the columns.
    packed = tensor.dtype == "U8" and tensor.shape == (*part.shape[:-1], part.shape[-1] // 2)
    if tensor.shape != part.shape and not packed:
        return [f"{tensor.name} has shape {list(tensor.shape)}, expected {list(part.shape)}"]
    return []


def _check_alike(parts: Sequence[Bound]) -> list[str]:
    """The matrices of one parameter, experts above all, have to be stored in one way or no runtime can join them."""
    present = [entry for entry in parts if entry.tensor is not None or entry.companions]
    if not any(entry.quantized for entry in present):
        return []
    forms = [(entry.tensor.dtype if entry.tensor else "", frozenset(entry.companions)) for entry in present]
    usual = Counter(forms).most_common(1)[0][0]
    odd = next((entry for entry, form in zip(present, forms, strict=True) if form != usual), None)
    return [f"{odd.part.name} is not quantized as the other experts of its block are"] if odd else []


def _missing_problems(missing: list[str], architecture: Architecture) -> list[str]:
    if not missing:
        return []
    many = "1 tensor is" if len(missing) == 1 else f"{len(missing):,} tensors are"
    return [f"{many} missing for {architecture.blocks} blocks of {architecture.experts} experts: {listing(missing, 4)}"]


def _surplus_problems(
    surplus: list[str], present: Iterable[str], expected: set[str], layout: Layout, architecture: Architecture
) -> list[str]:
    problems: list[str] = []
    unknown: list[str] = []
    misplaced: dict[str, str] = {}
    prefixed: list[tuple[str, str]] = []
    for name in surplus:
        reason = layout.misplaced(name)
        stripped = _without_prefix(name, expected)
        if reason:
            misplaced.setdefault(reason, name)
        elif stripped:
            prefixed.append((name, stripped))
        else:
            unknown.append(name)
    problems += [f"{reason}: {name}" for reason, name in misplaced.items()]
    present = set(present)
    twice = [(name, stripped) for name, stripped in prefixed if stripped in present]
    if twice:
        name, stripped = twice[0]
        problems.append(f"one tensor under two names: {stripped} and {name}" + _more(len(twice)))
    elif prefixed:
        name, stripped = prefixed[0]
        problems.append(f"tensor names carry the prefix {name.removesuffix(stripped)!r}: {name}" + _more(len(prefixed)))
    if unknown:
        # difflib over thousands of names is slow, so only the first unknown one gets its nearest known name.
        nearest = difflib.get_close_matches(unknown[0], expected, n=1, cutoff=0.5)
        near = f" (nearest known name: {nearest[0]})" if nearest else ""
        many = "tensor has" if len(unknown) == 1 else "tensors have"
        problems.append(
            f"{len(unknown):,} {many} no place in a model of {architecture.blocks} blocks and {architecture.experts} "
            f"experts: {unknown[0]}{near}" + _more(len(unknown))
        )
    return problems


def _more(count: int) -> str:
    return f" and {count - 1:,} more" if count > 1 else ""


def _without_prefix(name: str, expected: set[str]) -> str | None:
    while "." in name:
        name = name.partition(".")[2]
        if name in expected:
            return name
    return None


def require(found: Match) -> Match:
    """The match itself when every tensor is accounted for; LayoutError with its first problem otherwise."""
    if found.problems:
        first, *rest = found.problems
        more = f" (and {len(rest)} more problem{'s' if len(rest) > 1 else ''})" if rest else ""
        raise LayoutError(first + more, "`zaya inspect` lists everything that is wrong with this checkpoint")
    return found
