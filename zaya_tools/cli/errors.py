"""One table of exceptions to advice: a line saying what and where, a hint saying what to do, an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from zaya_tools.errors import ZayaError

INTERRUPTED = 130


def explain(error: BaseException) -> tuple[str, str | None, int] | None:
    """(message, hint, exit code) for an exception that has advice; None for one that is a fault of the program."""
    if isinstance(error, ZayaError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "finished shards are kept: --resume continues", INTERRUPTED
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}", None, 2
    return None


def run(command: Callable[[], object]) -> None:
    """Run the program, turning exceptions into advice on stderr; ZAYA_TRACEBACK=1 shows the traceback instead."""
    try:
        command()
    except (Exception, KeyboardInterrupt) as error:
        advice = explain(error)
        if advice is None or os.environ.get("ZAYA_TRACEBACK"):
            raise
        message, hint, code = advice
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
        if hint:
            sys.stderr.write(f"hint: {' '.join(hint.split())}\n")
        sys.exit(code)
