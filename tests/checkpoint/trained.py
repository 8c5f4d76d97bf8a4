"""What the tests of trainers' checkpoints share: a small model, its ranks, and what a refusal looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.support import tree
from tests.megatron import save, trainer_modules, write_ranks
from tests.synthetic import small
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.opening import Reading
from zaya_tools.errors import ZayaError

A = small(experts=4)
FILE = "model_optim_rng.pt"


def refused(message: str, source: Path, **reading: Any) -> ZayaError:
    """The error that refuses a source, one line and a hint; nothing is published or left behind."""
    out = source.parent / "out"
    before = tree(source.parent)
    with pytest.raises(ZayaError, match=message) as caught:
        convert(source, out, reading=Reading(**reading))
    assert tree(source.parent) == before
    assert not out.exists()
    assert caught.value.hint
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value


def ranks(folder: Path, **options: Any) -> Path:
    place = folder / "iter_0000100"
    write_ranks(place, A, optimizer=False, **{"ep": 2, **options})
    return place


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Load a rank's file, trusted here, change it and save it again."""
    with trainer_modules():
        state = torch.load(file, weights_only=False)
    change(state)
    save(file, state)
