"""Models to convert, and what an undisturbed run makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.support import SHARDS, Interrupted, interrupt, model, tree
from zaya_tools.checkpoint.conversion import convert


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("writer") / "source"
    model(folder)
    return folder


@pytest.fixture(scope="session")
def other(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same geometry: every shard has the same name and size."""
    folder = tmp_path_factory.mktemp("writer") / "other"
    model(folder, seed=1)
    ours, theirs = ((place / "model.safetensors").read_bytes() for place in (source, folder))
    assert len(ours) == len(theirs)
    assert ours != theirs
    return folder


@pytest.fixture(scope="session")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("writer") / "expected"
    convert(source, folder, **SHARDS)
    files = tree(folder)
    assert len([name for name in files if name.endswith(".safetensors")]) >= 5
    return files


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(source: Path, out: Path) -> Interrupted:
    """A conversion that was interrupted after some shards."""
    return interrupt(source, out)
