"""Configs as they are published, and the geometry that each one means.

Values as in the released config files; where a release's file was not at hand in full, its documented keys.
"""

from __future__ import annotations

from typing import Any

from tests.synthetic import ZAYA1_8B, ZAYA1_74B
from zaya_tools.architecture import Architecture
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW, SMOE

RAW_8B: dict[str, Any] = {
    "activation_func": "swiglu", "activation_func_fp8_input_store": False, "add_bias_linear": False,
    "architectures": ["ZayaForCausalLM"], "attention_bias": False, "attention_dropout": 0,
    "bias_activation_fusion": True, "bos_token_id": 2, "cca": True, "dtype": "bfloat16", "eos_token_id": 106,
    "ffn_hidden_size": 4096, "gated_linear_unit": True, "head_dim": 128, "hidden_size": 2048, "kv_channels": 128,
    "lm_head_bias": False, "mamba_cache_dtype": "float32", "max_position_embeddings": 131072, "model_type": "zaya",
    "moe_router_topk": 1, "norm_epsilon": 1e-05, "normalization": "RMSNorm", "num_attention_heads": 8,
    "num_experts": 16, "num_hidden_layers": 80, "num_key_value_heads": 2, "num_query_groups": 2, "pad_token_id": 0,
    "partial_rotary_factor": 0.5, "residual_in_fp32": True, "rope_scaling": False, "rope_theta": 5000000,
    "scale_residual_merge": True, "sliding_window": None, "use_cache": True, "vocab_size": 262272,
    "zaya_mlp_expansion": 256, "zaya_use_eda": True, "zaya_use_mod": True,
}  # fmt: skip

NATIVE_8B: dict[str, Any] = {
    "architectures": ["ZayaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "cca_time0": 2, "cca_time1": 2, "dtype": "bfloat16", "eos_token_id": 106, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "layer_types": ["hybrid"] * 40, "lm_head_bias": False,
    "max_position_embeddings": 131072, "model_type": "zaya", "moe_intermediate_size": 2048,
    "num_attention_heads": 8, "num_experts": 16, "num_experts_per_tok": 1, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "output_router_logits": False, "pad_token_id": 0, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "hybrid": {"partial_rotary_factor": 0.5, "rope_theta": 5000000.0, "rope_type": "default"},
        "hybrid_sliding": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
        "rope_type": "default",
    },
    "router_hidden_size": 256, "sliding_window": None, "tie_word_embeddings": True, "use_cache": True,
    "vocab_size": 262272,
}  # fmt: skip

BASE: dict[str, Any] = {
    "architectures": ["ZayaForCausalLM"], "bos_token_id": 2, "cca_num_q_heads": [8, 0] * 40, "dtype": "bfloat16",
    "eos_token_id": 1, "ffn_hidden_size_list": [0, 4096] * 40, "hidden_size": 2048, "kv_channels": 128,
    "max_position_embeddings": 32768, "model_type": "zaya", "moe_router_topk": 1, "norm_epsilon": 1e-05,
    "num_attention_heads": 16, "num_hidden_layers": 120, "num_key_value_heads": 2,
    "num_query_groups_list": [2, 0] * 40, "pad_token_id": 0, "partial_rotary_factor": 0.5, "residual_in_fp32": False,
    "rope_scaling": False, "rope_theta": 1000000, "tie_word_embeddings": True, "vocab_size": 262272,
    "zaya_layers": ["a", 16] * 40, "zaya_mlp_expansion": [0, 256] * 40,
}  # fmt: skip

SMOE_74B: dict[str, Any] = {
    "architectures": ["SMoEForCausalLM"], "bos_token_id": 2, "cca_num_q_heads": [16, 0] * 80, "eos_token_id": 1,
    "ffn_hidden_size_list": [0, 8192] * 80, "hidden_size": 4096, "max_position_embeddings": 262144,
    "model_type": "smoe", "moe_router_topk": 1, "norm_epsilon": 1e-05, "num_attention_heads": 32,
    "num_hidden_layers": 120, "num_key_value_heads": 2, "num_query_groups_list": [2, 0] * 80, "pad_token_id": 0,
    "residual_in_fp32": False, "rope_pct": 0.5, "rotary_base": 5000000, "rope_scaling": None,
    "smoe_layers": ["a", 24] * 60, "smoe_mlp_expansion": [0, 256] * 80,
    "swa_layers": [4096, 0, 0, 0] * 40, "swa_rotary_base": 10000, "tie_word_embeddings": True,
    "torch_dtype": "torch.bfloat16", "use_rope_scaling": False, "vocab_size": 262272,
}  # fmt: skip

TINY_LIST: dict[str, Any] = {
    "architectures": ["ZayaForCausalLM"], "cca_num_q_heads": [2, 0], "eos_token_id": 1,
    "ffn_hidden_size_list": [0, 32], "hidden_size": 512, "kv_channels": 128, "max_position_embeddings": 32768,
    "model_type": "zaya", "norm_epsilon": 1e-05, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 1, "num_query_groups_list": [1, 0], "partial_rotary_factor": 0.5,
    "residual_in_fp32": False, "rope_scaling": False, "rope_theta": 1000000, "tie_word_embeddings": True,
    "transformers_version": "4.57.1", "vocab_size": 262272, "zaya_layers": ["a", 16], "zaya_mlp_expansion": [0, 8],
}  # fmt: skip

TINY_SCALAR: dict[str, Any] = {
    "architectures": ["ZayaForCausalLM"], "bos_token_id": 2, "cca": True, "clamp_temp": False, "eos_token_id": 106,
    "ffn_hidden_size": 64, "head_dim": 32, "hidden_size": 32, "kv_channels": 128, "max_position_embeddings": 131072,
    "model_type": "zaya", "norm_epsilon": 1e-05, "num_attention_heads": 2, "num_experts": 2, "num_hidden_layers": 4,
    "num_key_value_heads": 1, "num_query_groups": 1, "pad_token_id": 0,
    "rope_parameters": {"factor": 1.0, "partial_rotary_factor": 0.5, "rope_theta": 5000000, "rope_type": "linear"},
    "swa_layers": None, "swa_rotary_base": None, "transformers_version": "5.8.0.dev0", "vocab_size": 262272,
    "zaya_high_prec": True, "zaya_mlp_expansion": 16,
}  # fmt: skip

_BASE = Architecture(
    blocks=40, hidden_size=2048, query_heads=8, kv_heads=2, head_dim=128, experts=16, expert_width=2048,
    router_width=256, vocab_size=262_272, rope_theta=1e6, max_positions=32_768, eos_token=1,
)  # fmt: skip
_TINY_LIST = Architecture(
    blocks=1, hidden_size=512, query_heads=2, kv_heads=1, head_dim=128, experts=16, expert_width=16, router_width=8,
    vocab_size=262_272, rope_theta=1e6, max_positions=32_768, eos_token=1,
)  # fmt: skip
_TINY_SCALAR = Architecture(
    blocks=2, hidden_size=32, query_heads=2, kv_heads=1, head_dim=32, experts=2, expert_width=32, router_width=16,
    vocab_size=262_272,
)  # fmt: skip

PUBLISHED: dict[str, tuple[Layout, dict[str, Any], Architecture]] = {
    "8B raw": (RAW, RAW_8B, ZAYA1_8B),
    "8B native": (NATIVE, NATIVE_8B, ZAYA1_8B),
    "base": (RAW, BASE, _BASE),
    "74B smoe": (SMOE, SMOE_74B, ZAYA1_74B),
    "tiny list": (RAW, TINY_LIST, _TINY_LIST),
    "tiny scalar": (RAW, TINY_SCALAR, _TINY_SCALAR),
}
