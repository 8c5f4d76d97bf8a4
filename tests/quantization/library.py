"""What compressed-tensors makes of a weight without calibration: the arithmetic that ours has to equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from zaya_tools.quantization.scheme import SCHEMES

PRESETS = {
    "fp8": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "int8": "INT8",
    "int4": "W4A16",
    "int4-g32": "W4A16",
    "mxfp4": "MXFP4A16",
    "nvfp4a16": "NVFP4A16",
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def preset(name: str) -> Any:
    """The library's own scheme for one of ours."""
    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    if name == "int4-g32":
        scheme.weights = scheme.weights.model_copy(update={"group_size": 32})
    return scheme


def compressor(name: str) -> Any:
    """The library's compressor of a scheme of ours."""
    return BaseCompressor.get_value_from_registry(SCHEMES[name].format)


def compress(weight: Tensor, name: str, amax: float | None = None) -> dict[str, Tensor]:
    """Stored tensors by suffix; `amax` is what a global scale is made from."""
    scheme = preset(name)
    groups = _groups(weight, scheme.weights)
    low, high = groups.amin(-1), groups.amax(-1)
    whole = None
    state = {"weight": weight}
    if name == "nvfp4a16":
        most = weight.abs().max().reshape(1) if amax is None else torch.tensor([amax], dtype=weight.dtype)
        state["weight_global_scale"] = whole = generate_gparam(-most, most)
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=whole)
    # A module's scales have its weight's dtype until they are compressed.
    state["weight_scale"] = scale.to(weight.dtype)
    return dict(compressor(name).compress(state, scheme))


def decompress(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> Tensor:
    """The library's dequantization, with float scales widened first so that only its arithmetic rounds."""
    state = {suffix: value.float() if value.is_floating_point() and value.element_size() > 1 else value
             for suffix, value in tensors.items()}  # fmt: skip
    state["weight_shape"] = torch.tensor(shape)
    weight: Tensor = compressor(name).decompress(state, preset(name))["weight"]
    return weight.detach()


def _groups(weight: Tensor, args: Any) -> Tensor:
    if args.block_structure:
        height, width = args.block_structure
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        return padded.unfold(0, height, height).unfold(1, width, width).flatten(2)
    if args.group_size:
        return weight.view(len(weight), -1, args.group_size)
    return weight.unsqueeze(1)
