"""Where tensors are computed."""

from __future__ import annotations

import torch

from zaya_tools.errors import ZayaError


def choose_device(name: str) -> torch.device:
    """The device that is asked for: auto (CUDA where there is one), cpu, cuda or cuda:N. ZayaError for another."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ZayaError("there is no CUDA device", "use --device cpu")
    if name != "cpu" and not name.startswith("cuda"):
        raise ZayaError(f"unknown device {name!r}", "choose auto, cpu, cuda or cuda:N")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ZayaError(f"unknown device {name!r}", "choose auto, cpu, cuda or cuda:N") from error
