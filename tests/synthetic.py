"""Synthetic checkpoints of every layout, straight from the table: as headers alone, as tensors, and on disk."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zaya_tools.architecture import Architecture, native_config
from zaya_tools.checkpoint.header import build_header
from zaya_tools.dtypes import SIZES
from zaya_tools.layouts.base import Layout, Part
from zaya_tools.layouts.megatron import MEGATRON
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW, SMOE
from zaya_tools.layouts.raw_config import raw_config
from zaya_tools.parameters import Parameter, Role, parameters
from zaya_tools.tensors import TensorInfo

LAYOUTS: dict[str, Layout] = {
    "raw": RAW, "smoe": SMOE, "megatron": MEGATRON, "native": NATIVE, "native per expert": NATIVE_PER_EXPERT,
}  # fmt: skip
"""Every layout, under the names that test ids show."""

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


def small(**fields: Any) -> Architecture:
    """A geometry of a few thousand parameters; `fields` replace its own.

    Expert matrices are square, as in the real model, so that only contents can tell gate, up and down apart.
    """
    base: dict[str, Any] = {
        "blocks": 2, "hidden_size": 32, "query_heads": 2, "kv_heads": 1, "head_dim": 16, "experts": 3,
        "expert_width": 32, "router_width": 8, "vocab_size": 64, "max_positions": 256, "eos_token": 1,
    }  # fmt: skip
    return Architecture(**{**base, **fields})


def sliding(blocks: int = 4, window: int = 5) -> dict[str, Any]:
    """Fields of a geometry whose even blocks slide, as ZAYA1-74B's do."""
    return {
        "blocks": blocks,
        "sliding": tuple(block % 2 == 0 for block in range(blocks)),
        "sliding_window": window,
        "sliding_rope_theta": 20_000.0,
    }


ZAYA1_8B = Architecture(
    blocks=40, hidden_size=2048, query_heads=8, kv_heads=2, head_dim=128, experts=16, expert_width=2048,
    router_width=256, vocab_size=262_272,
)  # fmt: skip
ZAYA1_74B = Architecture(
    blocks=60, hidden_size=4096, query_heads=16, kv_heads=2, head_dim=128, experts=24, expert_width=4096,
    router_width=256, vocab_size=262_272, max_positions=262_144, eos_token=1,
    sliding=(True, False) * 30, sliding_window=4097,
)  # fmt: skip

GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"attention_bias": True},
    "untied": {"tied": False},
    "two kv heads": {"query_heads": 4, "kv_heads": 2},
    "four queries a key": {"query_heads": 4, "kv_heads": 1, "head_dim": 8},
    "time 3 and 2": {"time0": 3, "time1": 2},
    "time 2 and 4": {"time0": 2, "time1": 4},
    "sliding": sliding(),
    "all sliding": {"sliding": (True, True), "sliding_window": 3},
    "one block": {"blocks": 1},
    "eleven experts": {"experts": 11},
    "not square": {"expert_width": 24, "router_width": 12, "norm_eps": 1e-6, "rope_theta": 1e4},
}
"""Fields for `small` that between them have every optional parameter and every kind of shape."""


def value(parameter: Parameter, generator: torch.Generator) -> Tensor:
    """A plausible trained value, float32: scales about 1, skip never chosen, biases small."""
    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.role is Role.BALANCING:
        noise = noise.mul(0.02)
        noise[-1] = -1.0
        noise[0] = noise[0].abs()
        return noise
    scale = parameter.name.endswith(("_scale", "norm.weight", "layernorm.weight")) or parameter.role is Role.TEMPERATURE
    if scale:
        return 1 + 0.1 * noise
    return 0.1 * noise if len(parameter.shape) < 2 else noise / parameter.shape[-1] ** 0.5


def logical(architecture: Architecture, *, seed: int = 0, dtype: str = "BF16") -> dict[str, Tensor]:
    """Every parameter of the table by its native name; a parameter's values depend on seed and name alone."""
    result = {}
    for parameter in parameters(architecture):
        generator = torch.Generator().manual_seed(zlib.crc32(parameter.name.encode(), seed))
        result[parameter.name] = value(parameter, generator).to(TORCH[dtype])
    return result


def split(layout: Layout, architecture: Architecture, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters, cut row-major into the tensors that a layout stores."""
    result = {}
    for parameter in parameters(architecture):
        flat = values[parameter.name].reshape(-1)
        position = 0
        for part in layout.parts(parameter, architecture):
            size = torch.Size(part.shape).numel()
            result[part.name] = flat[position : position + size].reshape(part.shape).clone()
            position += size
        assert position == flat.numel(), parameter.name
    return result


def smoe_config(architecture: Architecture, padding: int = 0) -> dict[str, Any]:
    """The config of a 74B-style export: `smoe_*` keys, rotary_base and rope_pct, lists `padding` pairs too long."""
    config = raw_config(architecture, "list")
    for raw, smoe in (
        ("zaya_layers", "smoe_layers"),
        ("zaya_mlp_expansion", "smoe_mlp_expansion"),
        ("zaya_use_eda", "smoe_use_eda"),
        ("zaya_use_mod", "smoe_use_mod"),
        ("rope_theta", "rotary_base"),
        ("partial_rotary_factor", "rope_pct"),
    ):
        config[smoe] = config.pop(raw)
    for key in ("cca_num_q_heads", "num_query_groups_list", "ffn_hidden_size_list", "smoe_mlp_expansion"):
        config[key] = config[key] + config[key][:2] * padding
    return {**config, "model_type": "smoe", "architectures": ["SMoEForCausalLM"], "num_hidden_layers": 120}


CONFIGS: dict[str, Callable[[Architecture], dict[str, Any]]] = {
    "raw": raw_config,
    "smoe": smoe_config,
    "megatron": raw_config,
    "native": native_config,
    "native per expert": native_config,
}
"""The config that belongs to each of LAYOUTS."""


def name_of(layout: Layout) -> str:
    """The key of a layout in LAYOUTS."""
    return next(name for name, known in LAYOUTS.items() if known is layout)


def config_of(layout: Layout, architecture: Architecture) -> dict[str, Any]:
    """A config.json that belongs to this layout and geometry."""
    return CONFIGS[name_of(layout)](architecture)


def header(name: str, shape: tuple[int, ...], dtype: str = "BF16", file: str = "model.safetensors") -> TensorInfo:
    """A tensor of which only the header exists."""
    nbytes = torch.Size(shape).numel() * SIZES[dtype]
    return TensorInfo(name, dtype, tuple(shape), Path(file), 0, nbytes)


def headers(
    layout: Layout, architecture: Architecture, dtype: str | Callable[[Parameter, Part], str] = "BF16"
) -> dict[str, TensorInfo]:
    """Headers of a complete checkpoint, by name, one after another in one file that does not exist."""
    result: dict[str, TensorInfo] = {}
    position = 0
    for parameter in parameters(architecture):
        for part in layout.parts(parameter, architecture):
            kind = dtype if isinstance(dtype, str) else dtype(parameter, part)
            nbytes = torch.Size(part.shape).numel() * SIZES[kind]
            result[part.name] = TensorInfo(part.name, kind, part.shape, Path("model.safetensors"), position, nbytes)
            position += nbytes
    return result


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], shards: int = 1) -> None:
    """A checkpoint folder: config.json and safetensors files, with an index when there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    names = sorted(tensors)
    if shards == 1:
        save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = {name: tensors[name].contiguous() for name in names[number::shards]}
        save_file(own, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))


def write_checkpoint(
    folder: Path,
    layout: Layout,
    architecture: Architecture,
    *,
    seed: int = 0,
    dtype: str = "BF16",
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    overrides: Mapping[str, Tensor | None] | None = None,
) -> dict[str, Tensor]:
    """Write a complete random checkpoint of `layout` to `folder`; returns its tensors by stored name.

    `overrides`, by stored name, replace or add tensors; None removes one. Seed and geometry decide the values, so
    that two layouts written with the same ones hold the same model. Balancing biases are float32 where native.
    """
    values = logical(architecture, seed=seed, dtype=dtype)
    if layout in (NATIVE, NATIVE_PER_EXPERT):
        values |= {p.name: values[p.name].float() for p in parameters(architecture) if p.float32}
    tensors = split(layout, architecture, values)
    for name, tensor in (overrides or {}).items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    write_tensors(folder, tensors, config_of(layout, architecture) if config is None else config, shards)
    return tensors


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, read by the safetensors library."""
    result: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in result, f"{name} is in two files"
            result[name] = tensor
    return result


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal dtype, shape and bytes: NaN equals NaN, zero does not equal minus zero."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8))


def write_sparse(
    folder: Path, stored: Mapping[str, TensorInfo], config: Mapping[str, Any], *, shards: int = 4
) -> dict[str, int]:
    """Files with real headers and holes for data, so that any geometry fits on any disk; header bytes by file name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    tensors = list(stored.values())
    each = -(-len(tensors) // shards)
    weight_map: dict[str, str] = {}
    sizes = {}
    for number in range(shards):
        own = tensors[number * each : (number + 1) * each]
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        raw = build_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in own])
        with (folder / name).open("wb") as stream:
            stream.write(raw)
            stream.truncate(len(raw) + sum(tensor.nbytes for tensor in own))
        sizes[name] = len(raw)
        weight_map |= {tensor.name: name for tensor in own}
    total = sum(tensor.nbytes for tensor in tensors)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return sizes
