"""A hidden folder in which a pass over the blocks keeps what it needs to go on after it was interrupted."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import DestinationError, NonFiniteError, SourceError
from zaya_tools.model.streaming import Stream

_STATE, _LOCK = "state.json", "lock"
_OURS = ("state.json", "lock", "states-", "block-", "chosen-", ".unfinished-")
_BESIDE = (".blocks", ".auto")
"""What work on an output adds to its name here, so that several kinds of it have folders of their own."""
EVERY = 60.0
"""Seconds after which the states are saved again: they are large, so not after each of many short blocks."""
_OFTEN = 10**9
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Workspace:
    """The folder of one run. What it holds belongs to the run's fingerprint, which `open_workspace` checks."""

    def __init__(self, folder: Path, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._every, self._clock = every, clock
        self._saved = clock()

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a small document, whole or not at all."""
        unfinished = self.folder / f".unfinished-{name}"
        with self._explained():
            with unfinished.open("w") as stream:
                stream.write(json.dumps(value))
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.rename(self.folder / name)

    def read(self, name: str) -> dict[str, Any] | None:
        """A document that was kept, None where there is none that can be read."""
        try:
            return read_json(self.folder / name) if (self.folder / name).exists() else None
        except SourceError:
            return None

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors, whole or not at all."""
        from safetensors.torch import save_file

        unfinished = self.folder / f".unfinished-{name}"
        with self._explained():
            save_file(dict(tensors), unfinished)
            unfinished.rename(self.folder / name)

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors that were kept."""
        from safetensors.torch import load_file

        return load_file(self.folder / name)

    def save_states(
        self, stage: str, block: int, states: Stream | Mapping[str, Stream], *, facts: Mapping[str, Any] | None = None,
        always: bool = False,
    ) -> bool:  # fmt: skip
        """Keep the states after `block`, where it is time for it or `always`; says whether they are kept.

        Several streams, by name, and `facts` about them are one generation: the one before it is there until it is
        whole, and no third one ever is. A set of many gigabytes is saved that many times less often.
        """
        streams = _by_name(states)
        size = sum(held.nbytes for own in streams.values() for held in (own.hidden, own.carried))
        if not always and self._clock() - self._saved < self._every * max(1.0, size / _OFTEN):
            return False
        before = self.saved(stage)
        if before is not None and before["block"] == block:
            return True
        self._drop_states(stage, before)
        names = {
            name: {kind: f"states-{stage}-{block}-{name}-{kind}" for kind in ("hidden", "carried")} for name in streams
        }
        record = {"block": block, "streams": names, "facts": dict(facts or {})}
        try:
            with self._explained():
                for name, own in streams.items():
                    own.hidden.save(self.folder / names[name]["hidden"])
                    own.carried.save(self.folder / names[name]["carried"])
                self.write(f"states-{stage}.json", record)
        except DestinationError:
            self._drop_states(stage, before)
            raise
        self._drop_states(stage, record)
        self._saved = self._clock()
        return True

    def saved(self, stage: str) -> dict[str, Any] | None:
        """The `block` behind which states were kept last, the names of the `streams`, and `facts`; None without any."""
        return self.read(f"states-{stage}.json")

    def load_states(self, stage: str, states: Stream | Mapping[str, Stream]) -> int:
        """Put back the states that were kept last; the block that they stand behind, -1 where none were kept."""
        record = self.saved(stage)
        if record is None:
            return -1
        for name, own in _by_name(states).items():
            own.hidden.load(self.folder / str(record["streams"][name]["hidden"]))
            own.carried.load(self.folder / str(record["streams"][name]["carried"]))
        return int(record["block"])

    def forget_states(self, stage: str) -> None:
        """Delete the states of a stage that is over."""
        (self.folder / f"states-{stage}.json").unlink(missing_ok=True)  # first: it must not speak of what is gone
        self._drop_states(stage, None)

    def _drop_states(self, stage: str, kept: Mapping[str, Any] | None) -> None:
        """Delete the states of a stage that are not of the generation `kept`."""
        names = {name for own in kept["streams"].values() for name in own.values()} if kept else set()
        for file in self.folder.glob(f"states-{stage}-*"):
            if file.name not in names:
                file.unlink()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            # safetensors gives the system's number in words alone.
            full = error.errno in _FULL if isinstance(error, OSError) else f"os error {errno.ENOSPC}" in str(error)
            if not full:
                raise
            raise DestinationError(
                f"the disk is full: what an interrupted run goes on with could not be written to {self.folder}",
                "free some space, then run again with --resume",
            ) from error


def _by_name(states: Stream | Mapping[str, Stream]) -> Mapping[str, Stream]:
    return {"all": states} if isinstance(states, Stream) else states


@contextmanager
def open_workspace(
    destination: Path, fingerprint: str, *, resume: bool, force: bool, every: float = EVERY
) -> Iterator[Workspace]:
    """The hidden folder beside `destination`, locked; gone again when the block under it ends without an error.

    DestinationError where another process works there, where an unfinished run is found without `resume` or `force`,
    and where `resume` finds one of other data, options or another model. A run that bad numbers end leaves nothing.
    """
    folder = partial_folder(destination)
    shown = destination.with_suffix("") if destination.suffix in _BESIDE else destination
    if folder.is_symlink():
        raise DestinationError(f"{folder} is a link, not the work of an unfinished run", "move it away")
    folder.mkdir(exist_ok=True)
    strange = [entry.name for entry in folder.iterdir() if not entry.name.startswith(_OURS)]
    if strange:
        raise DestinationError(
            f"{folder / strange[0]} is not of an unfinished run of zaya",
            "move it away: nothing that zaya did not write is deleted",
        )
    with (folder / _LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DestinationError(
                f"another zaya process is writing {shown}", "wait for it, or choose another name"
            ) from error
        space = Workspace(folder, every)
        found = space.read(_STATE)
        if found is not None and not resume and not force:
            raise DestinationError(
                f"an unfinished run for {shown} is in {folder}", "--resume continues it, --force starts again"
            )
        if found is not None and resume and found.get("fingerprint") != fingerprint:
            raise DestinationError(
                f"the unfinished run for {shown} was of another model, other data or other options",
                "--force without --resume starts again",
            )
        if found is None or not resume:
            _clear(folder)
        space.write(_STATE, {"fingerprint": fingerprint})
        try:
            yield space
        except NonFiniteError:  # it would end like that again
            _discard(folder)
            raise
        _discard(folder)


def _discard(folder: Path) -> None:
    # First: without it nobody takes what is left for the work of a run.
    (folder / _STATE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    (folder / _STATE).unlink(missing_ok=True)
    for entry in folder.iterdir():
        if entry.name != _LOCK:
            entry.unlink()
