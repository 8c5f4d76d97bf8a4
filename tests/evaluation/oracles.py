"""The bundled trained model in transformers' own code, and small random ones: what evaluation is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.synthetic import write_tensors
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.checkpoint.source import open_source
from zaya_tools.data import TINY
from zaya_tools.evaluation.text import HELD_OUT, tokenize
from zaya_tools.layouts.match import match, require
from zaya_tools.model.weights import TORCH, read_tensor


@lru_cache(maxsize=1)
def tiny() -> tuple[Architecture, Mapping[str, Tensor]]:
    """The bundled model's geometry, and its parameters by native name."""
    source = open_source(TINY)
    found = require(match(source.tensors, source.config))
    tensors = {}
    for name, parts in found.bound.items():
        stored = [bound.tensor for bound in parts if bound.tensor is not None]
        shape = parts[0].part.shape if len(parts) == 1 else None
        flat = read_tensor(stored, torch.empty(sum(t.numel for t in stored), dtype=TORCH[stored[0].dtype]))
        tensors[name] = flat.reshape(shape if shape is not None else _shape(found.architecture, name))
    return found.architecture, tensors


def _shape(architecture: Architecture, name: str) -> tuple[int, ...]:
    from zaya_tools.parameters import parameters

    return next(parameter.shape for parameter in parameters(architecture) if parameter.name == name)


@lru_cache(maxsize=1)
def text() -> tuple[int, ...]:
    """Tokens that the bundled model was not trained on."""
    return tuple(tokenize(TINY, HELD_OUT, 2000))


def write_tiny(folder: Path, change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor) -> Path:
    """The bundled model as a native checkpoint, its tensors changed by name."""
    architecture, tensors = tiny()
    write_tensors(folder, {name: change(name, t.clone()) for name, t in tensors.items()}, native_config(architecture))
    return folder


def transformers_of(tensors: Mapping[str, Tensor], architecture: Architecture | None = None) -> Any:
    """ZayaForCausalLM in float32 with exactly these parameters and buffers."""
    from transformers import ZayaConfig, ZayaForCausalLM

    a = architecture or tiny()[0]
    config = ZayaConfig(**native_config(a))
    model = ZayaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict({n: t.float() for n, t in tensors.items()}, strict=False)
    assert missing == (["lm_head.weight"] if a.tied else [])
    assert unexpected == []
    return model


@lru_cache(maxsize=1)
def tiny_in_transformers() -> Any:
    return transformers_of(tiny()[1])


def log_probabilities(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, vocabulary] of one sequence, float32."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.log_softmax(-1)
