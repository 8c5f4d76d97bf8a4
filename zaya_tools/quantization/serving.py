"""The quantization_config that vLLM and transformers read, in compressed-tensors' form. Pure data, no torch.

vLLM looks a module up by its name in the ignore list, then among the names and patterns of all groups, then by its
class. Of a block's experts it looks at the gate, up and down names of expert 0 alone, and wants one scheme for them.
The output head and the embedding have classes of their own there: a target of `Linear` does not reach them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from zaya_tools.architecture import Architecture
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.parameters import BLOCK_PREFIX, Parameter, Role, parameters
from zaya_tools.quantization.recipe import RecipeError
from zaya_tools.quantization.scheme import Activations, Kind, Scheme
from zaya_tools.releases import RELEASES

if TYPE_CHECKING:
    from zaya_tools.quantization.resolve import Resolved

METHOD = "compressed-tensors"
MIXED = "mixed-precision"


def check_target(version: str | None) -> None:
    """RecipeError for a vLLM version that is not known to read what we write."""
    if version is None:
        return
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:[.+\-a-z].*)?", version)
    if found and f"{found[1]}.{found[2]}" in RELEASES:
        return
    hint = f"known are {' and '.join(RELEASES)}; without a target the config is one that both read"
    if found is None:
        raise RecipeError(f"{version!r} is not a vLLM version", hint)
    oldest = tuple(map(int, RELEASES[0].split(".")))
    age = "too old" if (int(found[1]), int(found[2])) < oldest else "newer than this version of zaya-tools knows"
    raise RecipeError(f"vLLM {version} is {age}", hint)


def quantization_config(
    resolved: Resolved, target_vllm: str | None = None, *, stacked: bool = False
) -> dict[str, Any] | None:
    """The `quantization_config` of config.json for a resolved recipe, None where nothing is quantized.

    `stacked` is for experts that are stored stacked: patterns then also match the stacked tensors' modules. Every
    entry of `ignore` and `targets` matches a module that the runtimes have. No key is null or has a default that
    older readers do not know.
    """
    check_target(target_vllm or resolved.target_vllm)
    schemes = resolved.schemes
    if not schemes:
        return None
    formats = {scheme.format for scheme in schemes}
    groups = {}
    for number, scheme in enumerate(schemes):
        own = _where(resolved, lambda found, scheme=scheme: found == scheme)  # type: ignore[misc]
        if len(schemes) == 1:
            targets = ["Linear", *(_module(p) for p in own if p.block is None)]
        else:
            targets = _patterns(own, resolved.architecture, stacked)
        groups[f"group_{number}"] = {"targets": targets, **_scheme(scheme)}
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "config_groups": groups,
        "ignore": _ignore(resolved, stacked),
    }


def _where(resolved: Resolved, wanted: Callable[[Scheme | None], bool]) -> list[Parameter]:
    decisions = resolved.decisions
    return [p for p in parameters(resolved.architecture) if p.name in decisions and wanted(decisions[p.name].scheme)]


def _scheme(scheme: Scheme) -> dict[str, Any]:
    """The weights, activations and format of a group."""
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.kind in (Kind.INT8, Kind.INT4) else "float",
        "symmetric": True,
        "strategy": _strategy(scheme),
        "dynamic": False,
    }
    if weights["strategy"] == "block":
        weights["block_structure"] = [scheme.rows, scheme.columns]
    elif scheme.columns:
        weights["group_size"] = scheme.columns
    if scheme.kind in _SCALES:
        weights["scale_dtype"] = _SCALES[scheme.kind]
    document: dict[str, Any] = {"weights": weights, "format": scheme.format}
    if scheme.activations is not Activations.NONE:
        seen = {key: weights[key] for key in ("num_bits", "type", "symmetric")}
        dynamic = {Activations.TENSOR: False, Activations.LOCAL: "local"}.get(scheme.activations, True)
        document["input_activations"] = {**seen, "strategy": scheme.activations.value, "dynamic": dynamic}
        if scheme.activations in (Activations.GROUP, Activations.LOCAL):
            document["input_activations"]["group_size"] = scheme.columns
        if scheme.activations is Activations.LOCAL:
            document["input_activations"]["scale_dtype"] = _SCALES[scheme.kind]
    return document


# Scale types that a format has of its own.
_SCALES = {Kind.MXFP4: "torch.uint8", Kind.NVFP4: "torch.float8_e4m3fn"}


def _strategy(scheme: Scheme) -> str:
    if scheme.kind is Kind.NVFP4:
        return "tensor_group"
    if scheme.rows > 1:
        return "block"
    if not scheme.rows:
        return "tensor"
    return "group" if scheme.columns else "channel"


def _ignore(resolved: Resolved, stacked: bool) -> list[str]:
    """What must not be quantized: the head (tied or not), the router, the convolutions, and what the recipe leaves.

    Not the embedding: no target reaches it but its own name.
    """
    a = resolved.architecture
    kept = [p for p in _where(resolved, lambda scheme: scheme is None) if p.block is not None]
    head = resolved.decisions.get(_HEAD)
    entries = [] if head is not None and head.scheme is not None else [_HEAD.removesuffix(".weight")]
    for role in (Role.ROUTER, Role.CONVOLUTION):
        prefix = _prefix([p.local for p in parameters(a) if p.role is role])
        entries.append(f"re:.*{re.escape(prefix)}.*")
    return entries + _patterns(kept, a, stacked)


_HEAD = "lm_head.weight"


def _module(parameter: Parameter) -> str:
    return parameter.name.removesuffix(".weight")


def _patterns(chosen: Iterable[Parameter], a: Architecture, stacked: bool) -> list[str]:
    """Names and anchored patterns that match the modules of these parameters and no others."""
    names = []
    blocks: dict[tuple[Role, int], list[str]] = {}
    for parameter in chosen:
        if parameter.block is None:
            names.append(_module(parameter))
        else:
            blocks.setdefault((parameter.role, parameter.block), []).extend(_locals(parameter, a, stacked))
    alike: dict[tuple[str, ...], list[int]] = {}
    for (_, block), modules in blocks.items():
        alike.setdefault(tuple(modules), []).append(block)
    return names + [_pattern(own, modules, a) for modules, own in alike.items()]


def _locals(parameter: Parameter, a: Architecture, stacked: bool) -> list[str]:
    """Patterns of the modules of a block's parameter, inside the block."""
    if parameter.role is not Role.EXPERT:
        return [re.escape(_module(parameter).removeprefix(BLOCK_PREFIX.format(block=parameter.block)))]
    head = BLOCK_PREFIX.format(block=parameter.block)
    parts = [part for part in NATIVE_PER_EXPERT.parts(parameter, a) if part.expert == 0]
    names = [re.escape(part.name.removeprefix(head).removesuffix(".weight")) for part in parts]
    each = [name.replace(r"\.0\.", r"\.\d+\.") for name in names]
    return [*each, re.escape(parameter.local)] if stacked else each


def _pattern(blocks: list[int], modules: tuple[str, ...], a: Architecture) -> str:
    where = r"\d+" if len(blocks) == a.blocks else _either(list(map(str, blocks)))
    stem = _prefix(modules)
    stem = stem[: stem.rfind(r"\.") + 2] if len(modules) > 1 else ""
    rest = _either([module.removeprefix(stem) for module in modules])
    prefix, suffix = (re.escape(part) for part in BLOCK_PREFIX.split("{block}"))
    return f"re:^{prefix}{where}{suffix}{stem}{rest}$"


def _prefix(names: Collection[str]) -> str:
    """What all names start with."""
    first, last = min(names), max(names)
    return next((first[:at] for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), first)


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"({'|'.join(choices)})"
