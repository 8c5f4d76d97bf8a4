"""The table: every parameter of a ZAYA1 model, its role, its shape and how it is stored.

Names, roles, shapes, precision rules, structural checks and synthetic checkpoints all derive from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod

from zaya_tools.architecture import Architecture


class Role(StrEnum):
    """What a parameter is; precision is decided by it alone."""

    EMBEDDING = "embedding"
    ATTENTION = "attention projection"
    CONVOLUTION = "CCA convolution"
    TEMPERATURE = "key temperature"
    ROUTER = "router"
    BALANCING = "balancing bias"
    EXPERT = "expert"
    NORM = "norm"
    RESIDUAL = "residual scale"
    HEAD = "output head"


PROTECTED = frozenset({Role.CONVOLUTION, Role.TEMPERATURE, Role.ROUTER, Role.BALANCING, Role.NORM, Role.RESIDUAL})
"""Roles that never lose precision, whatever is asked for."""


@dataclass(frozen=True)
class Parameter:
    """One logical tensor: its native name, role and full-precision shape.

    `float32` marks what the native layout stores in float32 always. `block` is None outside the blocks, and
    `local` is the name inside the block (the whole name outside).
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    block: int | None = None
    local: str = ""
    float32: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def protected(self) -> bool:
        """Whether this parameter's role never loses precision."""
        return self.role in PROTECTED


Shape = Callable[[Architecture], tuple[int, ...]]
Condition = Callable[[Architecture, int], bool]


def _always(_: Architecture, __: int) -> bool:
    return True


def _later(_: Architecture, block: int) -> bool:
    return block > 0


def _with_bias(a: Architecture, _: int) -> bool:
    return a.attention_bias


def _untied(a: Architecture, _: int) -> bool:
    return not a.tied


def _head_bias(a: Architecture, _: int) -> bool:
    return a.head_bias


@dataclass(frozen=True)
class _Row:
    name: str
    role: Role
    shape: Shape
    when: Condition = _always
    float32: bool = False


def _hidden(a: Architecture) -> tuple[int, ...]:
    return (a.hidden_size,)


def _router(a: Architecture) -> tuple[int, ...]:
    return (a.router_width,)


def _router_square(a: Architecture) -> tuple[int, ...]:
    return (a.router_width, a.router_width)


def _residual(prefix: str, streams: tuple[str, ...] = ("hidden_states", "residual")) -> tuple[_Row, ...]:
    return tuple(
        _Row(f"{prefix}{stream}_{kind}", Role.RESIDUAL, _hidden) for stream in streams for kind in ("scale", "bias")
    )


_HEAD_OF_MODEL = (
    _Row("model.embed_tokens.weight", Role.EMBEDDING, lambda a: (a.vocab_size, a.hidden_size)),
    *_residual("model.input_", ("hidden_states",)),
)

_QKV = "self_attn.qkv_proj."
_BLOCK = (
    _Row("input_layernorm.weight", Role.NORM, _hidden),
    _Row(f"{_QKV}q_proj.weight", Role.ATTENTION, lambda a: (a.query_width, a.hidden_size)),
    _Row(f"{_QKV}q_proj.bias", Role.ATTENTION, lambda a: (a.query_width,), _with_bias),
    _Row(f"{_QKV}k_proj.weight", Role.ATTENTION, lambda a: (a.key_width, a.hidden_size)),
    _Row(f"{_QKV}k_proj.bias", Role.ATTENTION, lambda a: (a.key_width,), _with_bias),
    _Row(f"{_QKV}v_proj_current.weight", Role.ATTENTION, lambda a: (a.value_half, a.hidden_size)),
    _Row(f"{_QKV}v_proj_current.bias", Role.ATTENTION, lambda a: (a.value_half,), _with_bias),
    _Row(f"{_QKV}v_proj_delayed.weight", Role.ATTENTION, lambda a: (a.value_half, a.hidden_size)),
    _Row(f"{_QKV}v_proj_delayed.bias", Role.ATTENTION, lambda a: (a.value_half,), _with_bias),
    _Row(f"{_QKV}conv_qk_depthwise.weight", Role.CONVOLUTION, lambda a: (a.conv_channels, 1, a.time0)),
    _Row(f"{_QKV}conv_qk_depthwise.bias", Role.CONVOLUTION, lambda a: (a.conv_channels,)),
    _Row(f"{_QKV}conv_qk_grouped.weight", Role.CONVOLUTION, lambda a: (a.conv_channels, a.head_dim, a.time1)),
    _Row(f"{_QKV}conv_qk_grouped.bias", Role.CONVOLUTION, lambda a: (a.conv_channels,)),
    _Row("self_attn.qk_norm.temp", Role.TEMPERATURE, lambda a: (a.kv_heads,)),
    _Row("self_attn.o_proj.weight", Role.ATTENTION, lambda a: (a.hidden_size, a.query_width)),
    _Row("self_attn.o_proj.bias", Role.ATTENTION, _hidden, _with_bias),
    *_residual("post_attention_residual_scale."),
    _Row("post_attention_layernorm.weight", Role.NORM, _hidden),
    _Row("mlp.gate.down_proj.weight", Role.ROUTER, lambda a: (a.router_width, a.hidden_size)),
    _Row("mlp.gate.down_proj.bias", Role.ROUTER, _router),
    _Row("mlp.gate.router_states_scale", Role.ROUTER, _router, _later),
    _Row("mlp.gate.router_mlp.norm.weight", Role.ROUTER, _router),
    _Row("mlp.gate.router_mlp.fc1.weight", Role.ROUTER, _router_square),
    _Row("mlp.gate.router_mlp.fc1.bias", Role.ROUTER, _router),
    _Row("mlp.gate.router_mlp.fc2.weight", Role.ROUTER, _router_square),
    _Row("mlp.gate.router_mlp.fc2.bias", Role.ROUTER, _router),
    # One row more than there are experts: the skip class takes part in the softmax even where it can never win.
    _Row("mlp.gate.router_mlp.out_proj.weight", Role.ROUTER, lambda a: (a.experts + 1, a.router_width)),
    _Row("mlp.gate.balancing_biases", Role.BALANCING, lambda a: (a.experts + 1,), float32=True),
    _Row("mlp.experts.gate_up_proj", Role.EXPERT, lambda a: (a.experts, 2 * a.expert_width, a.hidden_size)),
    _Row("mlp.experts.down_proj", Role.EXPERT, lambda a: (a.experts, a.hidden_size, a.expert_width)),
    *_residual("post_mlp_residual_scale."),
)

_TAIL_OF_MODEL = (
    _Row("model.norm.weight", Role.NORM, _hidden),
    _Row("lm_head.weight", Role.HEAD, lambda a: (a.vocab_size, a.hidden_size), _untied),
    _Row("lm_head.bias", Role.HEAD, lambda a: (a.vocab_size,), _head_bias),
)

BLOCK_PREFIX = "model.layers.{block}."
BLOCK_NAMES = tuple(row.name for row in _BLOCK)
"""Every name inside a block, in order, optional ones included."""
TOP_NAMES = tuple(row.name for row in (*_HEAD_OF_MODEL, *_TAIL_OF_MODEL))
"""Every name outside the blocks."""


def _rows(a: Architecture) -> Iterator[tuple[_Row, int | None]]:
    yield from ((row, None) for row in _HEAD_OF_MODEL)
    for block in range(a.blocks):
        yield from ((row, block) for row in _BLOCK)
    yield from ((row, None) for row in _TAIL_OF_MODEL)


@lru_cache(maxsize=16)
def _table(a: Architecture) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            name=row.name if block is None else BLOCK_PREFIX.format(block=block) + row.name,
            role=row.role,
            shape=row.shape(a),
            block=block,
            local=row.name,
            float32=row.float32,
        )
        for row, block in _rows(a)
        if row.when(a, block or 0)
    )


def parameters(architecture: Architecture) -> tuple[Parameter, ...]:
    """Every parameter of this geometry: embedding, blocks in order, final norm, output head (when untied)."""
    return _table(architecture)


def total(architecture: Architecture) -> int:
    """Number of stored parameters."""
    return sum(parameter.numel for parameter in parameters(architecture))


def active(architecture: Architecture) -> int:
    """Parameters that take part in one token: everything but the experts that top-1 routing leaves out."""
    routed = sum(p.numel for p in parameters(architecture) if p.role is Role.EXPERT)
    return total(architecture) - routed + routed // architecture.experts
