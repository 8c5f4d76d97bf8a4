"""The layout of Megatron trainers: the half-layers of the raw layout under the trainer's module names.

Primus names its modules like this; Zyphra's exports have two levels more (`self_attn.qkv`, `experts`), which are
read as well. Names of a distributed run are those of the whole model: layers and experts numbered through.
"""

from __future__ import annotations

import re

from zaya_tools.architecture import Architecture
from zaya_tools.layouts.base import Layout, Part
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import Parameter

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

_FROM_RAW = (
    (re.compile(r"^model\.embed_tokens\."), "embedding.word_embeddings."),
    (re.compile(r"^lm_head\."), "output_layer."),
    (re.compile(r"^model\."), "decoder."),
    (re.compile(r"\.self_attn\.qkv\."), ".self_attn."),
    (re.compile(r"\.experts\.local_experts\."), ".local_experts."),
)
_SPELLINGS = (
    (re.compile(r"^decoder\.embed_tokens\."), "embedding.word_embeddings."),
    (re.compile(r"^(decoder\.)?lm_head\."), "output_layer."),
    (re.compile(r"\.smoe_block\."), ".zaya_block."),
    *_FROM_RAW[3:],
)
_EXTRA_STATE = re.compile(r"(^|\.)_extra_state(/.*)?$")


def _primus(name: str) -> str:
    for pattern, replacement in _FROM_RAW:
        name = pattern.sub(replacement, name)
    return name


def _canonical(name: str) -> str:
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def _raw(name: str) -> str:
    """A canonical name with the raw layout's numbering, for the rules that both share."""
    return f"model.{name.removeprefix('decoder.')}" if name.startswith("decoder.") else name


def _parts(parameter: Parameter, a: Architecture) -> tuple[Part, ...]:
    return tuple(Part(_primus(part.name), part.shape, part.expert) for part in RAW.parts(parameter, a))


def _unused(name: str) -> str | None:
    if _EXTRA_STATE.search(name):
        return "state of the trainer's kernels, no weights"
    return RAW.unused(_raw(name))


MEGATRON = Layout(
    name="megatron",
    parts=_parts,
    local_name=lambda local, block: _primus(RAW.local_name(local, block)),
    canonical=_canonical,
    count_blocks=lambda names: RAW.count_blocks([_raw(name) for name in names]),
    unused=_unused,
    misplaced=lambda name: RAW.misplaced(_raw(name)),
    embedding=EMBEDDING,
    head=HEAD,
)


def trainer_state(a: Architecture) -> list[tuple[str, str, tuple[int, ...], int]]:
    """What Primus' routers keep beside the parameters: (name, dtype, shape, value when training begins).

    That is the state of the balancing biases' optimiser, and the first router's scale of earlier states, which exists
    and is never used; its dtype is left to the others' ("").
    """
    found: list[tuple[str, str, tuple[int, ...], int]] = []
    for block in range(a.blocks):
        router = f"decoder.layers.{2 * block + 1}.zaya_block.router."
        if not block:
            found.append((f"{router}router_states_scale", "", (a.router_width,), 1))
        found += [(f"{router}balance_{moment}", "F32", (a.experts + 1,), 0) for moment in ("m", "v")]
        found.append((f"{router}balance_step", "I64", (), 0))
    return found


_LAYER = re.compile(r"(?P<before>(?:^|.*\.)decoder\.layers\.|(?:^|.*\.)model\.layers\.)(?P<number>\d+)(?P<after>\..*)")
_LOCAL_EXPERT = re.compile(r"(?P<before>.*\.local_experts\.)(?P<number>\d+)(?P<after>\..*)")


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    found = pattern.fullmatch(name)
    return int(found["number"]) if found else None


def _counted_from(pattern: re.Pattern[str], name: str, first: int) -> str:
    found = pattern.fullmatch(name)
    return f"{found['before']}{int(found['number']) + first}{found['after']}" if found else name


def layer_of(name: str) -> int | None:
    """The number of the half-layer that a tensor is of, None outside them."""
    return _number(_LAYER, name)


def with_layer(name: str, first: int) -> str:
    """The name of a pipeline stage's tensor in the whole model; the stage begins with half-layer `first`."""
    return _counted_from(_LAYER, name, first)


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor is of, None for what is of no single expert."""
    return _number(_LOCAL_EXPERT, name)


def with_expert(name: str, first: int) -> str:
    """The name of an expert-parallel rank's tensor in the whole model; the rank begins with expert `first`."""
    return _counted_from(_LOCAL_EXPERT, name, first)


_SPLIT = (
    (re.compile(r"^embedding\.word_embeddings\.weight$|^output_layer\.weight$"), 0, ("vocab_size",), 1),
    (re.compile(r"\.linear_fc1\.weight$"), 0, ("expert_width",), 2),
    (re.compile(r"\.linear_fc2\.weight$"), 1, ("expert_width",), 1),
    (re.compile(r"\.self_attn\.linear_q\.(weight|bias)$"), 0, ("query_heads", "head_dim"), 1),
    (re.compile(r"\.self_attn\.linear_k\.(weight|bias)$"), 0, ("kv_heads", "head_dim"), 1),
    (re.compile(r"\.self_attn\.temp$"), 0, ("kv_heads",), 1),
    (re.compile(r"\.self_attn\.o_proj\.weight$"), 1, ("query_heads", "head_dim"), 1),
)


def tensor_parallel_split(name: str) -> tuple[int, tuple[str, ...], int] | None:
    """How tensor-parallel ranks cut a tensor: (axis, the Architecture fields whose product is its size, stacks).

    With two stacks every rank has a stretch of the first half on top of one of the second: a SwiGLU's gate and up
    rows, which a rank has to have in pairs. None where no cut is known: the value projections, whose halves are
    current and delayed channels rather than heads, and the convolutions, which mix query and key channels.
    """
    for pattern, axis, fields, stacks in _SPLIT:
        if pattern.search(_canonical(name)):
            return axis, fields, stacks
    return None
