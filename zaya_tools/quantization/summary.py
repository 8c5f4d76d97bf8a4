"""What a quantization comes to: how much of each role, how many bytes and bits, which tensors suffer most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from zaya_tools.parameters import PROTECTED, Role, parameters, total
from zaya_tools.quantization.resolve import matrices

if TYPE_CHECKING:
    from zaya_tools.quantization.conversion import Quantization

WORST = 5
Measured = Mapping[str, Mapping[str, Any]]
"""By the name of a quantized weight: scheme, relative_error, sqnr_db (None without any error), clipped_fraction."""


@dataclass(frozen=True)
class RoleSummary:
    """Matrices of a role: how many are quantized, in which schemes, and the bytes of the role as written."""

    role: Role
    quantized: int
    matrices: int
    schemes: tuple[str, ...]
    nbytes: int
    protected: bool


@dataclass(frozen=True)
class Summary:
    """Sizes in bytes; `bits` is per parameter, over everything that is written."""

    roles: tuple[RoleSummary, ...]
    before: int
    after: int
    bits: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, stable in names and order."""
        return {
            "bytes_before": self.before,
            "bytes_after": self.after,
            "bits_per_weight": round(self.bits, 4),
            "roles": [
                {
                    "role": entry.role.value,
                    "quantized": entry.quantized,
                    "of": entry.matrices,
                    "schemes": list(entry.schemes),
                    "bytes": entry.nbytes,
                    "protected": entry.protected,
                }
                for entry in self.roles
            ],
        }


def summarize(work: Quantization) -> Summary:
    """Counts and sizes, from the plan alone. An expert has three matrices, however they are stored."""
    architecture = work.plan.architecture
    nbytes: Counter[Role] = Counter()
    for output in work.plan.outputs():
        nbytes[output.role] += output.nbytes
    counts: Counter[Role] = Counter()
    quantized: Counter[Role] = Counter()
    schemes: dict[Role, set[str]] = {}
    for parameter in parameters(architecture):
        count = matrices(parameter) if len(parameter.shape) > 1 else 0
        counts[parameter.role] += count
        decision = work.resolved.decisions.get(parameter.name)
        if decision is not None and decision.scheme is not None:
            quantized[parameter.role] += count
            schemes.setdefault(parameter.role, set()).add(decision.scheme.name)
    roles = tuple(
        RoleSummary(
            role, quantized[role], counts[role], tuple(sorted(schemes.get(role, ()))), nbytes[role], role in PROTECTED
        )
        for role in Role
        if role in nbytes
    )
    before = work.source.nbytes
    after = work.plan.data_bytes
    return Summary(roles, before, after, 8 * after / total(architecture))


def worst(measured: Measured, count: int = WORST) -> list[tuple[str, Mapping[str, Any]]]:
    """The weights with the largest relative errors, the worst first."""
    ordered = sorted(measured.items(), key=lambda item: (-float(item[1]["relative_error"]), item[0]))
    return ordered[:count]


def typical(measured: Measured) -> tuple[float, float] | None:
    """Median and largest relative error; None where nothing is quantized."""
    errors = [float(entry["relative_error"]) for entry in measured.values()]
    return (median(errors), max(errors)) if errors else None


def decibels(entry: Mapping[str, Any]) -> str:
    """The signal-to-noise ratio of a weight as people read it."""
    return "-" if entry["sqnr_db"] is None else f"{entry['sqnr_db']:.1f}"
