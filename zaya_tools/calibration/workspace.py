"""A hidden folder in which a pass over the blocks keeps what it needs to go on after it was interrupted."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import DestinationError, SourceError
from zaya_tools.model.streaming import Stream

_STATE, _LOCK = "state.json", "lock"
_OURS = ("state.json", "lock", "states-", "block-", "chosen-", ".unfinished-")
EVERY = 60.0
"""Seconds after which the states are saved again: they are large, so not after each of many short blocks."""


class Workspace:
    """The folder of one run. What it holds belongs to the run's fingerprint, which `open_workspace` checks."""

    def __init__(self, folder: Path, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._every, self._clock = every, clock
        self._saved = clock()

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Keep a small document, whole or not at all."""
        unfinished = self.folder / f".unfinished-{name}"
        unfinished.write_text(json.dumps(value))
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
        save_file(dict(tensors), unfinished)
        unfinished.rename(self.folder / name)

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors that were kept."""
        from safetensors.torch import load_file

        return load_file(self.folder / name)

    def save_states(self, stage: str, block: int, states: Stream, *, always: bool = False) -> bool:
        """Keep the states after `block`, where it is time for it or `always`; says whether they were kept."""
        if not always and self._clock() - self._saved < self._every:
            return False
        names = {}
        for kind, held in (("hidden", states.hidden), ("carried", states.carried)):
            names[kind] = f"states-{stage}-{kind}-{block}"
            held.save(self.folder / names[kind])
        before = self.read(f"states-{stage}.json")
        self.write(f"states-{stage}.json", {"block": block, **names})
        for kind in ("hidden", "carried"):
            if before is not None and before[kind] != names[kind]:
                (self.folder / str(before[kind])).unlink(missing_ok=True)
        self._saved = self._clock()
        return True

    def load_states(self, stage: str, states: Stream) -> int:
        """Put back the states that were kept last; the block that they stand behind, -1 where none were kept."""
        record = self.read(f"states-{stage}.json")
        if record is None:
            return -1
        states.hidden.load(self.folder / str(record["hidden"]))
        states.carried.load(self.folder / str(record["carried"]))
        return int(record["block"])

    def forget_states(self, stage: str) -> None:
        """Delete the states of a stage that is over."""
        for file in self.folder.glob(f"states-{stage}[-.]*"):
            file.unlink()


@contextmanager
def open_workspace(
    destination: Path, fingerprint: str, *, resume: bool, force: bool, every: float = EVERY
) -> Iterator[Workspace]:
    """The hidden folder beside `destination`, locked; gone again when the block under it ends without an error.

    DestinationError where another process works there, where an unfinished run is found without `resume` or `force`,
    and where `resume` finds one of other data, options or another model.
    """
    folder = partial_folder(destination)
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
                f"another zaya process is writing {destination}", "wait for it, or choose another name"
            ) from error
        space = Workspace(folder, every)
        found = space.read(_STATE)
        if found is not None and not resume and not force:
            raise DestinationError(
                f"an unfinished run for {destination} is in {folder}", "--resume continues it, --force starts again"
            )
        if found is not None and resume and found.get("fingerprint") != fingerprint:
            raise DestinationError(
                f"the unfinished run for {destination} was of another model, other data or other options",
                "--force without --resume starts again",
            )
        if found is None or not resume:
            _clear(folder)
        space.write(_STATE, {"fingerprint": fingerprint})
        yield space
    shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.name != _LOCK:
            entry.unlink()
