"""`ZayaForCausalLM` as vLLM builds, loads and runs it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsQuant

from zaya_tools.architecture import Architecture
from zaya_tools.model.cca import normalise
from zaya_tools.model.norm import ResidualScale, rms_norm
from zaya_tools.model.rotary import Rotary, frequencies
from zaya_tools.vllm_plugin.linear import build_linear
from zaya_tools.vllm_plugin.loading import load
from zaya_tools.vllm_plugin.mixing import OP, Mixing, kept_dtypes, kept_shapes
from zaya_tools.vllm_plugin.moe import SparseMLP
from zaya_tools.vllm_plugin.support import architecture_of, check_heads, check_supported
from zaya_tools.vllm_plugin.vocabulary import build_embedding, build_head
from zaya_tools.vllm_plugin.weights import weight


class QKNorm(nn.Module):
    """`self_attn.qk_norm`: holds the temperatures of the key heads."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.temp = weight((kv_heads,), torch.float32)


class ZayaAttention(nn.Module):
    """`self_attn`. All of it runs on every rank of tensor parallelism: the heads of a layer are too few to cut."""

    def __init__(self, architecture: Architecture, block: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        a, quant_config = architecture, vllm_config.quant_config
        window = a.sliding_window if a.sliding[block] else None
        self.qkv_proj = Mixing(a, vllm_config, f"{prefix}.qkv_proj")
        self.qk_norm = QKNorm(a.kv_heads)
        self.o_proj = build_linear(a.query_width, a.hidden_size, a.attention_bias, quant_config, f"{prefix}.o_proj")
        self.attn = Attention(
            a.query_heads,
            a.head_dim,
            a.head_dim**-0.5,
            num_kv_heads=a.kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
            per_layer_sliding_window=window,
        )
        check_heads(self.attn.attn_backend, a.head_dim)
        # Without a window of its own a layer would take one that the engine has for all of them.
        if self.attn.sliding_window != window:
            raise ValueError(f"{prefix} got the sliding window {self.attn.sliding_window}, not {window}")

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Normed rows x [rows, hidden] to the same shape."""
        query, key, value = self.qkv_proj(x)
        query, key = normalise(query, key, self.qk_norm.temp)
        query, key = rotary(query, x.dtype), rotary(key, x.dtype)
        out = self.attn(query.flatten(1), key.flatten(1), value.flatten(1))
        result: Tensor = self.o_proj(out)
        return result


class Residual(nn.Module):
    """Scale and bias of a sublayer's output and of the stream that it joins, in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden_states_scale, self.hidden_states_bias, self.residual_scale, self.residual_bias = (
            weight((hidden,), torch.float32) for _ in range(4)
        )

    def forward(self, out: Tensor, stream: Tensor) -> Tensor:
        """The stream [rows, hidden] float32 after `out` [rows, hidden] joined it."""
        kinds = (self.hidden_states_scale, self.hidden_states_bias, self.residual_scale, self.residual_bias)
        return ResidualScale.of(*kinds)(out, stream)


class Norm(nn.Module):
    """RMSNorm of the float32 stream, with a float32 weight, into the compute dtype."""

    def __init__(self, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = weight((hidden,), torch.float32)
        self.eps, self.dtype = eps, dtype

    def forward(self, stream: Tensor) -> Tensor:
        """Normed [rows, hidden]."""
        return rms_norm(stream, self.weight, self.eps, self.dtype)


class ZayaBlock(nn.Module):
    """One block: attention and MoE sublayers."""

    def __init__(self, architecture: Architecture, block: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        a, dtype = architecture, vllm_config.model_config.dtype
        self.input_layernorm = Norm(a.hidden_size, a.norm_eps, dtype)
        self.self_attn = ZayaAttention(a, block, vllm_config, f"{prefix}.self_attn")
        self.post_attention_residual_scale = Residual(a.hidden_size)
        self.post_attention_layernorm = Norm(a.hidden_size, a.norm_eps, dtype)
        self.mlp = SparseMLP(a, block, vllm_config, f"{prefix}.mlp")
        self.post_mlp_residual_scale = Residual(a.hidden_size)

    def forward(self, stream: Tensor, carried: Tensor | None, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The float32 stream [rows, hidden] after the block, and the router states for the next one."""
        stream = self.post_attention_residual_scale(self.self_attn(self.input_layernorm(stream), rotary), stream)
        out, states = self.mlp(self.post_attention_layernorm(stream), carried)
        return self.post_mlp_residual_scale(out, stream), states


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1, "inputs_embeds": 0})
class ZayaModel(nn.Module):
    """`model`: everything but the output head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        a = self.architecture = architecture_of(vllm_config)
        self.embed_tokens = build_embedding(a, vllm_config.quant_config, f"{prefix}.embed_tokens")
        self.input_hidden_states_scale = weight((a.hidden_size,), torch.float32)
        self.input_hidden_states_bias = weight((a.hidden_size,), torch.float32)
        self.layers = nn.ModuleList(
            ZayaBlock(a, block, vllm_config, f"{prefix}.layers.{block}") for block in range(a.blocks)
        )
        self.norm = Norm(a.hidden_size, a.norm_eps, vllm_config.model_config.dtype)
        self._factors = {}
        for sliding in sorted(set(a.sliding)):
            # On the CPU first: models are built on their device, and this is a constant of the config.
            with torch.device("cpu"):
                inverse, factor = frequencies(a, sliding)
            device = self.input_hidden_states_scale.device
            self.register_buffer(f"frequencies_{sliding}", inverse.float().to(device), persistent=False)
            self._factors[sliding] = factor

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding [rows, hidden]."""
        out: Tensor = self.embed_tokens(input_ids)
        return out

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Final normed states [rows, hidden] of token ids [rows] at positions [rows]."""
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        stream = (embedded.float() + self.input_hidden_states_bias) * self.input_hidden_states_scale
        rotary = {sliding: self._rotary(sliding, positions) for sliding in self._factors}
        carried: Tensor | None = None
        for layer, sliding in zip(self.layers, self.architecture.sliding, strict=True):
            stream, carried = layer(stream, carried, rotary[sliding])
        out: Tensor = self.norm(stream)
        return out

    def _rotary(self, sliding: bool, positions: Tensor) -> Rotary:
        angles = positions.float()[:, None] * getattr(self, f"frequencies_{sliding}")
        factor = self._factors[sliding]
        return Rotary((angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None])


class ZayaForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsQuant):
    """ZAYA1 with its output head, for vLLM."""

    # Runtime modules have the names that checkpoints have, so configs need no translation.
    packed_modules_mapping: dict[str, list[str]] = {}  # noqa: RUF012

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        check_supported(vllm_config)
        a = self.architecture = architecture_of(vllm_config)
        self.config = vllm_config.model_config.hf_config
        # vLLM unties in the config it hands on where a checkpoint has a head of its own.
        self.stated_tied = a.tied or bool(getattr(vllm_config.model_config, "word_embeddings_untied_by_checkpoint", 0))
        # Graphs must be split at the mixing as at attention: both read what the running step says of its requests.
        splits = vllm_config.compilation_config.splitting_ops
        if splits and OP not in splits:
            splits.append(OP)
        lead = f"{prefix}." if prefix else ""
        self.model = ZayaModel(vllm_config=vllm_config, prefix=f"{lead}model")
        self.lm_head = build_head(a, vllm_config.quant_config, f"{lead}lm_head")
        if a.tied:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(a.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding [rows, hidden]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Final normed states [rows, hidden]."""
        out: Tensor = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [rows, vocabulary] of final states; None on ranks that do not sample."""
        bias = self.lm_head.bias if self.architecture.head_bias else None
        out: Tensor | None = self.logits_processor(self.lm_head, hidden_states, bias)
        return out

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill every parameter from a checkpoint; ZayaError unless each is filled exactly once."""
        return load(self, weights)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Shapes of what a request keeps a layer."""
        return kept_shapes(architecture_of(vllm_config))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Their dtypes."""
        return kept_dtypes(architecture_of(vllm_config), vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """How prefix caching copies each state: whole."""
        return (get_temporal_copy_spec, get_temporal_copy_spec)
