"""Disk for weighing: fewer tokens where there are many copies, and a word before the work where it does not fit."""

from __future__ import annotations

import tempfile
from collections import namedtuple
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.benchmarks.support import widths
from zaya_tools.data import TINY
from zaya_tools.errors import DestinationError
from zaya_tools.model.weights import Weights
from zaya_tools.quantization import room
from zaya_tools.quantization.room import COPIES, TOKENS, check_room, few

Usage = namedtuple("Usage", "total used free")


class _Wide:
    architecture = widths(40)
    dtype = torch.float32


def test_tokens_are_as_many_as_their_copies_allow() -> None:
    tiny, wide = Weights.open(TINY), cast(Weights, _Wide())
    ids = torch.arange(64 * 512).view(64, 512)
    assert few(ids, tiny, 11).shape == (TOKENS // 512, 512)
    assert few(ids[:3], tiny, 11).shape == (3, 512)
    assert few(torch.arange(20_000).view(2, 10_000), tiny, 11).shape == (1, TOKENS)
    assert few(ids, wide, 83).shape == (TOKENS // 512, 512)  # ZAYA1-8B
    each = 4 * 2048 + 4 * 256
    for copies in (200, 1000):
        found = few(ids, wide, copies)
        assert COPIES / 2 < copies * found.numel() * each <= COPIES
    assert few(torch.arange(2 * 32_768).view(2, 32_768), wide, 1000).shape == (1, COPIES // (1000 * each))


@pytest.mark.parametrize(("folder", "word"), [("temporary", "TMPDIR"), ("beside", "write elsewhere")])
def test_a_small_disk_is_known_before_the_work(
    folder: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, scratch = tmp_path / "beside", tmp_path / "temporary"
    beside.mkdir()
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(scratch))
    weights, ids = Weights.open(TINY), torch.zeros(4, 64, dtype=torch.long)
    check_room(weights, ids, 11, ids, 10**9, beside)
    monkeypatch.setattr(room, "disk_usage", lambda where: Usage(0, 0, 1000 if where.name == folder else 10**12))
    with pytest.raises(DestinationError, match=r"weighing schemes needs .* bytes in .*, 1,000 are free") as caught:
        check_room(weights, ids, 11, ids, 0, beside)
    assert word in str(caught.value.hint)
    if folder == "temporary":
        check_room(weights, ids, 11, ids, 10**9, beside)  # all in memory
