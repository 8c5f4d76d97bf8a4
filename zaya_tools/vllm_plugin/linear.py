"""Replicated linear layers: vLLM's, or emulated ones where it has no kernel for the scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.platforms import current_platform

from zaya_tools.evaluation.stored import Decoder
from zaya_tools.vllm_plugin.emulation import FAULTS, Emulated, decoder_of, say_emulated
from zaya_tools.vllm_plugin.weights import weight

_tried: dict[object, Exception | None] = {}


def build_linear(inputs: int, outputs: int, bias: bool, quant_config: Any, name: str) -> nn.Module:
    """A layer [rows, inputs] -> [rows, outputs] that every rank holds, quantized as the config says for this name."""

    def stock() -> Any:
        return ReplicatedLinear(inputs, outputs, bias, quant_config=quant_config, prefix=name, return_bias=False)

    if not current_platform.is_cpu() or not hasattr(quant_config, "get_scheme_dict"):
        layer: nn.Module = stock()
        return layer
    dtype = get_current_vllm_config().model_config.dtype
    decoder = decoder_of(quant_config, ReplicatedLinear(inputs, outputs, False, prefix=name), name)
    key = (inputs, outputs, dtype, str(decoder))
    if key not in _tried:
        _tried[key] = None if decoder is None else _fault(stock, inputs, dtype)
    error = _tried[key]
    if error is None or decoder is None:
        layer = stock()
        return layer
    say_emulated(error, name)
    return EmulatedLinear(inputs, outputs, bias, decoder, name)


def _fault(stock: Callable[[], Any], inputs: int, dtype: torch.dtype) -> Exception | None:
    """What goes wrong with a layer of vLLM's on this CPU, tried out with zeros.

    Some schemes are refused when a layer is built, others when its weights are repacked or when it first runs.
    """
    try:
        layer = stock()
        for parameter in layer.parameters():
            parameter.data.zero_()
        layer.quant_method.process_weights_after_loading(layer)
        layer(torch.zeros(2, inputs, dtype=dtype))
    except FAULTS as error:
        return error
    return None


class EmulatedLinear(nn.Module):
    """A quantized layer that dequantizes in torch."""

    def __init__(self, inputs: int, outputs: int, bias: bool, decoder: Decoder, name: str) -> None:
        super().__init__()
        config = get_current_vllm_config()
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
