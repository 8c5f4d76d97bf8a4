"""The disk that copies of the states take while schemes are weighed: bounded by taking fewer tokens, and checked."""

from __future__ import annotations

import tempfile
from pathlib import Path
from shutil import disk_usage

from torch import Tensor

from zaya_tools.errors import DestinationError
from zaya_tools.model.weights import Weights

TOKENS = 8192
"""Tokens on which damage is measured, where that many copies of their states are not too large."""
COPIES = 8 * 10**9
"""Bytes that all copies of the states may take together."""


def few(ids: Tensor, weights: Weights, copies: int) -> Tensor:
    """The first of the sequences [sequences, tokens], of which so many copies of the states are bearable."""
    most = max(2, min(TOKENS, COPIES // (copies * _each(weights))))
    return ids[: max(1, most // ids.shape[1]), :most]


def check_room(weights: Weights, ids: Tensor, copies: int, data: Tensor | None, budget: int, beside: Path) -> None:
    """DestinationError where the states of `copies` of `ids`, and of `data`, do not fit on the disk.

    They live in memory up to half of `budget` bytes for each of the two, in the temporary folder past it, and are kept
    twice in `beside` for an interrupted run. What is there already counts as free.
    """
    spilled = kept = 0
    for tokens, count in ((ids, copies), (data, 1)):
        if tokens is not None:
            size = count * tokens.numel() * _each(weights)
            kept += size
            spilled += size if size > budget // 2 else 0
    scratch = Path(tempfile.gettempdir())
    held = sum(file.stat().st_size for file in beside.glob("states-*"))
    shared = scratch.stat().st_dev == beside.stat().st_dev
    needs = {beside: (max(0, 2 * kept - held) + (spilled if shared else 0)), scratch: spilled}
    for folder, need in needs.items():
        free = disk_usage(folder).free
        if need > free:
            temporary = folder == scratch
            raise DestinationError(
                f"weighing schemes needs {need:,} bytes in {folder if temporary else folder.parent}, {free:,} are free",
                "name a folder on a larger disk in the environment variable TMPDIR" if temporary
                else "free some space, write elsewhere, or give fewer --samples",
            )  # fmt: skip


def _each(weights: Weights) -> int:
    """Bytes of a token's states."""
    a = weights.architecture
    return 4 * a.hidden_size + weights.dtype.itemsize * a.router_width
