"""Whether the router's skip class can ever win, proven block by block from the balancing biases alone.

The choice is argmax(p + bias) with p <= 1, so a class whose bias is one below another's cannot be chosen. It
matters because trainers give a skipped token its input times p while native runtimes give zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zaya_tools.checkpoint.source import read_bytes
from zaya_tools.dtypes import FLOATS, to_float32
from zaya_tools.layouts.match import Match
from zaya_tools.parameters import Role, parameters


@dataclass(frozen=True)
class SkipClass:
    """One block's skip class: its bias, the largest expert bias, and whether it can be chosen at all."""

    block: int
    bias: float
    largest_expert_bias: float

    @property
    def reachable(self) -> bool:
        """False where the biases prove that skip never wins; ties go to the expert, whose index is lower.

        Computed in float32 as the router does: rounding is monotonic, so the proof holds for its sums too.
        """
        # Negated, so that a NaN proves nothing.
        return not np.float32(1) + np.float32(self.bias) <= np.float32(self.largest_expert_bias)

    @property
    def state(self) -> str:
        """The finding in words."""
        return "reachable" if self.reachable else "unreachable (proven)"


def skip_classes(found: Match) -> tuple[SkipClass, ...]:
    """The skip class of every block whose balancing biases are there to read and of the right shape."""
    result = []
    for parameter in parameters(found.architecture):
        if parameter.role is not Role.BALANCING:
            continue
        tensor = found.bound[parameter.name][0].tensor
        if tensor is None or tensor.shape != parameter.shape or tensor.dtype not in FLOATS:
            continue
        values = to_float32(read_bytes(tensor), tensor.dtype)
        # A single number that is not finite leaves nothing to compare with.
        largest = values[:-1].max() if np.isfinite(values).all() else np.nan
        result.append(SkipClass(parameter.block or 0, float(values[-1]), float(largest)))
    return tuple(result)


def warnings(classes: Sequence[SkipClass]) -> list[str]:
    """A line on what a reachable skip class means, then a line for every block that has one; none if no block has."""
    reachable = [skip for skip in classes if skip.reachable]
    if not reachable:
        return []
    meaning = (
        f"the skip class can be chosen in {len(reachable)} of {len(classes)} blocks: there native runtimes output 0 "
        "where the trainer output the input times p, and no conversion can repair that"
    )
    return [meaning] + [
        f"block {skip.block}: skip is reachable "
        f"(bias {skip.bias:.4g}, largest expert bias {skip.largest_expert_bias:.4g})"
        for skip in reachable
    ]
