"""Quantized linear layers as they compute: weights dequantized exactly as stored, activations quantized as served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_tools.errors import LayoutError


@dataclass(frozen=True)
class Schemes:
    """The quantization schemes of a checkpoint, in the order of its config groups, each with targets and format."""

    groups: tuple[tuple[tuple[str, ...], Any, str], ...]

    def of(self, module: str) -> tuple[Any, str]:
        """(QuantizationScheme, format) for a runtime module name; LayoutError where no group targets it."""
        from compressed_tensors.utils.match import match_name

        named = [(scheme, form) for targets, scheme, form in self.groups if any(match_name(module, t) for t in targets)]
        by_class = [(scheme, form) for targets, scheme, form in self.groups if "Linear" in targets]
        if not named and not by_class:
            raise LayoutError(f"{module} is quantized but no group of quantization_config targets it")
        return (named or by_class)[0]


def read_schemes(config: Mapping[str, Any]) -> Schemes:
    """The schemes that a config.json states. LayoutError when it states none, or not in compressed-tensors' form."""
    from compressed_tensors.quantization import QuantizationConfig

    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        raise LayoutError("tensors are quantized but config.json has no quantization_config")
    try:
        parsed = QuantizationConfig.model_validate(dict(stated))
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise LayoutError(f"quantization_config is not one that compressed-tensors reads: {reason}") from error
    groups = tuple(
        (tuple(scheme.targets), scheme, str(getattr(scheme, "format", None) or parsed.format))
        for scheme in parsed.config_groups.values()
    )
    return Schemes(groups)


@dataclass
class QuantizedLinear:
    """A linear layer whose `state` holds what is stored for it by suffix: weight, weight_scale, ...

    It is dequantized when it is used and dropped again, so that a block is held once, in few bits. `scheme` is
    compressed-tensors' (QuantizationScheme, format); `bias` [outputs] is in the compute dtype.
    """

    module: str
    scheme: tuple[Any, str]
    state: Mapping[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Give x W^T + b for x [..., inputs] of the compute dtype, x quantized first where the scheme says so."""
        return F.linear(self.quantize_input(x), self.weight(), self.bias)

    def select(self, expert: int) -> QuantizedLinear:
        """Expert `expert` of a layer whose tensors are stacked on dimension 0."""
        state = {suffix: tensor[expert] for suffix, tensor in self.state.items()}
        return QuantizedLinear(self.module, self.scheme, state, self.dtype, self.device)

    def weight(self) -> Tensor:
        """The dequantized weight [outputs, inputs] in the compute dtype, by compressed-tensors' own decompressor."""
        from compressed_tensors.compressors import BaseCompressor

        scheme, form = self.scheme
        compressor = BaseCompressor.get_value_from_registry(form)
        # A 16-bit scale would make the product round to 16 bits; in float32 it is exact.
        state = {
            suffix: tensor.float() if suffix == "weight_scale" and tensor.dtype in _HALVES else tensor
            for suffix, tensor in self.state.items()
            if not suffix.startswith("input_")
        }
        weight: Tensor = compressor.decompress({s: t.to(self.device) for s, t in state.items()}, scheme)["weight"]
        return weight.to(self.dtype)

    def quantize_input(self, x: Tensor) -> Tensor:
        """Round x [..., inputs] to what the kernels would see; x itself for schemes that quantize weights alone."""
        args = self.scheme[0].input_activations
        if args is None:
            return x
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

        rows = x.flatten(0, -2)
        limit = self.state.get("input_global_scale")
        if args.dynamic in (True, "local"):
            scale, zero = compute_dynamic_scales_and_zp(rows, args, None, global_scale=limit)
        else:
            if "input_scale" not in self.state:
                raise LayoutError(f"{self.module} has static activations but no input_scale")
            scale, zero = self.state["input_scale"].to(x.device), self.state.get("input_zero_point")
        rounded: Tensor = fake_quantize(rows, scale, zero, args, global_scale=limit)
        return rounded.view(x.shape)


_HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class QuantizedExperts:
    """SwiGLU experts of quantized layers: `gate_up` has each expert's gate and up, fused in one layer or as two."""

    gate_up: Sequence[Sequence[QuantizedLinear]]
    down: Sequence[QuantizedLinear]

    def __call__(self, expert: int, rows: Tensor) -> Tensor:
        """Give down(silu(gate x) * up x) for tokens [rows, hidden] of the compute dtype."""
        both = torch.cat([part(rows) for part in self.gate_up[expert]], dim=-1)
        gate, up = both.chunk(2, dim=-1)
        return self.down[expert](F.silu(gate).mul_(up))
