"""Random checkpoints in the raw layout, small and complete, with no parameter left at a value that hides it.

Shapes come from the config here and from the tensors in `raw_model`, so the two check each other.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RawShape:
    """Geometry of a raw config. `width` is one side of an expert; raw configs give gate and up together."""

    blocks: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    width: int
    experts: int
    router: int
    time0: int
    time1: int
    vocab: int


def raw_shape(config: dict[str, Any]) -> RawShape:
    """Read the geometry of a scalar, list or smoe config whose blocks are all alike."""
    layers = config.get("smoe_layers") or config.get("zaya_layers")

    def half_layer(value: Any, half: int) -> int:
        # A list has one entry a half-layer: attention is 0, experts 1. A scalar holds for all.
        return int(value[half] if isinstance(value, list) else value)

    hidden = int(config["hidden_size"])
    attention_heads = int(config["num_attention_heads"])
    shape = RawShape(
        blocks=(len(layers) if layers else int(config["num_hidden_layers"])) // 2,
        hidden=hidden,
        q_heads=half_layer(config.get("cca_num_q_heads") or attention_heads, 0),
        kv_heads=half_layer(config.get("num_query_groups_list") or config["num_query_groups"], 0),
        # head_dim wins over kv_channels where they differ; a smoe config has neither.
        head_dim=int(config.get("head_dim") or config.get("kv_channels") or hidden // attention_heads),
        width=half_layer(config.get("ffn_hidden_size_list") or config["ffn_hidden_size"], 1) // 2,
        experts=int(layers[1] if layers else config["num_experts"]),
        router=half_layer(config.get("smoe_mlp_expansion") or config["zaya_mlp_expansion"], 1),
        time0=int(config.get("cca_time0") or 2),
        time1=int(config.get("cca_time1") or 2),
        vocab=int(config["vocab_size"]),
    )
    if shape.q_heads % shape.kv_heads or shape.kv_heads * shape.head_dim % 2:
        raise ValueError("query heads must be a multiple of key heads, and key channels even")
    return shape


def random_raw(
    config: dict[str, Any],
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    skip_alive: bool = False,
) -> dict[str, Tensor]:
    """A complete random checkpoint of `config`, every tensor of type `dtype`; one seed, one checkpoint.

    Skip has bias -1 and at least one expert a bias >= 0, so it can never win, unless `skip_alive`: then its
    bias lets a fair share of tokens choose it.
    """
    s = raw_shape(config)
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}

    def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std + mean

    def linear(name: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = False) -> None:
        out[f"{name}.weight"] = normal(rows, columns, std=gain * columns**-0.5)
        if bias:
            out[f"{name}.bias"] = normal(rows, std=0.1)

    def res_scale(name: str, *streams: str) -> None:
        for stream in streams:
            out[f"{name}.{stream}_scale"] = normal(s.hidden, std=0.2, mean=1.0)
            out[f"{name}.{stream}_bias"] = normal(s.hidden, std=0.03)

    out["model.embed_tokens.weight"] = normal(s.vocab, s.hidden, std=s.hidden**-0.5)
    channels, kv = (s.q_heads + s.kv_heads) * s.head_dim, s.kv_heads * s.head_dim
    biased = bool(config.get("attention_bias"))
    block_key = "smoe_block" if "smoe_layers" in config else "zaya_block"

    for block in range(s.blocks):
        layer = f"model.layers.{2 * block}"
        # Only layer 0 has no residual stream yet.
        res_scale(f"{layer}.res_scale", *(["hidden_states", "residual"] if block else ["hidden_states"]))
        out[f"{layer}.input_norm.weight"] = normal(s.hidden, std=0.2, mean=1.0)
        qkv = f"{layer}.self_attn.qkv"
        linear(f"{qkv}.linear_q", s.q_heads * s.head_dim, s.hidden, bias=biased)
        linear(f"{qkv}.linear_k", kv, s.hidden, bias=biased)
        linear(f"{qkv}.val_proj1", kv // 2, s.hidden, bias=biased)
        linear(f"{qkv}.val_proj2", kv // 2, s.hidden, bias=biased)
        out[f"{qkv}.conv_qk.0.weight"] = normal(channels, 1, s.time0, std=s.time0**-0.5)
        out[f"{qkv}.conv_qk.0.bias"] = normal(channels, std=0.2)
        fan_in = s.head_dim * s.time1
        out[f"{qkv}.conv_qk.1.weight"] = normal(channels, s.head_dim, s.time1, std=fan_in**-0.5)
        out[f"{qkv}.conv_qk.1.bias"] = normal(channels, std=0.2)
        out[f"{qkv}.temp"] = torch.rand(s.kv_heads, generator=generator) * 1.5 + 0.5
        if config.get("clamp_temp"):  # odd heads lie outside the clamp to [0, 2], by turns above and below
            out[f"{qkv}.temp"][1::2] += -2.5 if block % 2 else 2.0
        linear(f"{layer}.self_attn.o_proj", s.hidden, s.q_heads * s.head_dim, bias=biased)

        layer = f"model.layers.{2 * block + 1}"
        res_scale(f"{layer}.res_scale", "hidden_states", "residual")
        out[f"{layer}.input_norm.weight"] = normal(s.hidden, std=0.2, mean=1.0)
        router = f"{layer}.{block_key}.router"
        linear(f"{router}.down_proj", s.router, s.hidden, bias=True)
        if block:
            out[f"{router}.router_states_scale"] = normal(s.router, std=0.2, mean=0.7)
        out[f"{router}.rmsnorm_eda.weight"] = normal(s.router, std=0.2, mean=1.0)
        linear(f"{router}.router_mlp.0", s.router, s.router, gain=2.0, bias=True)
        linear(f"{router}.router_mlp.2", s.router, s.router, gain=2.0, bias=True)
        linear(f"{router}.router_mlp.4", s.experts + 1, s.router, gain=1.5)
        # GELU's outputs have a positive mean; rows that do not sum to 0 turn it into one favourite expert.
        for after_gelu in (f"{router}.router_mlp.2.weight", f"{router}.router_mlp.4.weight"):
            out[after_gelu] -= out[after_gelu].mean(dim=1, keepdim=True)
        biases = normal(s.experts + 1, std=0.03)
        biases[0] = biases[0].abs()
        biases[-1] = 0.1 if skip_alive else -1.0
        out[f"{router}.balancing_biases"] = biases
        for expert in range(s.experts):
            name = f"{layer}.{block_key}.experts.local_experts.{expert}"
            linear(f"{name}.linear_fc1", 2 * s.width, s.hidden, gain=1.5)
            linear(f"{name}.linear_fc2", s.hidden, s.width, gain=1.5)

    res_scale("model.res_scale", "hidden_states", "residual")
    out["model.final_norm.weight"] = normal(s.hidden, std=0.2, mean=1.0)
    if config.get("tie_word_embeddings") is False:
        linear("lm_head", s.vocab, s.hidden)
    return {name: tensor.to(dtype).contiguous() for name, tensor in out.items()}


def example_configs() -> dict[str, dict[str, Any]]:
    """Small raw configs, one for every style and oddity that checkpoints have; the dicts are the caller's."""
    common: dict[str, Any] = {
        "model_type": "zaya",
        "architectures": ["ZayaForCausalLM"],
        "hidden_size": 64,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "norm_epsilon": 1e-5,
        "activation_func": "swiglu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "lm_head_bias": False,
        "cca": True,
        "scale_residual_merge": True,
        "zaya_use_eda": True,
        "zaya_use_mod": True,
        "moe_router_topk": 1,
        "dtype": "bfloat16",
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    scalar = common | {
        "num_hidden_layers": 6,  # half-layers
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_query_groups": 2,
        "head_dim": 16,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "num_experts": 4,
        "zaya_mlp_expansion": 32,
        "rope_theta": 5000000,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "sliding_window": None,
        "eos_token_id": 106,
    }
    listed = common | {
        "num_hidden_layers": 120,  # stale: zaya_layers is the truth
        "zaya_layers": ["a", 4] * 3,
        "num_attention_heads": 4,  # hidden_size / kv_channels, not the query heads
        "num_key_value_heads": 1,
        "cca_num_q_heads": [2, 0] * 3,
        "num_query_groups_list": [1, 0] * 3,
        "kv_channels": 16,
        "ffn_hidden_size_list": [0, 96] * 3,
        "zaya_mlp_expansion": [0, 32] * 3,
        "rope_theta": 1000000,
        "partial_rotary_factor": 0.5,
        "rope_scaling": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    smoe = common | {
        "model_type": "smoe",
        "architectures": ["SMoEForCausalLM"],
        "num_hidden_layers": 120,  # the class's default, stale too
        "smoe_layers": ["a", 4] * 3,
        "num_attention_heads": 4,  # gives the head size 64 / 4; the query heads are cca_num_q_heads
        "num_key_value_heads": 2,
        "cca_num_q_heads": [2, 0] * 4,  # these lists are longer than the layers
        "num_query_groups_list": [2, 0] * 4,
        "ffn_hidden_size_list": [0, 96] * 5,
        "smoe_mlp_expansion": [0, 32] * 4,
        "swa_layers": [4, 0, 0, 0] * 2,  # even blocks slide
        "rotary_base": 5000000,
        "swa_rotary_base": 20000,
        "rope_pct": 0.5,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    # The default swa_rotary_base is used here: 10000.
    scalar_sliding = scalar | {"num_hidden_layers": 4, "swa_layers": [0, 0, 5, 0]}
    onnx = scalar | {
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_query_groups": 1,
        "head_dim": 32,
        "kv_channels": 128,  # contradicts head_dim, which is right
        "clamp_temp": False,
        "swa_layers": None,
        "swa_rotary_base": None,
        "rope_parameters": {
            "rope_type": "linear",
            "factor": 1.0,
            "rope_theta": 5000000,
            "partial_rotary_factor": 0.5,
        },
    }
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
        del onnx[key]
    one_kv_head = {"num_key_value_heads": 1, "num_query_groups": 1}
    examples = {
        "scalar": scalar,
        "list": listed,
        "smoe": smoe,
        "scalar_sliding": scalar_sliding,
        "clamp_temp": scalar | {"num_hidden_layers": 4, "clamp_temp": True},
        "wide_conv": scalar | {"num_hidden_layers": 4, "cca_time0": 3, "cca_time1": 2},
        "one_kv_head": scalar | {"num_hidden_layers": 4} | one_kv_head,
        "attention_bias": scalar | {"num_hidden_layers": 4, "attention_bias": True},
        "untied": scalar | {"num_hidden_layers": 4, "tie_word_embeddings": False},
        "rope_parameters": onnx,
    }
    return copy.deepcopy(examples)
