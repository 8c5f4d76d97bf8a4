"""The layouts of Zyphra's training exports: alternating half-layers, `zaya_block` (raw) or `smoe_block` (smoe).

Half-layer 2i is the attention of block i, half-layer 2i + 1 its MoE. A half-layer's `res_scale` scales what came
*before* it, so the residual scales of block i's MoE sit in half-layer 2i + 2, those of the last block at the top.
"""

from __future__ import annotations

import re
from functools import partial

from zaya_tools.architecture import Architecture
from zaya_tools.layouts.base import Layout, Part, split_experts
from zaya_tools.parameters import Parameter

_QKV = "self_attn.qkv."
_ATTENTION = {
    "input_layernorm.weight": "input_norm.weight",
    **{
        f"self_attn.qkv_proj.{native}.{kind}": f"{_QKV}{raw}.{kind}"
        for native, raw in (
            ("q_proj", "linear_q"),
            ("k_proj", "linear_k"),
            ("v_proj_current", "val_proj1"),
            ("v_proj_delayed", "val_proj2"),
            ("conv_qk_depthwise", "conv_qk.0"),
            ("conv_qk_grouped", "conv_qk.1"),
        )
        for kind in ("weight", "bias")
    },
    "self_attn.qk_norm.temp": f"{_QKV}temp",
    "self_attn.o_proj.weight": "self_attn.o_proj.weight",
    "self_attn.o_proj.bias": "self_attn.o_proj.bias",
}
_ROUTER = {
    "down_proj.weight": "down_proj.weight",
    "down_proj.bias": "down_proj.bias",
    "router_states_scale": "router_states_scale",
    "router_mlp.norm.weight": "rmsnorm_eda.weight",
    "router_mlp.fc1.weight": "router_mlp.0.weight",
    "router_mlp.fc1.bias": "router_mlp.0.bias",
    "router_mlp.fc2.weight": "router_mlp.2.weight",
    "router_mlp.fc2.bias": "router_mlp.2.bias",
    "router_mlp.out_proj.weight": "router_mlp.4.weight",
    "balancing_biases": "balancing_biases",
}
_EXPERTS = {"mlp.experts.gate_up_proj": "linear_fc1", "mlp.experts.down_proj": "linear_fc2"}
_TOP = {
    "model.norm.weight": "model.final_norm.weight",
    "model.input_hidden_states_scale": "model.layers.0.res_scale.hidden_states_scale",
    "model.input_hidden_states_bias": "model.layers.0.res_scale.hidden_states_bias",
}
_HALF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def _local_name(block_name: str, local: str, block: int) -> str:
    if local in _ATTENTION:
        return f"model.layers.{2 * block}.{_ATTENTION[local]}"
    moe = f"model.layers.{2 * block + 1}."
    if local == "post_attention_layernorm.weight":
        return f"{moe}input_norm.weight"
    group, _, rest = local.partition(".")
    if group == "post_attention_residual_scale":
        return f"{moe}res_scale.{rest}"
    if group == "post_mlp_residual_scale":
        return f"model.layers.{2 * block + 2}.res_scale.{rest}"
    return f"{moe}{block_name}.router.{_ROUTER[local.removeprefix('mlp.gate.')]}"


def _parts(block_name: str, parameter: Parameter, a: Architecture) -> tuple[Part, ...]:
    block = parameter.block
    if block is None:
        return (Part(_TOP.get(parameter.name, parameter.name), parameter.shape),)
    if parameter.local in _EXPERTS:
        experts = f"model.layers.{2 * block + 1}.{block_name}.experts.local_experts"
        matrix = _EXPERTS[parameter.local]
        return split_experts(parameter, lambda expert: (f"{experts}.{expert}.{matrix}.weight",))
    if parameter.local.startswith("post_mlp_residual_scale.") and block == a.blocks - 1:
        return (Part(f"model.res_scale.{parameter.local.partition('.')[2]}", parameter.shape),)
    return (Part(_local_name(block_name, parameter.local, block), parameter.shape),)


def _count_blocks(names: list[str]) -> int:
    found = (match for match in map(_HALF_LAYER.match, names) if match)
    return max((int(match[1]) // 2 + 1 for match in found), default=0)


def _unused(block_name: str, name: str) -> str | None:
    if name == f"model.layers.1.{block_name}.router.router_states_scale":
        return "the first router has no earlier state to scale; trainers allocate it and never use it"
    if re.fullmatch(rf"model\.layers\.\d+\.{block_name}\.router\.balance_(m|v|step)", name):
        return "state of the trainer's balancing optimiser"
    if name.endswith((".rotary_emb.inv_freq", ".inv_freq")):
        return "rotary frequencies are computed from the config"
    return None


def _misplaced(block_name: str, name: str) -> str | None:
    match = _HALF_LAYER.match(name)
    if not match:
        return None
    index, rest = int(match[1]), match[2]
    if index % 2 and rest.startswith("self_attn."):
        return f"half-layer {index} holds attention tensors where a MoE half-layer should be"
    if index % 2 == 0 and rest.startswith(f"{block_name}."):
        return f"half-layer {index} holds MoE tensors where an attention half-layer should be"
    return None


def _layout(name: str, block_name: str) -> Layout:
    return Layout(
        name=name,
        parts=partial(_parts, block_name),
        local_name=partial(_local_name, block_name),
        canonical=lambda tensor: tensor,
        count_blocks=_count_blocks,
        unused=partial(_unused, block_name),
        misplaced=partial(_misplaced, block_name),
    )


RAW = _layout("raw", "zaya_block")
SMOE = _layout("smoe", "smoe_block")
