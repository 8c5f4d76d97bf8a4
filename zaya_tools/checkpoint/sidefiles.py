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


@dataclass(frozen=True)
class SideFiles:
    """Names to copy, expected names that the source lacks, and names that stay behind."""

    copied: tuple[str, ...]
    missing: tuple[str, ...]
    left: tuple[str, ...]


def side_files(folder: Path) -> SideFiles:
    """Sort the files of a checkpoint folder; weights, index, config and manifest are not side files."""
    present = {entry.name for entry in folder.iterdir() if entry.is_file()}
    copied = tuple(name for name in COPIED if name in present)
    missing = tuple(name for name in EXPECTED if name not in present)
    if "tokenizer.model" in present:
        missing = tuple(name for name in missing if name != "tokenizer.json")
    others = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    left = others - set(copied) - {CONFIG, INDEX, MANIFEST}
    return SideFiles(copied, missing, tuple(sorted(name for name in left if not name.endswith(".safetensors"))))
