"""A recipe as `--recipe auto` writes them."""

from __future__ import annotations

from pathlib import Path

from zaya_tools.quantization.damage import Option, Unit
from zaya_tools.quantization.mixed import Chosen, recipe_text
from zaya_tools.quantization.scheme import IMATRIX, Observer

MIX = "mix"
SCHEMES = {
    "attention": ("int8", None, "int4", "int4-g32"),
    "experts": ("int4", "int8", None, "int4-g32"),
}
"""By block: every scheme that auto chooses among for both, full precision too, and no block like another."""


def write_mix(folder: Path, observer: Observer = IMATRIX) -> Path:
    """A recipe file for the four blocks of the bundled checkpoint; what auto would have measured is left out."""
    options = [
        (Unit(role, block, (option := Option(scheme, 1, 0.0),)), option)
        for role, own in SCHEMES.items() for block, scheme in enumerate(own)
    ]  # fmt: skip
    chosen = Chosen(tuple(unit for unit, _ in options), tuple(option for _, option in options), 8, 0.0)
    file = folder / f"{MIX}.yaml"
    file.write_text(recipe_text(chosen, observer, 1))
    return file
