"""Dies at every step of a conversion in turn, and says what was there afterwards.

`python -m tests.checkpoint.sweep '{"source": ..., "folder": ..., "old": ..., "exchange": ...}'` converts `source` to
`folder`/out over and over, each time in a forked process that kills itself right before its n-th change to the file
system, n = 1, 2, ... until a run survives. `old` is an output that is there before and is replaced. After every
death it notes which output is under the destination's name, and what a resume makes of it, as one JSON list.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from zaya_tools.checkpoint import writer
from zaya_tools.checkpoint.conversion import convert

_CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "open", "ctypes.call_function"}


def _die_at(step: int, folder: Path) -> None:
    """Kill this process right before its `step`-th change to anything in `folder`."""
    left = step

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in _CHANGES:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_CREAT | os.O_TRUNC)):
            return
        if event.startswith("os.") and not str(arguments[0]).startswith((str(folder), "output", "records")):
            return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _tree(folder: Path) -> dict[str, bytes] | None:
    if not folder.exists():
        return None
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def _child(step: int, source: Path, folder: Path, options: dict[str, Any]) -> bool:
    """Convert in a fork that dies at `step`; whether it died."""
    pid = os.fork()
    if pid == 0:
        _die_at(step, folder)
        try:
            convert(source, folder / "out", workers=1, **options)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def sweep(source: Path, folder: Path, old: Path | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One note for every step at which a run can die."""
    convert(source, folder / "expected", **options)
    expected, before = _tree(folder / "expected"), _tree(old) if old else None
    options |= {"force": True} if old else {}
    out, notes = folder / "out", []
    for step in range(1, 1000):
        if old:
            shutil.copytree(old, out)
        died = _child(step, source, folder, options)
        found = _tree(out)
        state = "new" if found == expected else "absent" if found is None else "old" if found == before else "in part"
        result = convert(source, out, resume=True, **options)
        notes.append({
            "died": died,
            "found": state,
            "complete": result.already_complete,
            "resumed": _tree(out) == expected,
            "left": sorted(entry.name for entry in folder.iterdir() if entry.name not in ("expected", "out")),
        })  # fmt: skip
        shutil.rmtree(out)
        if not died:
            return notes
    raise AssertionError("the run never survives")


def main(options: dict[str, Any]) -> None:
    if not options["exchange"]:
        writer._exchange = lambda *_: False
    old = Path(options["old"]) if options["old"] else None
    notes = sweep(Path(options["source"]), Path(options["folder"]), old, {"max_shard_size": 40_000})
    print(json.dumps(notes))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
