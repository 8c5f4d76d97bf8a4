"""Quantized linear layers as they compute: weights dequantized exactly as stored, activations quantized as served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_tools.errors import LayoutError
from zaya_tools.model.linear import Linear


@dataclass(frozen=True)
class Schemes:
    """The quantization schemes of a checkpoint, in the order of its config groups, each with targets and format."""

    groups: tuple[tuple[tuple[str, ...], Any, str], ...]

    def of(self, *names: str, kind: str = "Linear", single: bool = False) -> tuple[Any, str]:
        """(QuantizationScheme, format) for a module of the class `kind`, by any of its names.

        A target that is a name wins over a pattern, which wins over a class, as in compressed-tensors. With `single`,
        a config of one group means every module, whatever it targets. LayoutError where no group targets the module.
        """
        from compressed_tensors.utils.match import match_name

        fits: tuple[Callable[[str], bool], ...] = (
            lambda target: target in names,
            lambda target: target.startswith("re:") and any(match_name(name, target) for name in names),
            lambda target: target == kind,
        )
        for fit in fits:
            for targets, scheme, form in self.groups:
                if any(map(fit, targets)):
                    return scheme, form
        if single and len(self.groups) == 1:
            return self.groups[0][1:]
        raise LayoutError(f"{names[0]} is quantized but no group of quantization_config targets it")


def read_schemes(config: Mapping[str, Any]) -> Schemes:
    """The schemes that a config.json states. LayoutError when it states none, or not in compressed-tensors' form."""
    from compressed_tensors.quantization import QuantizationConfig

    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        raise LayoutError("tensors are quantized but config.json has no quantization_config")
    method = stated.get("quant_method", METHOD)
    if method != METHOD:
        raise LayoutError(f"quantization_config is of the method {method!r}: only {METHOD} can be run")
    try:
        parsed = QuantizationConfig.model_validate(dict(stated))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LayoutError(f"quantization_config is not one that {METHOD} reads: {reason}") from error
    groups = [(tuple(scheme.targets), scheme) for scheme in parsed.config_groups.values() if scheme.weights is not None]
    return Schemes(tuple((targets, scheme, read_format(scheme, parsed.format)) for targets, scheme in groups))


def read_format(scheme: Any, overall: str) -> str:
    """The name of the compressor that wrote a scheme's tensors."""
    stated = getattr(scheme.format, "value", scheme.format) or overall
    # What a config says when each scheme has its own format, or when its writer named none.
    if stated not in ("mixed-precision", "fakequant", "dense"):
        return str(stated)
    from compressed_tensors.compressors.format import infer_module_format

    return str(infer_module_format(torch.nn.Linear, scheme).value)


@dataclass
class QuantizedLinear:
    """A linear layer whose `state` holds what is stored for it by suffix: weight, weight_scale, ...

    It is dequantized when it is used and dropped again, so that a block is held once, in few bits. `scheme` is
    compressed-tensors' (QuantizationScheme, format), `shape` (outputs, inputs); `bias` [outputs] is in the compute
    dtype.
    """

    module: str
    scheme: tuple[Any, str]
    state: Mapping[str, Tensor]
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Give x W^T + b for x [..., inputs] of the compute dtype, x quantized first where the scheme says so."""
        return F.linear(self.quantize_input(x), self.weight(), self.bias)

    def weight(self) -> Tensor:
        """The dequantized weight [outputs, inputs] in the compute dtype, by compressed-tensors' own decompressor.

        LayoutError where what is stored does not fit the scheme.
        """
        from compressed_tensors.compressors import BaseCompressor

        scheme, form = self.scheme
        # A 16-bit scale would make the product round to 16 bits; in float32 it is exact.
        state = {
            suffix: (tensor.float() if suffix == "weight_scale" and tensor.dtype in _HALVES else tensor).to(self.device)
            for suffix, tensor in self.state.items()
            if not suffix.startswith("input_")
        }
        state["weight_shape"] = torch.tensor(self.shape)
        # FP4 comes out in bfloat16, which holds a level times its FP8 or power-of-two scale, but not their quotient
        # with the float32 scale of the whole tensor.
        whole = state.pop("weight_global_scale", None)
        self._fits()
        try:
            weight = BaseCompressor.get_value_from_registry(form).decompress(state, scheme)["weight"].detach()
        except (ValueError, TypeError, LookupError, RuntimeError, AssertionError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise LayoutError(f"{self.module} cannot be decoded as {form}: {reason}") from error
        if tuple(weight.shape) != self.shape:
            raise LayoutError(f"{self.module} decodes to the shape {tuple(weight.shape)}, expected {self.shape}")
        if whole is not None:
            weight = weight.float() / whole
        return weight.to(self.dtype)  # type: ignore[no-any-return]

    def quantize_input(self, x: Tensor) -> Tensor:
        """Round x [..., inputs] to what the kernels would see; x itself for schemes that quantize weights alone.

        compressed-tensors' arithmetic, but for dynamic INT8 tokens, where vLLM's kernels differ from it: `int8_tokens`.
        """
        args = self.scheme[0].input_activations
        if args is None:
            return x
        if args.dynamic is True and args.symmetric and (args.type, args.num_bits, args.strategy) == ("int", 8, "token"):
            return int8_tokens(x)
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

        # With three axes: in two the library gives all tokens one scale where each should have its own.
        rows = x.reshape(1, -1, x.shape[-1])
        limit, zero = (self._stored(suffix) for suffix in ("input_global_scale", "input_zero_point"))
        if args.dynamic in (True, "local"):
            if args.dynamic == "local" and limit is None:
                raise LayoutError(f"{self.module} quantizes activations in groups but has no input_global_scale")
            scale, zero = compute_dynamic_scales_and_zp(rows, args, None, global_scale=limit)
        else:
            scale = self._stored("input_scale")
            if scale is None:
                raise LayoutError(f"{self.module} has static activations but no input_scale")
            scale = scale.float()  # as kernels hold it: a 16-bit scale would round the product to 16 bits
        rounded: Tensor = fake_quantize(rows, scale, zero, args, global_scale=limit)
        return rounded.to(x.dtype).view(x.shape)

    def _fits(self) -> None:
        """LayoutError for what the library would stretch or fill up with zeros, without a word."""
        weights, columns = self.scheme[0].weights, self.shape[1]
        scale, packed = self.state.get("weight_scale"), self.state.get("weight_packed")
        size = weights.group_size
        if size and size > 0 and scale is not None and scale.shape[-1] != (groups := ceil(columns / size)):
            have = f"{scale.shape[-1]} scales a row, groups of {size} need {groups}"
        elif packed is not None and packed.dtype == torch.int32 and packed.shape[-1] * 32 < columns * weights.num_bits:
            have = f"{packed.shape[-1]} words a row, {columns} values of {weights.num_bits} bits need more"
        else:
            return
        raise LayoutError(f"{self.module} has {have}")

    def _stored(self, suffix: str) -> Tensor | None:
        return self.state[suffix].to(self.device) if suffix in self.state else None


def int8_tokens(x: Tensor) -> Tensor:
    """Round each token of x [..., inputs] to 127 steps a side of its largest value, and back to its dtype.

    As vLLM's kernels do (csrc/quantization/w8a8/int8/scaled_quant.cu and csrc/cpu/dnnl_kernels.cpp): in float32, with
    the scale amax / 127, to the nearest, ties to even. compressed-tensors, and with it fake quantization, has 127.5
    steps. Zeros stay zeros.
    """
    values = x.float()
    # A row below this is as good as zero, and its inverse would overflow.
    scale = values.abs().amax(dim=-1, keepdim=True).clamp_min(_SMALLEST) / 127
    return ((values * (1 / scale)).round_().clamp_(-128, 127) * scale).to(x.dtype)


METHOD = "compressed-tensors"
_SMALLEST = 1e-30
_HALVES = (torch.bfloat16, torch.float16)


def expert(suffix: str, stacked: Tensor, index: int, count: int) -> Tensor:
    """What of a tensor that is stored for `count` stacked matrices belongs to matrix `index`; all share what is not.

    Single numbers come as [1].
    """
    if suffix == "weight_shape" or stacked.shape[:1] != (count,):
        return stacked
    return stacked[index].reshape(stacked.shape[1:] or (1,))


@dataclass(frozen=True)
class QuantizedExperts:
    """SwiGLU experts of quantized layers: `gate_up` has each expert's gate and up, fused in one layer or as two."""

    gate_up: Sequence[Sequence[Linear]]
    down: Sequence[Linear]

    def __call__(self, expert: int, rows: Tensor) -> Tensor:
        """Give down(silu(gate x) * up x) for tokens [rows, hidden] of the compute dtype."""
        both = torch.cat([part(rows) for part in self.gate_up[expert]], dim=-1)
        gate, up = both.chunk(2, dim=-1)
        return self.down[expert](F.silu(gate).mul_(up))
