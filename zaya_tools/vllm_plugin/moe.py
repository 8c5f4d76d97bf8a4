"""The router, which stays in full precision, and vLLM's fused experts behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe import (
    FusedMoEFactory,
    FusedMoEMethodBase,
    RoutedExperts,
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from zaya_tools.architecture import Architecture
from zaya_tools.model.experts import run_experts
from zaya_tools.model.quantized import QuantizedExperts
from zaya_tools.model.router import RouterWeights, Routing, route
from zaya_tools.vllm_plugin.emulation import FAULTS, Form, decoder_of, expert_state, say_emulated
from zaya_tools.vllm_plugin.weights import weight

GATE, UP, DOWN = "w1", "w3", "w2"
"""vLLM's names of an expert's three matrices."""


class Affine(nn.Module):
    """Weight and bias of a layer that is never quantized, for a runtime that applies them itself."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = weight((outputs, inputs), dtype)
        self.bias = weight((outputs,), dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Rows x [..., inputs] to [..., outputs]."""
        return F.linear(x, self.weight, self.bias)


class Scale(nn.Module):
    """The float32 weight of a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = weight((width,), torch.float32)


class RouterMLP(nn.Module):
    """`mlp.gate.router_mlp`: the parameters of the layers between router states and probabilities."""

    def __init__(self, width: int, classes: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = Scale(width)
        self.fc1, self.fc2 = Affine(width, width, dtype), Affine(width, width, dtype)
        self.out_proj = Affine(width, classes, dtype, bias=False)


class Gate(nn.Module):
    """`mlp.gate`. What is float32, and what in the compute dtype, is as in `model.loading`."""

    def __init__(self, architecture: Architecture, block: int, dtype: torch.dtype) -> None:
        super().__init__()
        a, width = architecture, architecture.router_width
        self.eps = a.norm_eps
        self.down_proj = Affine(a.hidden_size, width, dtype)
        self.router_states_scale = weight((width,), dtype) if block else None
        self.router_mlp = RouterMLP(width, a.experts + 1, dtype)
        self.balancing_biases = weight((a.experts + 1,), torch.float32)

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Routing, Tensor]:
        """Route normed rows x [rows, hidden]; `carried` [rows, router width] comes from the previous block."""
        mlp = self.router_mlp
        weights = RouterWeights(
            down=self.down_proj,
            carry_scale=self.router_states_scale,
            norm=mlp.norm.weight,
            hidden=(mlp.fc1, mlp.fc2),
            out=mlp.out_proj,
            balancing=self.balancing_biases,
            eps=self.eps,
        )
        return route(x, carried, weights)


class SparseMLP(nn.Module):
    """`mlp`: a token goes to one expert, or to none and comes out as zero."""

    def __init__(self, architecture: Architecture, block: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        a, dtype = architecture, vllm_config.model_config.dtype
        self.count = a.experts
        self.gate = Gate(a, block, dtype)
        self.experts = FusedMoEFactory(
            num_experts=a.experts,
            top_k=1,
            hidden_size=a.hidden_size,
            intermediate_size=a.expert_width,
            params_dtype=dtype,
            renormalize=False,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.experts",
            custom_routing_function=unpack_routing,
            # Other devices run vLLM's own class throughout.
            routed_experts_cls=ZayaRoutedExperts if current_platform.is_cpu() else None,
        )

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normed rows x [rows, hidden] to the experts' output and the router states for the next block."""
        routing, states = self.gate(x, carried)
        skipped = routing.choice == self.count
        # Kernels know no skip: such a token visits expert 0 with weight 0, and what came out is dropped.
        choice = routing.choice.masked_fill(skipped, 0)
        packed = torch.stack([routing.weight.masked_fill(skipped, 0), choice.float()], dim=-1)
        out = self.experts(hidden_states=x, router_logits=packed)
        return out.masked_fill(skipped[:, None], 0), states


def unpack_routing(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights float32 [rows, 1] and expert ids int32 [rows, 1] out of what `SparseMLP` packed into [rows, 2]."""
    return gating_output[:, :1].float().contiguous(), gating_output[:, 1:].to(torch.int32).contiguous()


class ZayaRoutedExperts(RoutedExperts):
    """vLLM's experts on a CPU, computed in torch where it has no kernel for their scheme."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        def stock() -> Any:
            return super(ZayaRoutedExperts, self)._get_quant_method(prefix, quant_config, moe_config)

        if quant_config is not None and not hasattr(quant_config, "get_scheme_dict"):
            return stock()
        try:
            method = stock()
            if moe_config.moe_parallel_config.use_ep:
                # CPU kernels take ids of all experts for places in the memory of their own few.
                raise NotImplementedError("none looks ids up in the map of expert parallelism")
            kernel = getattr(method, "experts_cls", None)
            # Some schemes are given kernels of other devices, or none, and fail when their weights are repacked.
            if isinstance(method, UnquantizedFusedMoEMethod) or "cpu" in getattr(kernel, "__module__", ""):
                return method
            error: Exception = NotImplementedError(f"{type(method).__name__} has none")
        except FAULTS as caught:
            error = caught
        say_emulated(error, prefix)
        return EmulatedExperts(moe_config, quant_config, prefix)


class EmulatedExperts(FusedMoEMethodBase):
    """Experts that are computed one by one, dequantized when tokens reach them."""

    def __init__(self, moe_config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__(moe_config)
        self.quant_config, self.prefix = quant_config, prefix
        self._experts: QuantizedExperts | None = None

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Register what is stored, gate and up side by side: w13_<suffix> [experts, 2, ...], w2_<suffix>."""
        first = f"{self.prefix}.0.{layer.ckpt_gate_proj_name}"
        decoder = None if self.quant_config is None else decoder_of(self.quant_config, layer, first)
        rank, ranks = self.moe.tp_rank, self.moe.tp_size
        width = intermediate_size_per_partition * ranks
        self._gate = Form(decoder, params_dtype, width, hidden_size, 0, rank, ranks)
        self._down = Form(decoder, params_dtype, hidden_size, width, 1, rank, ranks)
        for stem, form, lead in (("w13", self._gate, (num_experts, 2)), ("w2", self._down, (num_experts,))):
            for suffix, (dtype, shape) in form.share().items():
                parameter = nn.Parameter(torch.zeros((*lead, *shape), dtype=dtype), requires_grad=False)
                parameter.weight_loader = self._loader(layer, form, suffix)  # type: ignore[attr-defined]
                layer.register_parameter(f"{stem}_{suffix}", parameter)

    def _loader(self, layer: Any, form: Form, suffix: str) -> Any:
        def load(
            param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
            return_success: bool = False,
        ) -> bool | None:  # fmt: skip
            local = layer._map_global_expert_id_to_local_expert_id(expert_id)
            if local >= 0:
                place = param.data[local]
                place = place if shard_id == DOWN else place[0 if shard_id == GATE else 1]
                place.copy_(form.cut(suffix, loaded_weight))
            return local >= 0 if return_success else None

        return load

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make layers of the stored tensors."""
        stacks: dict[str, Mapping[str, Tensor]] = {
            stem: {s: getattr(layer, f"{stem}_{s}").data for s in form.share()}
            for stem, form in (("w13", self._gate), ("w2", self._down))
        }
        each = range(layer.local_num_experts)
        gate_up = [
            [self._gate.linear(f"{self.prefix}.{e}", expert_state(stacks["w13"], (e, half))) for half in (0, 1)]
            for e in each
        ]
        down = [self._down.linear(f"{self.prefix}.{e}", expert_state(stacks["w2"], (e,))) for e in each]
        self._experts = QuantizedExperts(gate_up, down)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """There is no kernel to configure."""
        return None

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Output [rows, hidden] of this rank's experts, zero for tokens that go elsewhere."""
        # On CPUs vLLM lets the compiler into its experts, which cannot follow what is decided by tokens there.
        out: Tensor = torch.ops.zaya.stored_experts(x, topk_weights, topk_ids, self.prefix)
        return out

    def compute(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """What `apply` gives, out of the compiler's sight."""
        assert self._experts is not None
        choice = topk_ids[:, 0].long()
        if layer.expert_map is not None:
            choice = layer.expert_map[choice].long()
        elsewhere = choice < 0
        routing = Routing(choice.masked_fill(elsewhere, layer.local_num_experts), topk_weights[:, 0])
        return run_experts(x, routing, self._experts, layer.local_num_experts)


def _stored_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str) -> Tensor:
    experts = get_forward_context().no_compile_layers[layer].routed_experts
    out: Tensor = experts.quant_method.compute(experts, x, topk_weights, topk_ids)
    return out


def _stored_experts_fake(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)


_library = Library("zaya", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("stored_experts", _stored_experts, fake_impl=_stored_experts_fake, target_lib=_library)
