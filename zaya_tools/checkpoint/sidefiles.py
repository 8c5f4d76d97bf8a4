"""Which files beside the weights travel with them: an allow-list, never what a trainer left in the folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zaya_tools.checkpoint.source import CONFIG, INDEX

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
)
EXPECTED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
MANIFEST = "zaya_manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""Where a Megatron run says which of its iterations is the last."""


@dataclass(frozen=True)
class SideFiles:
    """Names to copy, expected names that the source lacks, and names that stay behind."""

    copied: tuple[str, ...]
    missing: tuple[str, ...]
    left: tuple[str, ...]


def side_files(folder: Path, weights: frozenset[str] = frozenset()) -> SideFiles:
    """Sort the files of a checkpoint folder; weights, index, config, manifest and tracker are not side files.

    `weights` names what holds the weights where they are not safetensors files.
    """
    present = {entry.name for entry in folder.iterdir() if entry.is_file()}
    copied = tuple(name for name in COPIED if name in present)
    missing = tuple(name for name in EXPECTED if name not in present)
    if "tokenizer.model" in present:
        missing = tuple(name for name in missing if name != "tokenizer.json")
    others = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    left = others - set(copied) - {CONFIG, INDEX, MANIFEST, TRACKER} - weights
    return SideFiles(copied, missing, tuple(sorted(name for name in left if not name.endswith(".safetensors"))))
