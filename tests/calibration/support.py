"""A tiny checkpoint whose router can be bent, and the numbers that a calibration of it must have."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from zaya_tools.calibration.data import Choice
from zaya_tools.calibration.run import Settings
from zaya_tools.data import TINY

SMALL = Settings(Choice(samples=6, context=64), every=0.0)
"""A calibration of a moment, whose states are saved after every block."""


def bent(folder: Path, block: int, expert: int, bias: float) -> Path:
    """A copy of the tiny checkpoint in which one expert's balancing bias is another."""
    copy = Path(shutil.copytree(TINY, folder))
    tensors = load_file(copy / "model.safetensors")
    name = f"model.layers.{2 * block + 1}.zaya_block.router.balancing_biases"
    tensors[name] = tensors[name].clone()
    tensors[name][expert] = bias
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def scaled(folder: Path, name: str, factor: float) -> Path:
    """A copy of the tiny checkpoint in which one tensor is multiplied."""
    copy = Path(shutil.copytree(TINY, folder))
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = (tensors[name].float() * factor).to(torch.bfloat16)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy
