"""Between the trained model (native names) and the raw training layout on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError, listing
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config
from zaya_tools.parameters import parameters
from zaya_tools.training.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "model.safetensors"


def raw_names(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Native name -> raw names: one, or one an expert in the order of the stacked native tensor."""
    return {p.name: tuple(part.name for part in RAW.parts(p, architecture)) for p in parameters(architecture)}


def export_raw(architecture: Architecture, native: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Raw-layout tensors in bfloat16 from a native state dict of any float dtype, without a tied head.

    Raises LayoutError for missing or unexpected names, for non-finite values, and where the skip class could
    win, that is where 1 + bias[skip] > max of the other biases: layouts disagree about what it then gives.
    """
    import torch

    names = raw_names(architecture)
    given = set(native) - ({"lm_head.weight"} if architecture.tied else set())
    if given != set(names):
        raise LayoutError(f"not the tensors of this geometry: {listing(sorted(given ^ set(names)))}")
    raw: dict[str, Tensor] = {}
    for name, targets in names.items():
        stored = native[name].detach().to(torch.bfloat16)
        if not torch.isfinite(stored).all():
            raise LayoutError(f"{name} is not finite after rounding to bfloat16")
        if name.endswith(".balancing_biases") and float(stored[-1]) + 1 > float(stored[:-1].max()):
            raise LayoutError(f"{name}: the skip class could be chosen")
        parts = [stored] if len(targets) == 1 else list(stored.unbind(0))
        raw.update((target, part.clone().contiguous()) for target, part in zip(targets, parts, strict=True))
    return raw


def import_raw(architecture: Architecture, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `export_raw`: native state dict in float32, without the tied `lm_head.weight`."""
    import torch

    native: dict[str, Tensor] = {}
    for name, sources in raw_names(architecture).items():
        parts = [raw[source].to(torch.float32) for source in sources]
        native[name] = parts[0] if len(parts) == 1 else torch.stack(parts)
    return native


def write_checkpoint(folder: Path, architecture: Architecture, native: Mapping[str, Tensor]) -> None:
    """Write the raw checkpoint into `folder`: weights, config, generation config and tokenizer files."""
    from safetensors.torch import save_file

    raw = export_raw(architecture, native)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(raw, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors may write for the owner alone, and this file is shipped
    generation = {
        "_from_model_config": True,
        "bos_token_id": architecture.bos_token,
        "eos_token_id": architecture.eos_token,
        "pad_token_id": architecture.pad_token,
    }
    for name, content in (("config.json", raw_config(architecture, "list")), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(folder, architecture.max_positions)
