"""CCA's projections and mixing as a vLLM layer with state: the raw query/key history and the last delayed value.

vLLM keeps such state a request and layer for Mamba-like layers, in blocks that its scheduler hands out, recycles and
caches by prefix. Block 0 is the null block, which padding rows write and nobody reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from zaya_tools.architecture import Architecture
from zaya_tools.model.cca import (
    Convolutions,
    Heads,
    Projected,
    mix_decodes,
    mix_packed,
    mix_sequence,
    state_dtypes,
    state_shapes,
)
from zaya_tools.model.packing import Packing, pack
from zaya_tools.vllm_plugin.linear import build_linear
from zaya_tools.vllm_plugin.weights import take, weight

OP = "zaya::mix"
"""The custom op's name: reads metadata of the running step, so graphs are split at it as at attention."""


def kept_shapes(architecture: Architecture) -> tuple[tuple[int, ...], ...]:
    """Shapes of the states of one request and layer; without a history (kernels of width 1) only the delayed value."""
    history, delayed = state_shapes(architecture)
    return (history, delayed) if architecture.history else (delayed,)


def kept_dtypes(architecture: Architecture, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Their dtypes."""
    return state_dtypes(dtype)[-len(kept_shapes(architecture)) :]


class Mixing(nn.Module, MambaBase):
    """`self_attn.qkv_proj`: normed tokens to query, key and value heads, mixed within their requests."""

    def __init__(self, architecture: Architecture, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        a = self.architecture = architecture
        self.prefix = prefix
        self.dtype = vllm_config.model_config.dtype

        def project(name: str, outputs: int) -> nn.Module:
            return build_linear(a.hidden_size, outputs, a.attention_bias, vllm_config.quant_config, f"{prefix}.{name}")

        self.q_proj = project("q_proj", a.query_width)
        self.k_proj = project("k_proj", a.key_width)
        self.v_proj_current = project("v_proj_current", a.value_half)
        self.v_proj_delayed = project("v_proj_delayed", a.value_half)
        heads = a.query_heads + a.kv_heads
        # In the order of the products that compute them, see `Convolutions`.
        self.depthwise = weight((a.time0, a.conv_channels), torch.float32)
        self.depthwise_bias = weight((a.conv_channels,), torch.float32)
        self.grouped = weight((heads, a.time1 * a.head_dim, a.head_dim), self.dtype)
        self.grouped_bias = weight((heads, 1, a.head_dim), self.dtype)
        # A projection of zero is its bias; what a linear kernel makes of its own bias after loading is its business.
        self.delayed_zero = weight((a.value_half,), self.dtype)
        self.kv_cache: tuple[Tensor, ...] = (torch.tensor([]),)
        layers = vllm_config.compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two layers of the name {prefix}")
        layers[prefix] = self

    def load(self, local: str, tensor: Tensor) -> bool:
        """Take a convolution's stored tensor by its name below this module; whether it is one."""
        a = self.architecture
        if local == "conv_qk_depthwise.weight":
            take(self.depthwise, tensor[:, 0].t())
        elif local == "conv_qk_depthwise.bias":
            take(self.depthwise_bias, tensor)
        elif local == "conv_qk_grouped.weight":
            taps = tensor.view(-1, a.head_dim, a.head_dim, a.time1).permute(0, 3, 2, 1)
            take(self.grouped, taps.reshape(self.grouped.shape))
        elif local == "conv_qk_grouped.bias":
            take(self.grouped_bias, tensor.view(self.grouped_bias.shape))
        else:
            return False
        return True

    @property
    def convolutions(self) -> Convolutions:
        """The convolutions as `model.cca` takes them."""
        return Convolutions(self.depthwise, self.depthwise_bias, self.grouped, self.grouped_bias)

    def forward(self, x: Tensor) -> Heads:
        """Normed rows x [rows, hidden] to float32 query and key heads and values in the compute dtype."""
        a, rows = self.architecture, x.shape[0]
        query = x.new_empty((rows, a.query_heads, a.head_dim), dtype=torch.float32)
        key = x.new_empty((rows, a.kv_heads, a.head_dim), dtype=torch.float32)
        value = x.new_empty((rows, a.kv_heads, a.head_dim))
        torch.ops.zaya.mix(
            self.q_proj(x), self.k_proj(x), self.v_proj_current(x), self.v_proj_delayed(x),
            query, key, value, self.prefix,
        )  # fmt: skip
        return Heads(query, key, value)

    def mix(self, projected: Projected, metadata: Any) -> Heads:
        """Mix the rows of a step. `metadata` is vLLM's for Mamba-like layers, None while it measures memory."""
        if metadata is None:
            whole = Projected._make([*(part[None] for part in projected[:4]), projected.delayed_zero])
            return Heads(*(part[0] for part in mix_sequence(whole, self.convolutions)))
        history, delayed = self._states()
        if metadata.num_prefills:
            packing = _packing(metadata, projected.query.shape[0], self.architecture.history)
            return mix_packed(projected, self.convolutions, packing, history, delayed)
        slots = metadata.state_indices_tensor_d[:, 0]
        # Rows past the requests are padding.
        first = Projected._make([*(part[: slots.shape[0]] for part in projected[:4]), projected.delayed_zero])
        return mix_decodes(first, self.convolutions, slots, history, delayed)

    def _states(self) -> tuple[Tensor, Tensor]:
        if self.architecture.history:
            history, delayed = self.kv_cache
            return history, delayed
        (delayed,) = self.kv_cache
        return delayed.new_empty((delayed.shape[0], self.architecture.conv_channels, 0)), delayed

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the states, for vLLM."""
        return kept_shapes(self.architecture)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the states, for vLLM."""
        return kept_dtypes(self.architecture, self.dtype)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """Whose step metadata this layer reads: short convolutions keep state as it does."""
        return MambaAttentionBackendEnum.SHORT_CONV

    @property
    def is_kv_cache_tp_replicated(self) -> bool:
        """Every rank of tensor parallelism runs all of attention."""
        return True


def _packing(metadata: Any, rows: int, history: int) -> Packing:
    """Index tensors of a batch with prefill chunks; the layers of a step share them through its metadata."""
    kept = metadata.__dict__.get("_zaya_packing")
    if isinstance(kept, Packing):
        return kept
    offsets = metadata.query_start_loc_p
    decodes = metadata.state_indices_tensor_d
    packing = pack(
        rows,
        history,
        decode_slots=offsets.new_empty(0) if decodes is None else decodes[: metadata.num_decodes, 0],
        prefill_slots=metadata.state_indices_tensor_p,
        prefill_offsets=offsets,
        prefill_has_state=metadata.has_initial_states_p,
    )
    metadata._zaya_packing = packing
    return packing


def _mix(
    q: Tensor, k: Tensor, current: Tensor, delayed: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: str
) -> None:
    context = get_forward_context()
    module = context.no_compile_layers[layer]
    steps = context.attn_metadata
    if steps is not None and not isinstance(steps, dict):
        raise TypeError(f"vLLM described the step with {type(steps).__name__}, not by layer")
    metadata = None if steps is None else steps.get(layer)
    mixed = module.mix(Projected(q, k, current, delayed, module.delayed_zero), metadata)
    for out, part in zip((query, key, value), mixed, strict=True):
        out[: part.shape[0]] = part
        # Numbers that mean nothing must still be numbers: they pass through kernels with the rest of the batch.
        out[part.shape[0] :] = 0


def _mix_fake(
    q: Tensor, k: Tensor, current: Tensor, delayed: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: str
) -> None:
    return None


_library = Library("zaya", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("mix", _mix, mutates_args=["query", "key", "value"], fake_impl=_mix_fake,
                          target_lib=_library)  # fmt: skip
