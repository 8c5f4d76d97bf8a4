"""Small random models: every parameter and buffer non-trivial, all experts used, the skip class alive."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.synthetic import config_of, write_tensors
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.layouts.native import NATIVE
from zaya_tools.model.model import ZayaModel
from zaya_tools.parameters import Role, parameters

BASE = Architecture(
    blocks=3, hidden_size=32, query_heads=4, kv_heads=2, head_dim=8, experts=5, expert_width=24, router_width=12,
    vocab_size=61, eos_token=1, dtype="float32",
)  # fmt: skip

YARN = (
    ("beta_fast", 4.0), ("beta_slow", 1.0), ("factor", 4.0), ("original_max_position_embeddings", 16),
    ("rope_type", "yarn"),
)  # fmt: skip

GEOMETRIES = {
    "plain": BASE,
    "times 3 and 2": replace(BASE, time0=3),
    "times 2 and 4, attention bias": replace(BASE, time1=4, attention_bias=True),
    "times 4 and 3, one kv head": replace(BASE, time0=4, time1=3, kv_heads=1),
    "no history": replace(BASE, time0=1, time1=1),
    "sliding": replace(BASE, sliding=(False, True, True), sliding_window=5),
    "untied head with bias": replace(BASE, tied=False, head_bias=True),
    "whole head turned, yarn": replace(BASE, rotary_fraction=1.0, rope_scaling=YARN, max_positions=64),
    "one query head a group, quarter turned": replace(BASE, kv_heads=4, rotary_fraction=0.25),
}


def _values(role: Role, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if role is Role.BALANCING:
        # Without a push, few tokens of an untrained model skip.
        noise = noise * 0.05
        noise[-1] += 0.1
        return noise
    if role in (Role.TEMPERATURE, Role.NORM) or name.endswith("scale"):
        return 1 + 0.3 * noise
    if len(shape) == 1:
        return 0.1 * noise
    if role is Role.EMBEDDING:
        return noise
    # A router needs gain, or the softmax is flat and the balancing biases alone decide.
    gain = 3.0 if role is Role.ROUTER else 1.0
    fan_in = shape[1] * shape[2] if role is Role.CONVOLUTION else shape[-1]
    return noise * float(gain / fan_in**0.5)


@lru_cache(maxsize=16)
def random_tensors(architecture: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """float32 values for the whole table, scaled so that activations stay of order one."""
    generator = torch.Generator().manual_seed(seed)
    return {row.name: _values(row.role, row.name, row.shape, generator) for row in parameters(architecture)}


@lru_cache(maxsize=16)
def random_model(architecture: Architecture) -> ZayaModel:
    return ZayaModel.of(architecture, random_tensors(architecture))


def random_ids(architecture: Architecture, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, architecture.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def transformers_model(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    """The same random weights in transformers' own model, skip biases included."""
    from transformers import ZayaConfig, ZayaForCausalLM

    config = ZayaConfig(**native_config(architecture))
    model = ZayaForCausalLM._from_config(config, attn_implementation="eager", dtype=dtype).eval()
    # Loaded after construction, which writes -1 to every skip bias.
    missing, unexpected = model.load_state_dict(random_tensors(architecture), strict=False)
    assert missing == (["lm_head.weight"] if architecture.tied else [])
    assert unexpected == []
    return model


def write_deep(folder: Path, shallow: Architecture, blocks: int) -> Path:
    """A native checkpoint of many blocks, cheaply made: to be read, not to be any good.

    Every block after the first has the weights of the second of `shallow`.
    """
    a = replace(shallow, blocks=blocks, sliding=(False,) * blocks)
    block = {name: tensor.bfloat16() for name, tensor in random_tensors(shallow).items()}
    names = {name: name for name in block if ".layers." not in name or ".layers.0." in name}
    for number in range(1, blocks):
        names |= {name.replace(".1.", f".{number}.", 1): name for name in block if ".layers.1." in name}
    write_tensors(folder, {name: block[stored].clone() for name, stored in names.items()}, config_of(NATIVE, a))
    return folder
