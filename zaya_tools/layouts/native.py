"""The layout that transformers and vLLM read: the table's own names, with experts stacked or one by one."""

from __future__ import annotations

import re

from zaya_tools.architecture import Architecture
from zaya_tools.layouts.base import Layout, Part, split_experts
from zaya_tools.parameters import BLOCK_PREFIX, Parameter

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Spellings of earlier transformers snapshots and of prime-rl, which never renamed the final norm.
_SPELLINGS = (
    (re.compile(r"^model\.final_norm\."), "model.norm."),
    (re.compile(r"\.mlp\.router\."), ".mlp.gate."),
    (re.compile(r"\.router_mlp\.rmsnorm_eda\."), ".router_mlp.norm."),
    (re.compile(r"\.experts\.(gate_up_proj|down_proj)\.weight$"), r".experts.\1"),
)
_PER_EXPERT = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)}


def _canonical(name: str) -> str:
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def _local_name(local: str, block: int) -> str:
    return BLOCK_PREFIX.format(block=block) + local


def _stacked(parameter: Parameter, _: Architecture) -> tuple[Part, ...]:
    return (Part(parameter.name, parameter.shape),)


def _per_expert(parameter: Parameter, a: Architecture) -> tuple[Part, ...]:
    matrices = _PER_EXPERT.get(parameter.local)
    if matrices is None:
        return _stacked(parameter, a)
    experts = _local_name("mlp.experts", parameter.block or 0)
    return split_experts(parameter, lambda expert: tuple(f"{experts}.{expert}.{matrix}.weight" for matrix in matrices))


def _count_blocks(names: list[str]) -> int:
    found = (match for match in map(_LAYER.match, names) if match)
    return max((int(match[1]) + 1 for match in found), default=0)


def _unused(name: str) -> str | None:
    if name == "model.layers.0.mlp.gate.router_states_scale":
        return "the first router has no earlier state to scale; trainers allocate it and never use it"
    if name.endswith(".mlp.tokens_per_expert"):
        return "a trainer's token counter"
    if name.endswith("inv_freq"):
        return "rotary frequencies are computed from the config"
    return None


def _misplaced(_: str) -> str | None:
    return None


NATIVE = Layout("native", _stacked, _local_name, _canonical, _count_blocks, _unused, _misplaced)
NATIVE_PER_EXPERT = Layout("native", _per_expert, _local_name, _canonical, _count_blocks, _unused, _misplaced)
"""Experts as separate matrices: how llm-compressor writes them and how vLLM reads quantized ones."""
