"""The tiny trained checkpoint that travels with the package."""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""A trained ZAYA1 of a few million parameters in the raw layout, with its byte-level tokenizer."""
