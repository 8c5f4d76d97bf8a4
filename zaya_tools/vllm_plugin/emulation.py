"""Quantized layers computed in torch where vLLM has no kernel for them: on CPUs, and slowly.

Schemes are matched by vLLM and tensors are held as they are stored. The arithmetic is that of `model.quantized`:
weights dequantized exactly when they are used, activations rounded as kernels round them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.utils.torch_utils import direct_register_custom_op

from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.stored import NAMES, Decoder, expected
from zaya_tools.model.linear import Dense, Linear
from zaya_tools.model.quantized import QuantizedLinear, read_format
from zaya_tools.model.weights import TORCH

logger = init_logger("vllm.zaya_tools")

FAULTS = (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)
"""What vLLM raises, layer by layer, where it has no kernel for a scheme."""

_HALVES = ("BF16", "F16")


@dataclass(frozen=True)
class Form:
    """What is stored, by suffix, for a matrix [rows, columns], and which share of it rank `rank` of `ranks` holds.

    `axis` is the axis of the matrix that is cut: 0 for rows, 1 for columns. Without a decoder it is stored in full, in
    the compute dtype `dtype`.
    """

    decoder: Decoder | None
    dtype: torch.dtype
    rows: int
    columns: int
    axis: int = 0
    rank: int = 0
    ranks: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the share."""
        cut = [self.rows, self.columns]
        cut[self.axis] //= self.ranks
        return cut[0], cut[1]

    def _stored(self, rows: int, columns: int) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """(safetensors dtype, shape) by suffix; the matrix's shape, which is known, is left out."""
        if self.decoder is None:
            return {"weight": (NAMES[self.dtype], (rows, columns))}
        return {k: v for k, v in expected(self.decoder, rows, columns).items() if k != "weight_shape"}

    def share(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """(dtype, shape) by suffix of the share. LayoutError where a cut would go through a group or a packed word."""
        if (self.rows, self.columns)[self.axis] % self.ranks:
            raise LayoutError(f"{self.ranks} ranks do not divide a matrix of {self.rows} x {self.columns}")
        for step in self._steps() if self.ranks > 1 else ():
            if self.shape[self.axis] % step:
                raise LayoutError(
                    f"{self.ranks} ranks would cut a matrix of {self.rows} x {self.columns} through groups of {step}",
                    "use fewer ranks, or --enable-expert-parallel",
                )
        cut = self._stored(*self.shape)
        result = {}
        for suffix, (dtype, shape) in self._stored(self.rows, self.columns).items():
            part = cut[suffix][1]
            if any(full not in (own, own * self.ranks) for full, own in zip(shape, part, strict=True)):
                raise LayoutError(f"{suffix} {list(shape)} cannot be cut for {self.ranks} ranks")
            # Scales may be stored in any float type, and float32 holds them all.
            wide = self.decoder is not None and suffix != "weight" and dtype in _HALVES
            result[suffix] = (torch.float32 if wide else TORCH[dtype], part)
        return result

    def _steps(self) -> list[int]:
        """Lengths along the axis that is cut of what is quantized together, weights and activations."""
        if self.decoder is None:
            return []
        weights, inputs = self.decoder.scheme.weights, self.decoder.scheme.input_activations
        steps = [weights.block_structure[self.axis]] if weights.block_structure else []
        if self.axis:
            steps += [args.group_size for args in (weights, inputs) if args is not None and args.group_size]
        return [step for step in steps if step > 0]

    def cut(self, suffix: str, tensor: Tensor) -> Tensor:
        """This rank's share of a stored tensor of the scheme's shape; a single number may be a scalar."""
        shape = self._stored(self.rows, self.columns)[suffix][1]
        if tensor.numel() == 1 and shape == (1,):
            tensor = tensor.reshape(1)
        if tuple(tensor.shape) != shape:
            raise LayoutError(f"shape {list(tensor.shape)}, expected {list(shape)}")
        for axis, own in enumerate(self.share()[suffix][1]):
            if own != shape[axis]:
                tensor = tensor.narrow(axis, self.rank * own, own)
        return tensor

    def linear(self, module: str, state: Mapping[str, Tensor]) -> Linear:
        """The share as a layer that computes."""
        if self.decoder is None:
            return Dense(state["weight"])
        device = next(iter(state.values())).device
        scheme = (self.decoder.scheme, self.decoder.format)
        return QuantizedLinear(module, scheme, state, self.shape, self.dtype, device)


def decoder_of(quant_config: Any, layer: nn.Module, name: str) -> Decoder | None:
    """The scheme that vLLM's config has for a module of this name, None where it leaves the module alone."""
    from compressed_tensors.quantization import QuantizationScheme

    found = quant_config.get_scheme_dict(layer, name)
    if found is None or found.get("weights") is None:
        return None
    scheme = QuantizationScheme(
        targets=[name], weights=found["weights"], input_activations=found.get("input_activations"),
        format=found.get("format"),
    )  # fmt: skip
    return Decoder(scheme, read_format(scheme, quant_config.quant_format))


def say_emulated(error: BaseException, name: str) -> None:
    """Warn, once a kind of layer, that it is emulated, and why."""
    reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
    kind = name.rpartition(".")[2]
    logger.warning_once("vLLM has no kernel for %s on this CPU, computing in torch, which is slow: %s", kind, reason)


class Emulated:
    """A quantized linear layer's parameters by suffix and the layer that computes from them."""

    def __init__(self, decoder: Decoder, rows: int, columns: int, name: str, dtype: torch.dtype) -> None:
        self.form, self.name = Form(decoder, dtype, rows, columns), name
        self._linear: Linear | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Empty parameters by suffix, each with a `weight_loader` that refuses another shape than the scheme's."""
        result = {}
        for suffix, (dtype, shape) in self.form.share().items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            parameter.weight_loader = self._loader(suffix)  # type: ignore[attr-defined]
            result[suffix] = parameter
        return result

    def _loader(self, suffix: str) -> Any:
        def load(parameter: Tensor, tensor: Tensor) -> None:
            parameter.data.copy_(self.form.cut(suffix, tensor))

        return load

    def ready(self, state: Mapping[str, Tensor]) -> None:
        """Compute from these tensors from now on."""
        self._linear = self.form.linear(self.name, state)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows x [rows, inputs] through the layer, without its bias."""
        assert self._linear is not None
        return self._linear(x)


def expert_state(tensors: Mapping[str, Tensor], index: Sequence[int]) -> dict[str, Tensor]:
    """One matrix's tensors out of stacks, by suffix."""
    return {suffix: tensor[tuple(index)] for suffix, tensor in tensors.items()}


OP = "zaya::stored_linear"


def _stored_linear(x: Tensor, layer: str, outputs: int) -> Tensor:
    module = get_forward_context().no_compile_layers[layer]
    result: Tensor = module.emulated(x)
    return result


def _stored_linear_fake(x: Tensor, layer: str, outputs: int) -> Tensor:
    return x.new_empty((x.shape[0], outputs))


_library = Library("zaya", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op("stored_linear", _stored_linear, fake_impl=_stored_linear_fake, target_lib=_library)
