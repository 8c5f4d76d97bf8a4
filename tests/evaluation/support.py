"""Small quantized checkpoints, made with compressed-tensors' own arithmetic and compressors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    generate_gparam,
    maybe_pad_tensor_for_block_quant,
)
from torch import Tensor

from tests.synthetic import config_of, logical, small, split, write_tensors
from zaya_tools.architecture import Architecture
from zaya_tools.evaluation.findings import CheckResult, Finding
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.evaluation.units import all_units
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import Role, parameters

SMALL = small(hidden_size=64, expert_width=64, experts=4, query_heads=4, kv_heads=2)

PRESETS = ("FP8_DYNAMIC", "FP8", "FP8_BLOCK", "W8A8", "W4A16", "W4A16_ASYM", "W8A16", "NVFP4A16", "NVFP4", "MXFP4A16")
IGNORE = ("lm_head", r"re:.*mlp\.gate\..*", r"re:.*conv_qk_.*")
BLOCK = [32, 32]
Edit = Callable[[dict[str, Tensor]], None]
EXPERTS = "model.layers.1.mlp.experts."
GATE, UP = f"{EXPERTS}2.gate_proj", f"{EXPERTS}2.up_proj"
EVERYTHING_ELSE = (*IGNORE, r"re:.*self_attn.*")
"""An ignore list that leaves the experts alone."""


def scheme_of(preset: str, targets: tuple[str, ...] = ("Linear",)) -> Any:
    """A preset, its groups and blocks made small."""
    scheme = preset_name_to_scheme(preset, list(targets))
    if scheme.weights.strategy == "group" and scheme.weights.group_size == 128:
        scheme.weights.group_size = 32
    if scheme.weights.strategy == "block":
        scheme.weights.block_structure = BLOCK
    return scheme


def format_of(scheme: Any) -> str:
    return str(infer_module_format(torch.nn.Linear, scheme).value)


def compress(weight: Tensor, scheme: Any, shared: Tensor | None = None) -> dict[str, Tensor]:
    """What compressed-tensors stores for a matrix, by local name; `shared` are the matrices of one global scale."""
    args = scheme.weights
    state = {"weight": weight}
    global_scale = None
    if args.strategy == "tensor_group":
        whole = weight if shared is None else shared
        global_scale = generate_gparam(whole.amin().reshape(1), whole.amax().reshape(1))
        state["weight_global_scale"] = global_scale
    if args.strategy == "tensor":
        view = weight.reshape(1, -1)
    elif args.strategy == "channel":
        view = weight.unsqueeze(1)
    elif args.strategy == "block":
        high, wide = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, (high, wide))
        rows, columns = padded.shape
        view = padded.reshape(rows // high, high, columns // wide, wide).transpose(1, 2).flatten(2)
    else:
        view = weight.view(*weight.shape[:-1], -1, args.group_size)
    scale, zero = calculate_qparams(view.amin(-1), view.amax(-1), args, global_scale=global_scale)
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero
    stored = BaseCompressor.get_value_from_registry(format_of(scheme)).compress(state, scheme)
    activations = scheme.input_activations
    if activations is not None and activations.dynamic is False:
        stored["input_scale"] = torch.tensor([0.02], dtype=torch.bfloat16)
    if activations is not None and activations.strategy == "tensor_group":
        stored["input_global_scale"] = torch.tensor([300.0])
    return {local: tensor.detach().contiguous() for local, tensor in stored.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return value


def quantization_config(preset: str, ignore: tuple[str, ...] = IGNORE) -> dict[str, Any]:
    scheme = scheme_of(preset)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=list(ignore), format=format_of(scheme),
        quantization_status="compressed",
    )  # fmt: skip
    plain: dict[str, Any] = _without_nulls(config.model_dump(mode="json"))
    return plain


def quantized_tensors(
    architecture: Architecture,
    preset: str,
    *,
    layout: Layout = NATIVE_PER_EXPERT,
    roles: tuple[Role, ...] = (Role.EXPERT, Role.ATTENTION),
) -> dict[str, Tensor]:
    """The tensors of `write_checkpoint` with the matrices of `roles` quantized, part by part."""
    values = logical(architecture)
    scheme = scheme_of(preset)
    tensors = split(layout, architecture, values)
    for parameter in parameters(architecture):
        if layout is not RAW and parameter.float32:
            tensors[parameter.name] = tensors[parameter.name].float()
        if parameter.role not in roles or len(parameter.shape) < 2:
            continue
        parts = layout.parts(parameter, architecture)
        for part in parts:
            weight = tensors.pop(part.name)
            if weight.dim() == 3:
                each = [compress(expert, scheme) for expert in weight]
                stored = {local: torch.stack([one[local] for one in each]) for local in each[0]}
                stored.pop("weight_shape", None)
            else:
                own = [q for q in parts if q.expert is not None and q.expert == part.expert]
                shared = values[parameter.name][part.expert] if len(own) > 1 and part.expert is not None else None
                stored = compress(weight, scheme, shared)
            for local, tensor in stored.items():
                tensors[part.name if local == "weight" else part.companion(local)] = tensor
    return tensors


def write_quantized(
    folder: Path,
    preset: str,
    *,
    architecture: Architecture = SMALL,
    layout: Layout = NATIVE_PER_EXPERT,
    roles: tuple[Role, ...] = (Role.EXPERT, Role.ATTENTION),
    ignore: tuple[str, ...] = IGNORE,
    edit: Edit | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A quantized checkpoint in `folder`; `edit` breaks its tensors, `config` replaces keys of config.json."""
    tensors = quantized_tensors(architecture, preset, layout=layout, roles=roles)
    if edit is not None:
        edit(tensors)
    stated = {**config_of(layout, architecture), "quantization_config": quantization_config(preset, ignore)}
    write_tensors(folder, tensors, {**stated, **(config or {})})
    return folder


def failing(result: CheckResult, *texts: str) -> Finding:
    """The one failure whose message has all of `texts`."""
    found = [finding for finding in result.failures if all(text in finding.message for text in texts)]
    assert len(found) == 1, [finding.message for finding in result.findings]
    return found[0]


def drop(*names: str) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return edit


def put(name: str, value: float | Tensor, index: Any = 0) -> Edit:
    """Replace a tensor, or one of its values."""

    def edit(tensors: dict[str, Tensor]) -> None:
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors[name].view(-1)[index] = value

    return edit


def check(folder: Path, preset: str, edit: Edit | None = None, **options: Any) -> CheckResult:
    return check_structure(write_quantized(folder, preset, edit=edit, **options))


def native(layout: Layout = NATIVE_PER_EXPERT, architecture: Architecture = SMALL) -> dict[str, Tensor]:
    """The tensors of a sound native checkpoint, balancing biases in float32."""
    values = logical(architecture)
    values |= {p.name: values[p.name].float() for p in parameters(architecture) if p.float32}
    return split(layout, architecture, values)


def write_native(folder: Path, tensors: Mapping[str, Tensor], layout: Layout = NATIVE_PER_EXPERT) -> Path:
    write_tensors(folder, tensors, config_of(layout, SMALL))
    return folder


_STATUSES = ("equal", "widened", "rounded", "baked", "quantized", "different", "not_compared", "scanned")


def sound(result: CheckResult, architecture: Architecture = SMALL) -> dict[str, Any]:
    """The figures of a comparison without failures, which accounts for every tensor and every number."""
    assert [finding.message for finding in result.failures] == []
    figures = result.figures
    count = len(all_units(architecture))
    assert figures["tensors"] == figures["compared"] == sum(figures[key] for key in _STATUSES) == count
    assert figures["values"] == sum(parameter.numel for parameter in parameters(architecture))
    json.dumps(result.as_dict(), allow_nan=False)
    return figures
