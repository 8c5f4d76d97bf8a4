"""Replicated linear layers: vLLM's, or emulated ones where it has no kernel for the scheme."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear

from zaya_tools.vllm_plugin.emulation import FAULTS, Emulated, decoder_of, no_kernel
from zaya_tools.vllm_plugin.weights import weight


def build_linear(inputs: int, outputs: int, bias: bool, quant_config: Any, name: str) -> nn.Module:
    """A layer [rows, inputs] -> [rows, outputs] that every rank holds, quantized as the config says for this name."""
    try:
        layer: nn.Module = ReplicatedLinear(
            inputs, outputs, bias, quant_config=quant_config, prefix=name, return_bias=False
        )
        return layer
    except FAULTS as error:
        if quant_config is None or not hasattr(quant_config, "get_scheme_dict"):
            raise
        no_kernel(error, name)
    return EmulatedLinear(inputs, outputs, bias, quant_config, name)


class EmulatedLinear(nn.Module):
    """A quantized layer that dequantizes in torch."""

    def __init__(self, inputs: int, outputs: int, bias: bool, quant_config: Any, name: str) -> None:
        super().__init__()
        config = get_current_vllm_config()
        probe = ReplicatedLinear(inputs, outputs, bias=False, quant_config=None, prefix=name)
        decoder = decoder_of(quant_config, probe, name)
        assert decoder is not None
        dtype = config.model_config.dtype
        self.name, self.outputs = name, outputs
        self.emulated = Emulated(decoder, outputs, inputs, name, dtype)
        self._suffixes = []
        for suffix, parameter in self.emulated.parameters().items():
            self.register_parameter(suffix, parameter)
            self._suffixes.append(suffix)
        self.bias = weight((outputs,), dtype) if bias else None
        config.compilation_config.static_forward_context[name] = self
        self.ready()

    def ready(self) -> None:
        """Compute from the parameters as they are; they are loaded in place."""
        self.emulated.ready({suffix: getattr(self, suffix).data for suffix in self._suffixes})

    def forward(self, x: Tensor) -> Tensor:
        """Rows x [rows, inputs] to [rows, outputs]."""
        out: Tensor = torch.ops.zaya.stored_linear(x, self.name, self.outputs)
        return out if self.bias is None else out + self.bias
