"""Which rule decided what about each module of a model, protected ones with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.parameters import BLOCK_PREFIX, Parameter, Role, parameters
from zaya_tools.quantization.resolve import Resolved
from zaya_tools.quantization.words import NONE, REASONS


@dataclass(frozen=True)
class Explained:
    """One module, or the same one of every expert of a block: what it gets and why.

    `module` is its native name inside the block (the whole name outside, where `block` is None), `shape` the shape of
    its tensor or of each of its `matrices`; `index` is the place of the rule in the recipe, None where none decided.
    """

    block: int | None
    module: str
    role: str
    shape: tuple[int, ...]
    matrices: int
    scheme: str
    observer: str | None
    reason: str
    index: int | None
    protected: bool

    def as_dict(self) -> dict[str, Any]:
        """The module as plain values."""
        return {
            "block": self.block,
            "module": self.module,
            "role": self.role,
            "shape": list(self.shape),
            "matrices": self.matrices,
            "scheme": self.scheme,
            "observer": self.observer,
            "reason": self.reason,
            "rule": None if self.index is None else self.index + 1,
            "protected": self.protected,
        }


def explain(resolved: Resolved) -> tuple[Explained, ...]:
    """Every tensor of the model in the order of the table, those of a block's experts folded."""
    return tuple(entry for parameter in parameters(resolved.architecture) for entry in _explain(parameter, resolved))


def _explain(parameter: Parameter, resolved: Resolved) -> Iterator[Explained]:
    decision = resolved.decisions.get(parameter.name)
    scheme = decision.scheme if decision else None
    for module, shape, matrices in _modules(parameter, resolved):
        yield Explained(
            block=parameter.block,
            module=module,
            role=parameter.role.value,
            shape=shape,
            matrices=matrices,
            scheme=scheme.name if scheme else NONE,
            observer=decision.observer if decision else None,
            reason=_reason(parameter, resolved),
            index=decision.index if decision else None,
            protected=parameter.protected,
        )


def _reason(parameter: Parameter, resolved: Resolved) -> str:
    if parameter.protected:
        return f"protected: {REASONS[parameter.role]}"
    decision = resolved.decisions.get(parameter.name)
    if decision is None:
        return "a bias: always full precision"
    if parameter.role is Role.EMBEDDING and resolved.architecture.tied:
        return "tied to the output head: always full precision"
    return f"rule {decision.index + 1}: {decision.rule}" if decision.index is not None else decision.rule


def _modules(parameter: Parameter, resolved: Resolved) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """(name inside the block, shape, matrices) of the modules that a parameter stands for."""
    local = parameter.local.removesuffix(".weight")
    if parameter.role is not Role.EXPERT:
        yield local, parameter.shape, 1
        return
    a = resolved.architecture
    each = f"0-{a.experts - 1}" if a.experts > 1 else "0"
    prefix = BLOCK_PREFIX.format(block=parameter.block)
    for part in NATIVE_PER_EXPERT.parts(parameter, a):
        if part.expert == 0:
            name = part.name.removeprefix(prefix).removesuffix(".weight")
            yield name.replace(".0.", f".{each}."), part.shape, a.experts


@dataclass(frozen=True)
class Folded:
    """Modules of several blocks that are alike: the blocks (empty outside of them), and one of the modules."""

    blocks: str
    first: Explained


def fold(entries: tuple[Explained, ...]) -> tuple[Folded, ...]:
    """Modules that differ only in their block, together, in the order of their first."""
    alike: dict[tuple[Any, ...], list[Explained]] = {}
    for entry in entries:
        key = (entry.block is None, entry.module, entry.shape, entry.scheme, entry.observer, entry.reason)
        alike.setdefault(key, []).append(entry)
    return tuple(Folded(_ranges([e.block for e in own if e.block is not None]), own[0]) for own in alike.values())


def _ranges(blocks: list[int]) -> str:
    """Numbers in rising order as ranges: 0-3, 7."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
