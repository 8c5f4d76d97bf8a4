"""What an interrupted pass goes on with: a generation of states is there whole, or the one before it is."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from zaya_tools.calibration.workspace import Workspace, open_workspace
from zaya_tools.data import TINY
from zaya_tools.errors import DestinationError, NonFiniteError
from zaya_tools.model.streaming import States, Stream
from zaya_tools.model.weights import Weights


@pytest.fixture
def streams() -> dict[str, Stream]:
    weights = Weights.open(TINY)
    ids = torch.arange(12).view(3, 4)
    first = Stream(weights, weights.ends(), ids)
    first.carried.write(0, torch.zeros(first.carried.shape))
    second = first.fork()
    second.hidden.write(0, 2 * second.hidden.read(0, 3))
    return {"one": first, "two": second}


def values(streams: dict[str, Stream]) -> list[torch.Tensor]:
    return [held.read(0, 3).clone() for own in streams.values() for held in (own.hidden, own.carried)]


def test_a_set_of_states_comes_back_with_its_facts(streams: dict[str, Stream], tmp_path: Path) -> None:
    space = Workspace(tmp_path, 0.0)
    assert space.save_states("stage", 3, streams, facts={"x": 0.1})
    before = values(streams)
    for own in streams.values():
        own.hidden.write(0, torch.zeros(own.hidden.shape))
    record = space.saved("stage")
    assert record is not None
    assert (record["block"], list(record["streams"]), record["facts"]) == (3, ["one", "two"], {"x": 0.1})
    assert space.load_states("stage", streams) == 3
    assert all(map(torch.equal, values(streams), before))
    space.forget_states("stage")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_generation_before(
    streams: dict[str, Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Workspace(tmp_path, 0.0)
    space.save_states("stage", 0, streams)
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    before = values(streams)
    save, calls = States.save, 0

    def full(self: States, file: Path) -> None:
        nonlocal calls
        calls += 1
        save(self, file)
        if calls == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(States, "save", full)
    for own in streams.values():
        own.hidden.write(0, torch.ones(own.hidden.shape))
    with pytest.raises(DestinationError, match="the disk is full") as caught:
        space.save_states("stage", 1, streams)
    assert "--resume" in str(caught.value.hint)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == kept
    assert space.load_states("stage", streams) == 0
    assert all(map(torch.equal, values(streams), before))


def test_there_are_never_more_than_two_generations(
    streams: dict[str, Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, most = States.save, 0

    def watched(self: States, file: Path) -> None:
        nonlocal most
        save(self, file)
        most = max(most, len(list(tmp_path.glob("states-stage-*"))))

    monkeypatch.setattr(States, "save", watched)
    space = Workspace(tmp_path, 0.0)
    (tmp_path / "states-stage-7-one-hidden").write_bytes(b"of a run that was killed amid saving")
    for block in range(4):
        space.save_states("stage", block, streams)
    assert most == 2 * 4
    assert len(list(tmp_path.glob("states-stage-*"))) == 4


def test_large_sets_are_saved_less_often(
    streams: dict[str, Stream], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    space = Workspace(tmp_path, 60.0, clock=lambda: now)
    assert not space.save_states("stage", 0, streams)
    now = 61.0
    assert space.save_states("stage", 1, streams)
    monkeypatch.setattr(States, "nbytes", 10**9)  # 4 GB in all
    for now, due in ((200.0, False), (302.0, True)):
        assert space.save_states("stage", int(now), streams) == due


def test_only_an_end_without_an_error_or_with_bad_numbers_leaves_nothing(tmp_path: Path) -> None:
    for error, left in ((None, False), (NonFiniteError("NaN"), False), (ValueError("x"), True)):
        try:
            with open_workspace(tmp_path / "out", "me", resume=False, force=True) as space:
                folder = space.folder
                if error is not None:
                    raise error
        except (NonFiniteError, ValueError):
            pass
        assert folder.exists() == left
