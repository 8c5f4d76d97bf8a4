"""Reading the native config, published and hand-edited ones alike."""

from __future__ import annotations

from typing import Any

from zaya_tools.architecture import FULL, SLIDING
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.config_values import (
    Config,
    agreed,
    dtype_name,
    first_stated,
    flag,
    number,
    rotary_extras,
    sequence,
    table,
    token_id,
    token_ids,
    whole,
)

MARKERS = frozenset({"layer_types", "router_hidden_size", "moe_intermediate_size", "rms_norm_eps"})
"""Keys that only native configs have."""

_FIELDS = {
    "blocks": "num_hidden_layers", "experts": "num_experts", "hidden_size": "hidden_size",
    "query_heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "expert_width": "moe_intermediate_size", "router_width": "router_hidden_size", "vocab_size": "vocab_size",
    "time0": "cca_time0", "time1": "cca_time1", "max_positions": "max_position_embeddings",
}  # fmt: skip


def declared(config: Config) -> dict[str, Any]:
    """What the config states, by Architecture field; fields that it leaves open are absent."""
    if whole(config, "num_experts_per_tok") not in (None, 1):
        raise LayoutError(
            f"config.json: num_experts_per_tok = {config['num_experts_per_tok']}, but ZAYA1 routes to one expert"
        )
    if config.get("hidden_act") not in (None, "silu"):
        raise LayoutError(f"config.json: hidden_act = {config['hidden_act']!r} is not ZAYA1, which has silu")
    found: dict[str, Any] = {field: whole(config, key) for field, key in _FIELDS.items()}
    found |= {
        "tied": flag(config, "tie_word_embeddings"),
        "attention_bias": flag(config, "attention_bias"),
        "head_bias": flag(config, "lm_head_bias"),
        "norm_eps": _eps(config),
        "dtype": dtype_name(config),
        "pad_token": token_id(config, "pad_token_id", 0),
        "bos_token": token_id(config, "bos_token_id", 2),
        "eos_token": token_ids(config, "eos_token_id", 106),
        **_rotary(config),
        **_sliding(config),
    }
    tokens = {"pad_token", "bos_token", "eos_token"}
    return {key: value for key, value in found.items() if value is not None or key in tokens}


def _eps(config: Config) -> float | None:
    # Left out it has a default; null is what no runtime takes.
    if config.get("rms_norm_eps", 0) is None:
        raise LayoutError("config.json: rms_norm_eps is null", "transformers cannot load it: ZAYA1 models have 1e-5")
    return number(config, "rms_norm_eps")


def _rotary(config: Config) -> dict[str, Any]:
    rope = table(config, "rope_parameters")
    if config.get("rope_parameters") == {}:
        raise LayoutError("config.json: rope_parameters is empty", "transformers cannot load it: state the rotary base")
    kinds = set(map(str, sequence(config, "layer_types") or [FULL]))
    # Hand-edited configs give the parameters of full attention without a table of their own.
    tables = {FULL: table(rope, FULL) or rope, SLIDING: table(rope, SLIDING)}
    used = {kind: tables[kind] for kind in (FULL, SLIDING) if kind in kinds}
    if rotary_extras(used.get(SLIDING, {})):
        raise LayoutError("config.json: scaled rotary embeddings in sliding blocks are not supported")
    fraction = first_stated(
        agreed("the rotary fraction", {kind: number(used[kind], "partial_rotary_factor") for kind in used}),
        number(config, "partial_rotary_factor"),
    )
    if fraction is None and rope:
        # transformers would turn whole heads here, and half of each in a config without any rotary parameters.
        raise LayoutError("config.json: rope_parameters does not say partial_rotary_factor", "ZAYA1 models have 0.5")
    return {
        "rope_theta": first_stated(number(tables[FULL], "rope_theta"), number(config, "rope_theta")),
        "sliding_rope_theta": number(tables[SLIDING], "rope_theta"),
        "rotary_fraction": fraction,
        "rope_scaling": rotary_extras(used.get(FULL, {})) or rotary_extras(table(config, "rope_scaling")),
    }


def _sliding(config: Config) -> dict[str, Any]:
    kinds = sequence(config, "layer_types")
    if kinds is None:
        return {}
    unknown = sorted({str(kind) for kind in kinds} - {FULL, SLIDING})
    if unknown:
        raise LayoutError(f"config.json: layer_types has {unknown[0]!r}", f"known types are {FULL} and {SLIDING}")
    blocks = whole(config, "num_hidden_layers")
    if blocks is not None and blocks != len(kinds):
        raise LayoutError(f"config.json: {len(kinds)} layer_types for num_hidden_layers = {blocks}")
    return {"sliding": tuple(kind == SLIDING for kind in kinds), "sliding_window": whole(config, "sliding_window")}
