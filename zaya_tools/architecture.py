"""The geometry of a ZAYA1 model, the same for every layout, and its native (transformers, vLLM) config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from zaya_tools.errors import LayoutError

FULL, SLIDING = "hybrid", "hybrid_sliding"


@dataclass(frozen=True)
class Architecture:
    """One ZAYA1 geometry. Counts are plain numbers; a *block* is an attention and a MoE sublayer.

    `sliding_window` counts the tokens that a sliding block attends to, itself included (the native meaning).
    `rope_scaling` holds extra rotary parameters of the full-attention blocks as sorted pairs (none: plain rotary).
    `clamp_temp` says that keys are multiplied by exp(clamp(temp, 1e-7, 2)) rather than by temp; the native
    layout has no such path, so a native architecture never sets it.
    """

    blocks: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    experts: int
    expert_width: int
    router_width: int
    vocab_size: int
    time0: int = 2
    time1: int = 2
    tied: bool = True
    attention_bias: bool = False
    head_bias: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 5_000_000.0
    sliding_rope_theta: float = 10_000.0
    rotary_fraction: float = 0.5
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    max_positions: int = 131_072
    sliding: tuple[bool, ...] = ()
    sliding_window: int | None = None
    pad_token: int | None = 0
    bos_token: int | None = 2
    eos_token: int | tuple[int, ...] | None = 106
    dtype: str = "bfloat16"
    clamp_temp: bool = False

    def __post_init__(self) -> None:
        self._check_counts()
        if not self.sliding:
            object.__setattr__(self, "sliding", (False,) * self.blocks)
        self._check()

    def _check_counts(self) -> None:
        for name in (
            "blocks",
            "hidden_size",
            "query_heads",
            "kv_heads",
            "head_dim",
            "experts",
            "expert_width",
            "router_width",
            "vocab_size",
            "time0",
            "time1",
            "max_positions",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"{name} must be a positive whole number, found {value!r}")

    def _check(self) -> None:
        if self.query_heads % self.kv_heads:
            raise LayoutError(f"{self.query_heads} query heads are not a multiple of {self.kv_heads} key/value heads")
        if self.kv_heads * self.head_dim % 2:
            raise LayoutError(
                f"{self.kv_heads} key/value heads of size {self.head_dim} cannot be halved into current and "
                "delayed value channels"
            )
        if not 0 < self.rotary_fraction <= 1:
            raise LayoutError(f"rotary_fraction must be above 0 and at most 1, found {self.rotary_fraction!r}")
        for name in ("norm_eps", "rope_theta", "sliding_rope_theta"):
            if not 0 < getattr(self, name) < inf:
                raise LayoutError(f"{name} must be a finite number above 0, found {getattr(self, name)!r}")
        if len(self.sliding) != self.blocks:
            raise LayoutError(f"{len(self.sliding)} layer types for {self.blocks} blocks")
        if any(self.sliding) and (not self.sliding_window or self.sliding_window < 1):
            raise LayoutError("sliding blocks need a sliding_window of at least one token")

    @property
    def query_width(self) -> int:
        """Channels of all query heads."""
        return self.query_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Channels of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def value_half(self) -> int:
        """Channels of the current (and of the delayed) value projection."""
        return self.key_width // 2

    @property
    def conv_channels(self) -> int:
        """Channels that the two convolutions mix: queries first, then keys."""
        return self.query_width + self.key_width

    @property
    def history(self) -> int:
        """Raw query/key vectors before a chunk that its convolutions see: time0 + time1 - 2."""
        return self.time0 + self.time1 - 2

    def as_dict(self) -> dict[str, Any]:
        """Plain values in the order of the fields, for reports."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {key: list(value) if isinstance(value, tuple) else value for key, value in pairs}


def native_config(architecture: Architecture) -> dict[str, Any]:
    """The config.json of the native layout; `ZayaConfig(**result)` has exactly this geometry.

    Raises LayoutError for `clamp_temp`, which native runtimes would ignore: the caller bakes it into `temp` first.
    """
    a = architecture
    if a.clamp_temp:
        raise LayoutError("clamp_temp has no native form", "the key temperatures have to be baked first")

    def rope(theta: float, scaling: Mapping[str, Any]) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": a.rotary_fraction, **scaling}

    rotary = {}
    if not all(a.sliding):
        rotary[FULL] = rope(a.rope_theta, dict(a.rope_scaling))
    if any(a.sliding):
        rotary[SLIDING] = rope(a.sliding_rope_theta, {})
    return {
        "architectures": ["ZayaForCausalLM"],
        "attention_bias": a.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": a.bos_token,
        "cca_time0": a.time0,
        "cca_time1": a.time1,
        "dtype": a.dtype,
        "eos_token_id": list(a.eos_token) if isinstance(a.eos_token, tuple) else a.eos_token,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "hidden_size": a.hidden_size,
        "initializer_range": 0.02,
        "layer_types": [SLIDING if sliding else FULL for sliding in a.sliding],
        "lm_head_bias": a.head_bias,
        "max_position_embeddings": a.max_positions,
        "model_type": "zaya",
        "moe_intermediate_size": a.expert_width,
        "num_attention_heads": a.query_heads,
        "num_experts": a.experts,
        "num_experts_per_tok": 1,
        "num_hidden_layers": a.blocks,
        "num_key_value_heads": a.kv_heads,
        "output_router_logits": False,
        "pad_token_id": a.pad_token,
        "partial_rotary_factor": a.rotary_fraction,
        "rms_norm_eps": a.norm_eps,
        "rope_parameters": rotary,
        "router_hidden_size": a.router_width,
        "sliding_window": a.sliding_window if any(a.sliding) else None,
        "tie_word_embeddings": a.tied,
        "use_cache": True,
        "vocab_size": a.vocab_size,
    }
