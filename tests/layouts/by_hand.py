"""The published correspondence of raw and native names, written out by hand: the package's own map cannot hide here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

RENAMES = (
    # (raw half-layer: 0 attention, 1 MoE, 2 the next attention), raw suffix, native suffix: the published map.
    (0, "input_norm.weight", "input_layernorm.weight"),
    (0, "self_attn.qkv.linear_q.weight", "self_attn.qkv_proj.q_proj.weight"),
    (0, "self_attn.qkv.linear_k.weight", "self_attn.qkv_proj.k_proj.weight"),
    (0, "self_attn.qkv.val_proj1.weight", "self_attn.qkv_proj.v_proj_current.weight"),
    (0, "self_attn.qkv.val_proj2.weight", "self_attn.qkv_proj.v_proj_delayed.weight"),
    (0, "self_attn.qkv.linear_q.bias", "self_attn.qkv_proj.q_proj.bias"),
    (0, "self_attn.qkv.linear_k.bias", "self_attn.qkv_proj.k_proj.bias"),
    (0, "self_attn.qkv.val_proj1.bias", "self_attn.qkv_proj.v_proj_current.bias"),
    (0, "self_attn.qkv.val_proj2.bias", "self_attn.qkv_proj.v_proj_delayed.bias"),
    (0, "self_attn.qkv.conv_qk.0.weight", "self_attn.qkv_proj.conv_qk_depthwise.weight"),
    (0, "self_attn.qkv.conv_qk.0.bias", "self_attn.qkv_proj.conv_qk_depthwise.bias"),
    (0, "self_attn.qkv.conv_qk.1.weight", "self_attn.qkv_proj.conv_qk_grouped.weight"),
    (0, "self_attn.qkv.conv_qk.1.bias", "self_attn.qkv_proj.conv_qk_grouped.bias"),
    (0, "self_attn.qkv.temp", "self_attn.qk_norm.temp"),
    (0, "self_attn.o_proj.weight", "self_attn.o_proj.weight"),
    (0, "self_attn.o_proj.bias", "self_attn.o_proj.bias"),
    (1, "res_scale.hidden_states_scale", "post_attention_residual_scale.hidden_states_scale"),
    (1, "res_scale.hidden_states_bias", "post_attention_residual_scale.hidden_states_bias"),
    (1, "res_scale.residual_scale", "post_attention_residual_scale.residual_scale"),
    (1, "res_scale.residual_bias", "post_attention_residual_scale.residual_bias"),
    (1, "input_norm.weight", "post_attention_layernorm.weight"),
    (1, "zaya_block.router.down_proj.weight", "mlp.gate.down_proj.weight"),
    (1, "zaya_block.router.down_proj.bias", "mlp.gate.down_proj.bias"),
    (1, "zaya_block.router.router_states_scale", "mlp.gate.router_states_scale"),
    (1, "zaya_block.router.rmsnorm_eda.weight", "mlp.gate.router_mlp.norm.weight"),
    (1, "zaya_block.router.router_mlp.0.weight", "mlp.gate.router_mlp.fc1.weight"),
    (1, "zaya_block.router.router_mlp.0.bias", "mlp.gate.router_mlp.fc1.bias"),
    (1, "zaya_block.router.router_mlp.2.weight", "mlp.gate.router_mlp.fc2.weight"),
    (1, "zaya_block.router.router_mlp.2.bias", "mlp.gate.router_mlp.fc2.bias"),
    (1, "zaya_block.router.router_mlp.4.weight", "mlp.gate.router_mlp.out_proj.weight"),
    (1, "zaya_block.router.balancing_biases", "mlp.gate.balancing_biases"),
    (2, "res_scale.hidden_states_scale", "post_mlp_residual_scale.hidden_states_scale"),
    (2, "res_scale.hidden_states_bias", "post_mlp_residual_scale.hidden_states_bias"),
    (2, "res_scale.residual_scale", "post_mlp_residual_scale.residual_scale"),
    (2, "res_scale.residual_bias", "post_mlp_residual_scale.residual_bias"),
)


def by_hand(blocks: int, experts: int) -> dict[str, list[str]]:
    """Native name -> raw names, in order, from RENAMES alone."""
    result = {
        "model.embed_tokens.weight": ["model.embed_tokens.weight"],
        "model.input_hidden_states_scale": ["model.layers.0.res_scale.hidden_states_scale"],
        "model.input_hidden_states_bias": ["model.layers.0.res_scale.hidden_states_bias"],
        "model.norm.weight": ["model.final_norm.weight"],
        "lm_head.weight": ["lm_head.weight"],
        "lm_head.bias": ["lm_head.bias"],
    }
    for block in range(blocks):
        native = f"model.layers.{block}."
        for half, suffix, name in RENAMES:
            half_layer = 2 * block + half
            layer = "model." if half_layer == 2 * blocks else f"model.layers.{half_layer}."
            result[native + name] = [layer + suffix]
        local = f"model.layers.{2 * block + 1}.zaya_block.experts.local_experts"
        for name, matrix in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            result[f"{native}mlp.experts.{name}"] = [f"{local}.{expert}.{matrix}.weight" for expert in range(experts)]
    return result


def naive_native(raw: Mapping[str, Tensor], blocks: int, experts: int) -> dict[str, Tensor]:
    """The native tensors of a raw or smoe checkpoint: rename and torch.stack, all in memory."""
    raw = {name.replace(".smoe_block.", ".zaya_block."): tensor for name, tensor in raw.items()}
    result = {}
    for native, names in by_hand(blocks, experts).items():
        if names[0] not in raw:
            continue  # an optional parameter that this model has not got
        tensors = [raw[name] for name in names]
        result[native] = torch.stack(tensors) if ".experts." in native else tensors[0]
        if native.endswith("balancing_biases"):
            result[native] = result[native].float()
    return result
