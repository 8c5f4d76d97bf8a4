"""What the tests of quantization share: a small model that every scheme fits, recipes, and the library's own result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressed_tensors.quantization import preset_name_to_scheme
from torch import Tensor

from tests.evaluation.support import compress
from tests.synthetic import logical, small, split
from zaya_tools.architecture import Architecture
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.parameters import Role, parameters
from zaya_tools.quantization.recipe import load_recipe, recipe_names
from zaya_tools.quantization.scheme import INFORMED


def geometry(**fields: Any) -> Architecture:
    """Rows of whole groups and blocks; the value projections end in a partial block of 32 rows."""
    base = {"hidden_size": 128, "expert_width": 128, "query_heads": 4, "kv_heads": 2, "head_dim": 32}
    return small(**{**base, **fields})


GEOMETRY = geometry()

LIBRARY = {
    "fp8": ("FP8_DYNAMIC", None),
    "fp8-block": ("FP8_BLOCK", None),
    "int8": ("INT8", None),
    "int4": ("W4A16", 128),
    "int4-g32": ("W4A16", 32),
    "mxfp4": ("MXFP4A16", None),
    "nvfp4a16": ("NVFP4A16", None),
}
"""Recipes of one scheme, and the preset and group size that say the same in compressed-tensors."""


LEARNING = tuple(
    name
    for name in recipe_names()
    for rules in [load_recipe(name).rules]
    if any(r.observer in INFORMED or (r.scheme is not None and r.scheme.activations.calibrated) for r in rules)
)
"""Recipes that learn from inputs."""
DATA_FREE = tuple(name for name in recipe_names() if name not in LEARNING)


def minmax(folder: Path, base: str) -> Path:
    """A recipe file that finds the scales of a built-in recipe from the largest magnitudes, as the library does."""
    file = folder / f"{base}-minmax.yaml"
    file.write_text(f"name: {base}-minmax\ndescription: As the library does it.\nextends: {base}\nobserver: minmax\n")
    return file


def library(base: str, architecture: Architecture = GEOMETRY, dtype: str = "BF16") -> dict[str, Tensor]:
    """The native checkpoint that compressed-tensors makes of `write_checkpoint`'s values."""
    preset, group = LIBRARY[base]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if group is not None:
        scheme.weights.group_size = group
    values = logical(architecture, dtype=dtype)
    values |= {p.name: values[p.name].float() for p in parameters(architecture) if p.float32}
    tensors = split(NATIVE_PER_EXPERT, architecture, values)
    for parameter in parameters(architecture):
        if parameter.role not in (Role.EXPERT, Role.ATTENTION) or len(parameter.shape) < 2:
            continue
        stacked = values[parameter.name]
        for part in NATIVE_PER_EXPERT.parts(parameter, architecture):
            fused = stacked[part.expert] if part.expert is not None else None
            for local, tensor in compress(tensors.pop(part.name), scheme, fused).items():
                tensors[part.name if local == "weight" else part.companion(local)] = tensor
    return tensors


def full_precision(architecture: Architecture = GEOMETRY, dtype: str = "BF16") -> dict[str, Tensor]:
    """The native checkpoint of the same values, experts stacked."""
    values = logical(architecture, dtype=dtype)
    values |= {p.name: values[p.name].float() for p in parameters(architecture) if p.float32}
    return split(NATIVE, architecture, values)
