"""The arguments that a Megatron trainer saves with a checkpoint, as a raw layout's config, and the other way round."""

from __future__ import annotations

from typing import Any

from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.config_values import Config, agreed, flag, number, whole
from zaya_tools.layouts.raw_config import MARKERS as RAW_MARKERS
from zaya_tools.layouts.raw_config import raw_config

_SAME = RAW_MARKERS - {"ffn_hidden_size", "norm_epsilon", "cca"} | {
    "hidden_size", "num_attention_heads", "moe_router_topk", "normalization", "max_position_embeddings", "cca_time0",
    "cca_time1", "clamp_temp", "zaya_use_eda", "zaya_use_mod", "smoe_use_eda", "smoe_use_mod", "add_bias_linear",
    "scale_residual_merge", "swa_rotary_base", "partial_rotary_factor", "use_rope_scaling", "num_key_value_heads",
    "head_dim", "eos_token_id", "bos_token_id", "pad_token_id", "lm_head_bias",
}  # fmt: skip
"""Arguments that mean what the raw config's keys of the same names mean."""


def config_of_arguments(args: Config, width: int | None = None) -> dict[str, Any]:
    """A raw layout's config out of saved arguments, plain values by name; what they leave open is absent.

    Megatron counts one SwiGLU side as `moe_ffn_hidden_size` (`ffn_hidden_size` without it), the raw config both.
    Trainers that count both as `ffn_hidden_size` are told by `width`, the columns that an expert's second matrix has.
    `vocab_size` is the padded one: the rows that the embedding has. LayoutError for values that contradict each other
    or are of the wrong kind.
    """
    side = whole(args, "moe_ffn_hidden_size")
    if side is None:
        side = whole(args, "ffn_hidden_size")
        side = width if width and side == 2 * width else side
    untied = flag(args, "untie_embeddings_and_output_weights")
    biases = [flag(args, key) for key in ("add_qkv_bias", "attention_bias")]
    found: dict[str, Any] = {key: args[key] for key in _SAME if args.get(key) is not None}
    stated = {
        "num_hidden_layers": whole(args, "num_layers"),
        "num_experts": agreed("the number of experts", {k: whole(args, k) for k in ("num_experts", "num_moe_experts")}),
        "ffn_hidden_size": None if side is None or "ffn_hidden_size_list" in found else 2 * side,
        "norm_epsilon": agreed(
            "the norms' epsilon", {key: number(args, key) for key in ("norm_epsilon", "layernorm_epsilon")}
        ),
        "rope_theta": agreed("the rotary base", {key: number(args, key) for key in ("rotary_base", "rope_theta")}),
        "partial_rotary_factor": _rotary_fraction(args),
        "vocab_size": whole(args, "padded_vocab_size"),
        "tie_word_embeddings": None if untied is None else not untied,
        "attention_bias": None if biases == [None, None] else any(biases),
        "gated_linear_unit": flag(args, "swiglu"),
    }
    found |= {key: value for key, value in stated.items() if value is not None}
    if "swa_rotary_base" in found and "swa_layers" not in found:
        del found["swa_rotary_base"]
    for key in ("zaya_layers", "smoe_layers", "swa_layers"):
        if isinstance(found.get(key), tuple):
            found[key] = list(found[key])
    return found


def _rotary_fraction(args: Config) -> float | None:
    """Trainers read `partial_rotary_factor` where they have it, and Megatron's own name of it where they do not."""
    own, general = number(args, "partial_rotary_factor"), number(args, "rotary_percent")
    return general if own is None else own


def unpadded_vocabulary(args: Config) -> int | None:
    """The tokenizer's vocabulary as the arguments state it; the embedding may have rows beyond it for padding."""
    return whole(args, "vocab_size")


def parallel_sizes(args: Config) -> dict[str, int]:
    """Tensor-, pipeline- and expert-parallel sizes by the short names that Megatron uses for them: tp, pp, ep."""
    keys = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    stated = {short: whole(args, key) for short, key in keys.items()}
    sizes = {short: 1 if size is None else size for short, size in stated.items()}
    wrong = next((short for short, value in sizes.items() if value < 1), None)
    if wrong:
        raise LayoutError(f"config.json says {keys[wrong]} = {sizes[wrong]}", "a number of ranks is at least 1")
    return sizes


def arguments_of(a: Architecture) -> dict[str, Any]:
    """Arguments that state this geometry to a Megatron trainer, for a checkpoint of one rank.

    Raises LayoutError for what the raw layout, and so the trainer, cannot say (scaled rotary embeddings).
    """
    raw = raw_config(a)
    args: dict[str, Any] = {key: raw[key] for key in sorted(_SAME & raw.keys()) if raw[key] is not None}
    return {
        **args,
        "add_qkv_bias": a.attention_bias,
        "bf16": a.dtype == "bfloat16",
        "expert_model_parallel_size": 1,
        "ffn_hidden_size": a.expert_width,
        "fp16": a.dtype == "float16",
        "group_query_attention": True,
        "layernorm_epsilon": a.norm_eps,
        "moe_ffn_hidden_size": a.expert_width,
        "norm_epsilon": a.norm_eps,
        "num_experts": a.experts,
        "num_layers": 2 * a.blocks,
        "padded_vocab_size": a.vocab_size,
        "pipeline_model_parallel_size": 1,
        "position_embedding_type": "rope",
        "rotary_base": a.rope_theta,
        "rotary_percent": a.rotary_fraction,
        "swiglu": True,
        "tensor_model_parallel_size": 1,
        "untie_embeddings_and_output_weights": not a.tied,
        "vocab_size": a.vocab_size,
    }
