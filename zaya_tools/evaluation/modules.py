"""The modules that the runtimes have, derived from the table, and which of them a quantization config names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.units import Unit, all_units
from zaya_tools.parameters import Role

LINEAR, EMBEDDING, CONVOLUTION, OTHER = "Linear", "Embedding", "Conv1d", ""


@dataclass(frozen=True)
class Module:
    """A runtime module, the torch class that targets know it by, and the weight that it holds (if it has a matrix)."""

    name: str
    kind: str
    unit: Unit | None = None


@lru_cache(maxsize=4)
def modules(architecture: Architecture) -> Mapping[str, Module]:
    """Every module by name, parents included. A tied output head is a module too: it only owns no tensor."""
    found: dict[str, Module] = {}
    for unit in all_units(replace(architecture, tied=False)):
        kind = _kind(unit)
        if unit.module not in found or kind is not OTHER:
            found[unit.module] = Module(unit.module, kind, unit if kind is not OTHER else None)
    for name in list(found):
        while "." in name:
            name = name.rpartition(".")[0]  # noqa: PLW2901
            found.setdefault(name, Module(name, OTHER))
    return found


def _kind(unit: Unit) -> str:
    role, name = unit.parameter.role, unit.name
    if not name.endswith(".weight") or role in (Role.NORM, Role.RESIDUAL):
        return OTHER
    if role is Role.EMBEDDING:
        return EMBEDDING
    if role is Role.CONVOLUTION:
        return CONVOLUTION
    return LINEAR if unit.rows > 1 else OTHER


@dataclass(frozen=True)
class Declared:
    """A compressed-tensors quantization config: what it says about each module."""

    config: Any

    @property
    def ignore(self) -> tuple[str, ...]:
        """Entries of the ignore list."""
        return tuple(self.config.ignore or ())

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets of all groups."""
        return tuple(target for scheme in self.config.config_groups.values() for target in scheme.targets)

    def scheme(self, module: Module) -> Any | None:
        """The QuantizationScheme of a module, None when it is ignored or not targeted.

        A target that is a name wins over a pattern, which wins over a class, as in compressed-tensors.
        """
        if any(matches(module, entry) for entry in self.ignore):
            return None
        ranked = [
            (_rank(module, target), number, scheme)
            for number, scheme in enumerate(self.config.config_groups.values())
            for target in scheme.targets
            if matches(module, target)
        ]
        return min(ranked, key=lambda entry: entry[:2])[2] if ranked else None

    def only_scheme(self) -> Any | None:
        """The scheme, where all groups have the same one; None otherwise."""
        schemes = list(self.config.config_groups.values())
        return schemes[0] if schemes and all(same_scheme(scheme, schemes[0]) for scheme in schemes) else None

    def format(self, scheme: Any) -> str:
        """The name of the compressor that wrote a scheme's tensors."""
        stated = getattr(scheme.format, "value", scheme.format) or self.config.format
        if stated not in _NO_FORMAT:
            return str(stated)
        import torch
        from compressed_tensors.compressors.format import infer_module_format

        return str(infer_module_format(torch.nn.Linear, scheme).value)


# What a config says when each scheme has its own format, or when its writer named none.
_NO_FORMAT = ("mixed-precision", "fakequant", "dense")


def _rank(module: Module, target: str) -> int:
    return 0 if target == module.name else 1 if target.startswith("re:") else 2


def matches(module: Module, entry: str) -> bool:
    """Whether a target or ignore entry means this module: by whole name, by pattern from its start, or by class."""
    if not entry.startswith("re:"):
        return entry == module.name or (module.kind != OTHER and entry == module.kind)
    from compressed_tensors.utils.match import match_name

    return bool(match_name(module.name, entry))


def same_scheme(first: Any, second: Any) -> bool:
    """Whether two schemes store and compute alike, whatever they target."""
    return bool(first.model_dump(exclude={"targets"}) == second.model_dump(exclude={"targets"}))


def declared(config: Mapping[str, Any]) -> Declared | None:
    """The quantization config of a config.json, None where there is none.

    LayoutError when another method wrote it or compressed-tensors cannot read it.
    """
    stated = config.get("quantization_config")
    if stated is None:
        return None
    if not isinstance(stated, dict) or stated.get("quant_method", "compressed-tensors") != "compressed-tensors":
        method = stated.get("quant_method") if isinstance(stated, dict) else stated
        raise LayoutError(
            f"config.json: quantization_config is of the method {method!r}: only compressed-tensors can be checked"
        )
    from compressed_tensors.quantization import QuantizationConfig

    try:
        return Declared(QuantizationConfig.model_validate(stated))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise LayoutError(f"config.json: compressed-tensors cannot read quantization_config: {reason}") from error


def unmatched(entries: Iterable[str], architecture: Architecture) -> tuple[str, ...]:
    """The entries that no module matches."""
    table = modules(architecture)
    kinds = {module.kind for module in table.values()} - {OTHER}
    return tuple(
        entry
        for entry in dict.fromkeys(entries)
        if entry not in table
        and entry not in kinds
        and not (entry.startswith("re:") and any(matches(module, entry) for module in table.values()))
    )
