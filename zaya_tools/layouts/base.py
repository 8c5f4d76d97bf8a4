"""What a layout is: for every parameter of the table, the tensors that hold it on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zaya_tools.architecture import Architecture
from zaya_tools.parameters import Parameter


@dataclass(frozen=True)
class Part:
    """One tensor of a layout. The parts of a parameter, concatenated row-major in order, are the parameter.

    `shape` is the full-precision shape. Expert parts say which `expert` they belong to.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None

    def companion(self, suffix: str) -> str:
        """Name of a quantization tensor (`weight_scale`, ...) that belongs to this one."""
        return f"{self.name.removesuffix('.weight')}.{suffix}"


@dataclass(frozen=True)
class Layout:
    """A naming of the table.

    `parts` maps a parameter to its tensors; `local_name` gives the name of a block's parameter that is one tensor;
    `canonical` turns an accepted spelling into the one that `parts` uses; `count_blocks` reads the number of
    blocks off canonical names; `unused` says why a known tensor has no place in a served model (None: it has).
    `embedding` and `head` are the canonical names of the embedding and the output head.
    """

    name: str
    parts: Callable[[Parameter, Architecture], tuple[Part, ...]]
    local_name: Callable[[str, int], str]
    canonical: Callable[[str], str]
    count_blocks: Callable[[list[str]], int]
    unused: Callable[[str], str | None]
    misplaced: Callable[[str], str | None]
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"


COMPANIONS = (
    "weight_scale",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "weight_g_idx",
)
"""Quantization tensors that compressed-tensors stores beside, or instead of, a weight."""


def split_experts(parameter: Parameter, names: Callable[[int], tuple[str, ...]]) -> tuple[Part, ...]:
    """Parts of a stacked parameter [experts, rows, columns]: experts in index order, each in len(names) row blocks."""
    experts, rows, columns = parameter.shape
    return tuple(
        Part(name, (rows // len(names(expert)), columns), expert) for expert in range(experts) for name in names(expert)
    )
