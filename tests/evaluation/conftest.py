"""What the tests that compare weights share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.evaluation.support import SMALL
from tests.synthetic import write_checkpoint
from zaya_tools.evaluation import comparison
from zaya_tools.layouts.raw import RAW


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix takes several blocks, none of them beginning where a zero point's word does."""
    monkeypatch.setattr(comparison, "BLOCK", 64 * 23)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A raw checkpoint of SMALL in three files."""
    write_checkpoint(tmp_path / "raw", RAW, SMALL, shards=3)
    return tmp_path / "raw"
