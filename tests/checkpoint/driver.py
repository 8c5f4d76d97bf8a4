"""Runs one conversion in a process of its own, as the command line does, slowly and in small blocks.

`python -m tests.checkpoint.driver '{"source": ..., "destination": ..., ...}'` takes the options of `convert` and
`delay` (seconds slept at every block), `block` (bytes), `stop_after` (blocks, then wait for ever), `file_limit`
(largest file, bytes) and `fill` (a file that takes what room the disk has at the first block). It says `started`
when the conversion begins.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from zaya_tools.checkpoint import pump
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.cli import errors


def main(options: dict[str, Any]) -> None:
    delay, stop_after = options.pop("delay", 0.0), options.pop("stop_after", None)
    if "block" in options:
        vars(pump)["BLOCK"] = options.pop("block")
    limit, fill = options.pop("file_limit", None), options.pop("fill", None)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    blocks: list[int] = []

    def advance(count: int) -> None:
        blocks.append(count)
        if fill is not None and len(blocks) == 1:
            _fill(Path(fill))
        if stop_after is not None and len(blocks) >= stop_after:
            print("waiting", flush=True)
            time.sleep(600)
        time.sleep(delay)

    # A shell that runs its jobs in the background lets them ignore Ctrl-C, and that is handed down to here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("started", flush=True)
    result = convert(**options, advance=advance)
    # Not ru_maxrss, which a process inherits from the one that started it.
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))
    heavy = [name for name in ("torch", "transformers", "safetensors") if name in sys.modules]
    print(json.dumps({"complete": result.already_complete, "peak": peak, "heavy": heavy}), flush=True)


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError:
            return


if __name__ == "__main__":
    errors.run(lambda: main(json.loads(sys.argv[1])))
