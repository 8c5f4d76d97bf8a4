"""Which layout a checkpoint has: its tensor names decide, never `model_type`, which raw and native share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

from zaya_tools.errors import LayoutError
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.megatron import MEGATRON
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW, SMOE

_REFUSED = (
    (
        re.compile(r"(^|\.)vision_tower\.|\.attn\.self_attn\.|\.lora_"),
        "this is a ZAYA1-VL checkpoint (vision tower or vision adapters)",
        "only text models are supported: vision adapters cannot be merged into the text weights",
    ),
    (
        re.compile(r"\.switch_mlp\."),
        "this checkpoint uses MLX names (switch_mlp)",
        "start from the raw or native checkpoint that it was made from",
    ),
)
_MARKERS = (
    (MEGATRON, re.compile(r"(^|\.)decoder\.layers\.\d+\.(self_attn|zaya_block|smoe_block)\.")),
    (RAW, re.compile(r"^(?!(.*\.)?decoder\.).*\.zaya_block\.")),
    (SMOE, re.compile(r"^(?!(.*\.)?decoder\.).*\.smoe_block\.")),
    (NATIVE, re.compile(r"\.self_attn\.qkv_proj\.|\.mlp\.(gate|router|experts)\.")),
)
RAW_FAMILY = (RAW, SMOE, MEGATRON)
"""Layouts in half-layers, whose configs are the raw layout's."""
_NUMBERED_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


def detect(names: Iterable[str], where: PurePath | str = "checkpoint") -> Layout:
    """The layout of these tensor names; LayoutError when there is none, or more than one, or one that is refused."""
    names = list(names)
    for pattern, message, hint in _REFUSED:
        example = next(filter(pattern.search, names), None)
        if example:
            raise LayoutError(f"{where}: {message}: {example}", hint)
    found = {layout: example for layout, pattern in _MARKERS if (example := next(filter(pattern.search, names), None))}
    if len(found) > 1:
        examples = " and ".join(f"{name} ({layout.name})" for layout, name in found.items())
        raise LayoutError(f"{where}: tensors of more than one layout: {examples}", "the folder mixes two checkpoints")
    if not found:
        raise LayoutError(
            f"{where}: no ZAYA1 tensors among {len(names):,} names" + (f" (such as {names[0]})" if names else ""),
            "expected model.layers.N with zaya_block, smoe_block or qkv_proj in the tensor names, or decoder.layers.N",
        )
    (layout,) = found
    if layout is NATIVE and any(map(_NUMBERED_EXPERT.search, names)):
        return NATIVE_PER_EXPERT
    return layout
