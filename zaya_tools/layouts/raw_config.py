"""The configs of the raw and smoe layouts, in both styles: scalars (ZAYA1-8B) and a value a half-layer (base, 74B)."""

from __future__ import annotations

from typing import Any

from zaya_tools.architecture import Architecture
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

MARKERS = frozenset(
    (
        "zaya_layers",
        "smoe_layers",
        "cca",
        "cca_num_q_heads",
        "zaya_mlp_expansion",
        "smoe_mlp_expansion",
        "kv_channels",
        "ffn_hidden_size",
        "ffn_hidden_size_list",
        "num_query_groups",
        "num_query_groups_list",
        "norm_epsilon",
        "swa_layers",
    )
)
"""Keys that only raw and smoe configs have."""

_REQUIRED = {
    "cca": True, "zaya_use_eda": True, "zaya_use_mod": True, "scale_residual_merge": True, "gated_linear_unit": True,
    "smoe_use_eda": True, "smoe_use_mod": True, "add_bias_linear": False,
}  # fmt: skip


def declared(config: Config) -> dict[str, Any]:
    """What the config states, by Architecture field; fields that it leaves open are absent.

    Raises LayoutError for values that are malformed, contradict each other or describe another architecture.
    """
    _check_kind(config)
    experts, halves = _half_layers(config)
    found: dict[str, Any] = {
        "blocks": halves // 2 if halves else None,
        "experts": agreed(
            "the number of experts", {"layers list": experts, "num_experts": whole(config, "num_experts")}
        ),
        "hidden_size": whole(config, "hidden_size"),
        "query_heads": _per_half(config, "cca_num_q_heads", halves, 0),
        "kv_heads": agreed(
            "key/value heads",
            {
                "num_query_groups_list": _per_half(config, "num_query_groups_list", halves, 0),
                "num_query_groups": _per_half(config, "num_query_groups", halves, 0),
                "num_key_value_heads": whole(config, "num_key_value_heads"),
            },
        ),
        # Small published configs state both, with a stale kv_channels: head_dim is the one that runtimes read.
        "head_dim": first_stated(whole(config, "head_dim"), whole(config, "kv_channels")),
        "expert_width": _expert_width(config, halves),
        "router_width": agreed(
            "the router's width",
            {key: _per_half(config, key, halves, 1) for key in ("zaya_mlp_expansion", "smoe_mlp_expansion")},
        ),
        "vocab_size": whole(config, "vocab_size"),
        "time0": whole(config, "cca_time0"),
        "time1": whole(config, "cca_time1"),
        "tied": flag(config, "tie_word_embeddings"),
        "attention_bias": flag(config, "attention_bias"),
        "head_bias": flag(config, "lm_head_bias"),
        "norm_eps": first_stated(number(config, "norm_epsilon"), number(config, "rms_norm_eps")),
        "max_positions": whole(config, "max_position_embeddings"),
        "pad_token": token_id(config, "pad_token_id", 0),
        "bos_token": token_id(config, "bos_token_id", 2),
        "eos_token": token_ids(config, "eos_token_id", 1),
        "dtype": dtype_name(config),
        "clamp_temp": flag(config, "clamp_temp"),
        **_rotary(config),
        **_sliding(config, halves),
    }
    tokens = {"pad_token", "bos_token", "eos_token"}
    return {key: value for key, value in found.items() if value is not None or key in tokens}


def head_counts(config: Config) -> dict[str, int]:
    """`num_attention_heads`, which trainers use for the query heads or for hidden size / head size."""
    heads = whole(config, "num_attention_heads")
    return {} if heads is None else {"num_attention_heads": heads}


def notes(config: Config) -> list[str]:
    """What a reader of this config should be told."""
    found = []
    stated = whole(config, "num_hidden_layers")
    key, layers = _layers(config)
    if layers is not None and stated is not None and stated != len(layers):
        found.append(
            f"num_hidden_layers = {stated} is stale: {key} lists {len(layers)} half-layers, which is the truth"
        )
    if flag(config, "residual_in_fp32") is False:
        found.append("the config asks for a residual stream in the model's dtype; native runtimes keep it in float32")
    return found


def _check_kind(config: Config) -> None:
    for key, wanted in _REQUIRED.items():
        if flag(config, key) is (not wanted):
            raise LayoutError(
                f"config.json: {key} = {str(not wanted).lower()} is not ZAYA1", "no native runtime has it"
            )
    for key, wanted_name in (("activation_func", "swiglu"), ("normalization", "RMSNorm")):
        if config.get(key) not in (None, wanted_name):
            raise LayoutError(f"config.json: {key} = {config[key]!r} is not ZAYA1, which has {wanted_name}")
    if whole(config, "moe_router_topk") not in (None, 1):
        raise LayoutError(f"config.json: moe_router_topk = {config['moe_router_topk']}, but ZAYA1 routes to one expert")


def _layers(config: Config) -> tuple[str, list[Any] | None]:
    for key in ("zaya_layers", "smoe_layers"):
        layers = sequence(config, key)
        if layers is not None:
            return key, layers
    return "", None


def _half_layers(config: Config) -> tuple[int | None, int | None]:
    """(experts, half-layers) from the list, which is the truth where there is one, else from num_hidden_layers."""
    key, layers = _layers(config)
    if layers is None:
        halves = whole(config, "num_hidden_layers")
        if halves is not None and (halves < 2 or halves % 2):
            raise LayoutError(f"config.json: num_hidden_layers = {halves}, but half-layers come in pairs")
        return None, halves
    experts = [entry for entry in layers[1::2] if isinstance(entry, int) and not isinstance(entry, bool)]
    pairs = 2 * len(experts) == len(layers) > 0 and all(entry == "a" for entry in layers[::2])
    if not pairs or len(set(experts)) != 1:
        raise LayoutError(f"config.json: {key} must alternate 'a' and one number of experts")
    return experts[0], len(layers)


def _per_half(config: Config, key: str, halves: int | None, offset: int) -> int | None:
    """A scalar, or the one value that a list has at every attention (offset 0) or MoE (offset 1) half-layer.

    Lists may be longer than the model: entries past its last half-layer mean nothing.
    """
    if not isinstance(config.get(key), list):
        return whole(config, key)
    values: list[Any] = config[key]
    if halves is not None and len(values) < 2 and halves > len(values):
        raise LayoutError(f"config.json: {key} has {len(values)} entries for {halves} half-layers")
    used = values[:halves][offset::2]
    # Short published lists (two entries for any depth) state a pattern; longer ones have to reach the last half-layer.
    if halves is not None and 2 < len(values) < halves:
        raise LayoutError(f"config.json: {key} has {len(values)} entries for {halves} half-layers")
    if not used or any(isinstance(v, bool) or not isinstance(v, int) for v in used) or len(set(used)) != 1:
        raise LayoutError(
            f"config.json: {key} must hold one whole number for all its sublayers, found {sorted(set(map(str, used)))}"
        )
    return int(used[0])


def _expert_width(config: Config, halves: int | None) -> int | None:
    # Trainers count the gate and up halves together.
    both = agreed(
        "the experts' width",
        {key: _per_half(config, key, halves, 1) for key in ("ffn_hidden_size", "ffn_hidden_size_list")},
    )
    if both is None:
        return None
    if both % 2:
        raise LayoutError(f"config.json: an expert's fused gate and up width must be even, found {both}")
    return int(both) // 2


def _rotary(config: Config) -> dict[str, Any]:
    nested = table(config, "rope_parameters")
    scaling = table(config, "rope_scaling")
    extras = rotary_extras(scaling) or rotary_extras(nested)
    if extras or flag(config, "use_rope_scaling"):
        kind = dict(extras).get("rope_type", "use_rope_scaling")
        raise LayoutError(
            f"config.json: scaled rotary embeddings ({kind}) are unknown in this layout",
            "no ZAYA1 trainer defines how they apply to sliding blocks",
        )
    theta = agreed(
        "the rotary base",
        {
            "rope_theta": number(config, "rope_theta"),
            "rotary_base": number(config, "rotary_base"),
            "rope_parameters.rope_theta": number(nested, "rope_theta"),
        },
    )
    fraction = agreed(
        "the rotary fraction",
        {
            "partial_rotary_factor": number(config, "partial_rotary_factor"),
            "rope_pct": number(config, "rope_pct"),
            "rope_parameters.partial_rotary_factor": number(nested, "partial_rotary_factor"),
        },
    )
    return {"rope_theta": theta, "rotary_fraction": fraction, "sliding_rope_theta": number(config, "swa_rotary_base")}


def _sliding(config: Config, halves: int | None) -> dict[str, Any]:
    values = sequence(config, "swa_layers")
    if values is None:
        if whole(config, "sliding_window"):
            raise LayoutError("config.json: sliding_window without swa_layers does not say which half-layers slide")
        return {}
    if halves is not None and len(values) < halves:
        raise LayoutError(f"config.json: swa_layers has {len(values)} entries for {halves} half-layers")
    windows = [value or 0 for value in values[:halves]]
    if any(isinstance(w, bool) or not isinstance(w, int) or w < 0 for w in windows):
        raise LayoutError("config.json: swa_layers must hold a window, or 0, for every half-layer")
    if any(windows[1::2]):
        raise LayoutError("config.json: swa_layers has a window at a MoE half-layer")
    sizes = sorted({window for window in windows if window})
    if len(sizes) > 1:
        raise LayoutError(f"config.json: swa_layers has windows of {sizes} tokens; native runtimes take one size")
    # A trainer's window counts the tokens before the query; the native one counts the query too.
    return {"sliding": tuple(w > 0 for w in windows[::2]), "sliding_window": sizes[0] + 1 if sizes else None}


def raw_config(architecture: Architecture, style: str = "scalar") -> dict[str, Any]:
    """The raw layout's config.json: `style` is "scalar" (as ZAYA1-8B) or "list" (as ZAYA1-base).

    Raises LayoutError for what the raw layout cannot say (scaled rotary embeddings).
    """
    a = architecture
    if a.rope_scaling:
        raise LayoutError("scaled rotary embeddings have no form in the raw layout")
    halves = 2 * a.blocks
    common: dict[str, Any] = {
        "activation_func": "swiglu",
        "add_bias_linear": False,
        "architectures": ["ZayaForCausalLM"],
        "attention_bias": a.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": a.bos_token,
        "cca": True,
        "cca_time0": a.time0,
        "cca_time1": a.time1,
        "clamp_temp": a.clamp_temp,
        "dtype": a.dtype,
        "eos_token_id": list(a.eos_token) if isinstance(a.eos_token, tuple) else a.eos_token,
        "gated_linear_unit": True,
        "hidden_size": a.hidden_size,
        "kv_channels": a.head_dim,
        "lm_head_bias": a.head_bias,
        "max_position_embeddings": a.max_positions,
        "model_type": "zaya",
        "moe_router_topk": 1,
        "norm_epsilon": a.norm_eps,
        "normalization": "RMSNorm",
        "num_hidden_layers": halves,
        "num_key_value_heads": a.kv_heads,
        "pad_token_id": a.pad_token,
        "partial_rotary_factor": a.rotary_fraction,
        "residual_in_fp32": True,
        "rope_scaling": False,
        "rope_theta": a.rope_theta,
        "scale_residual_merge": True,
        "sliding_window": None,
        "swa_layers": None,
        "swa_rotary_base": None,
        "tie_word_embeddings": a.tied,
        "use_cache": True,
        "vocab_size": a.vocab_size,
        "zaya_use_eda": True,
        "zaya_use_mod": True,
    }
    if any(a.sliding):
        window = (a.sliding_window or 0) - 1
        common["swa_layers"] = [entry for sliding in a.sliding for entry in (window if sliding else 0, 0)]
        common["swa_rotary_base"] = a.sliding_rope_theta
    if style == "scalar":
        own: dict[str, Any] = {
            "ffn_hidden_size": 2 * a.expert_width,
            "head_dim": a.head_dim,
            "num_attention_heads": a.query_heads,
            "num_experts": a.experts,
            "num_query_groups": a.kv_heads,
            "zaya_mlp_expansion": a.router_width,
        }
    else:
        own = {
            "cca_num_q_heads": [a.query_heads, 0] * a.blocks,
            "ffn_hidden_size_list": [0, 2 * a.expert_width] * a.blocks,
            "num_attention_heads": a.query_heads if a.hidden_size % a.head_dim else a.hidden_size // a.head_dim,
            "num_query_groups_list": [a.kv_heads, 0] * a.blocks,
            "zaya_layers": ["a", a.experts] * a.blocks,
            "zaya_mlp_expansion": [0, a.router_width] * a.blocks,
        }
    return dict(sorted({**common, **own}.items()))
