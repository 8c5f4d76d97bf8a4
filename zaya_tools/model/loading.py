"""From tensors by native name to the weights that the model runs on, checked against the table of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError, listing
from zaya_tools.model.block import AttentionWeights, Block
from zaya_tools.model.cca import Convolutions
from zaya_tools.model.ends import Ends
from zaya_tools.model.experts import DenseExperts, ExpertFunction
from zaya_tools.model.linear import Dense, Linear, join
from zaya_tools.model.norm import ResidualScale
from zaya_tools.model.router import RouterWeights
from zaya_tools.model.rows import StoredRows
from zaya_tools.parameters import Parameter, parameters

LinearSource = Callable[[str], Linear | None]
"""A linear layer's local module name, as in `self_attn.o_proj`, to the layer, or None for the plain dense one."""

_ATTENTION = "self_attn."
_PROJECTIONS = f"{_ATTENTION}qkv_proj."
_ROUTER = "mlp.gate."


@dataclass(frozen=True)
class _Reader:
    """Tensors of one part of the model by local name, checked for shape and moved to where they compute."""

    tensors: Mapping[str, Tensor]
    table: Mapping[str, Parameter]
    dtype: torch.dtype
    device: torch.device
    linears: LinearSource

    def raw(self, name: str) -> Tensor:
        row = self.table[name]
        if name not in self.tensors:
            raise LayoutError(f"{row.name} is missing", "the checkpoint is incomplete")
        tensor = self.tensors[name].detach()
        if tuple(tensor.shape) != row.shape:
            raise LayoutError(f"{row.name} has shape {tuple(tensor.shape)}, this architecture needs {row.shape}")
        return tensor.to(self.device)

    def compute(self, name: str) -> Tensor:
        return self.raw(name).to(self.dtype)

    def float32(self, name: str) -> Tensor:
        return self.raw(name).float()

    def linear(self, module: str) -> Linear:
        supplied = self.linears(module)
        if supplied is not None:
            return supplied
        bias = f"{module}.bias"
        return Dense(self.compute(f"{module}.weight"), self.compute(bias) if bias in self.table else None)

    def residual(self, module: str) -> ResidualScale:
        kinds = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")
        return ResidualScale.of(*(self.raw(f"{module}.{kind}") for kind in kinds))


def _attention(read: _Reader, a: Architecture, window: int | None) -> AttentionWeights:
    modules = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")
    projections = join([read.linear(_PROJECTIONS + module) for module in modules])
    convolutions = Convolutions.of(
        read.float32(f"{_PROJECTIONS}conv_qk_depthwise.weight"),
        read.float32(f"{_PROJECTIONS}conv_qk_depthwise.bias"),
        read.float32(f"{_PROJECTIONS}conv_qk_grouped.weight"),
        read.float32(f"{_PROJECTIONS}conv_qk_grouped.bias"),
        read.dtype,
    )
    zero = torch.zeros(1, a.hidden_size, dtype=read.dtype, device=read.device)
    return AttentionWeights(
        projections=projections,
        widths=(a.query_width, a.key_width, a.value_half, a.value_half),
        delayed_zero=projections(zero)[0, -a.value_half :].clone(),
        convolutions=convolutions,
        temperature=read.float32(f"{_ATTENTION}qk_norm.temp"),
        output=read.linear(f"{_ATTENTION}o_proj"),
        window=window,
    )


def _router(read: _Reader, a: Architecture) -> RouterWeights:
    carry = f"{_ROUTER}router_states_scale"
    mlp = f"{_ROUTER}router_mlp."
    return RouterWeights(
        down=read.linear(f"{_ROUTER}down_proj"),
        carry_scale=read.compute(carry) if carry in read.table else None,
        norm=read.float32(f"{mlp}norm.weight"),
        hidden=(read.linear(f"{mlp}fc1"), read.linear(f"{mlp}fc2")),
        out=read.linear(f"{mlp}out_proj"),
        balancing=read.float32(f"{_ROUTER}balancing_biases"),
        eps=a.norm_eps,
    )


def _experts(read: _Reader, cast: bool) -> DenseExperts:
    take = read.compute if cast else read.raw
    return DenseExperts(take("mlp.experts.gate_up_proj"), take("mlp.experts.down_proj"))


def _plain(_: str) -> Linear | None:
    return None


@torch.no_grad()
def build_block(
    architecture: Architecture,
    index: int,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    linears: LinearSource = _plain,
    experts: ExpertFunction | None = None,
    cast_experts: bool = True,
) -> Block:
    """Build block `index` from its tensors by native local name (`mlp.experts.down_proj`), of any floating dtype.

    `linears` and `experts` put other layers, quantized ones for example, in the place of dense ones, whose tensors
    are then not read. Tensors that already have `dtype` are shared, not copied; without `cast_experts` expert tensors
    keep theirs and are cast one expert at a time in use, which costs time and saves a second copy.
    Raises LayoutError naming a tensor that is missing or of the wrong shape, and for `clamp_temp` not yet baked in.
    """
    a = architecture
    if a.clamp_temp:
        raise LayoutError("clamp_temp has no native form", "the key temperatures have to be baked first")
    rows = {row.local: row for row in parameters(a) if row.block == index}
    if not rows:
        raise LayoutError(f"there is no block {index}, this architecture has {a.blocks}")
    read = _Reader(tensors, rows, dtype, torch.device(device), linears)
    return Block(
        attention_norm=read.float32("input_layernorm.weight"),
        attention=_attention(read, a, a.sliding_window if a.sliding[index] else None),
        attention_residual=read.residual("post_attention_residual_scale"),
        moe_norm=read.float32("post_attention_layernorm.weight"),
        router=_router(read, a),
        experts=experts or _experts(read, cast_experts),
        expert_count=a.experts,
        moe_residual=read.residual("post_mlp_residual_scale"),
        eps=a.norm_eps,
        dtype=dtype,
    )


@torch.no_grad()
def build_ends(
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    *,
    stored: Mapping[str, StoredRows] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Ends:
    """Build embedding, final norm and output head from the tensors outside the blocks; errors as in `build_block`.

    Embedding and head keep their dtype, only what is used of them is cast; those in `stored` stay on disk.
    """
    a = architecture
    rows = {row.name: row for row in parameters(a) if row.block is None}
    read = _Reader(tensors, rows, dtype, torch.device(device), _plain)
    on_disk = stored or {}

    def matrix(name: str) -> Tensor | StoredRows:
        return on_disk[name] if name in on_disk else read.raw(name)

    embedding = matrix("model.embed_tokens.weight")
    return Ends(
        embedding=embedding,
        scale=read.float32("model.input_hidden_states_scale"),
        bias=read.float32("model.input_hidden_states_bias"),
        norm=read.float32("model.norm.weight"),
        head=embedding if a.tied else matrix("lm_head.weight"),
        head_bias=read.compute("lm_head.bias") if a.head_bias else None,
        eps=a.norm_eps,
        dtype=dtype,
    )


def check_surplus(architecture: Architecture, names: Mapping[str, Tensor]) -> None:
    """Raise LayoutError naming tensors that this architecture does not have."""
    known = {row.name for row in parameters(architecture)}
    surplus = tuple(name for name in names if name not in known)
    if surplus:
        raise LayoutError(f"tensors that this architecture does not have: {listing(surplus)}")
