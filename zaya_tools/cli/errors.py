"""One table of exceptions to advice: a line saying what and where, a hint saying what to do, an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from zaya_tools.cli.output import visible
from zaya_tools.errors import ZayaError

INTERRUPTED = 130


def explain(error: BaseException) -> tuple[str, str | None, int] | None:
    """(message, hint, exit code) for an exception that has advice; None for one that is a fault of the program."""
    if isinstance(error, ZayaError):
        return error.message, error.hint, error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted", "what a conversion had finished is kept: --resume continues", INTERRUPTED
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}", None, 2
    describe = getattr(error, "format_message", None)
    if callable(describe):  # wrong use: typer's class for it has moved from release to release
        context = getattr(error, "ctx", None)
        return describe(), f"`{context.command_path if context else 'zaya'} --help` says what it takes", 2
    return None


def run(command: Callable[[], object]) -> None:
    """Run the program and exit with the code that it returns, turning exceptions into advice on stderr.

    ZAYA_TRACEBACK=1 shows the traceback instead.
    """
    try:
        code = command()
        if code == INTERRUPTED:  # typer's word for Ctrl-C, said in silence
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:
        advice = explain(error)
        if advice is None or os.environ.get("ZAYA_TRACEBACK"):
            raise
        message, hint, code = advice
        # There is none where typer has shown its help. Of several processes on one command the first one speaks: what
        # goes wrong in one of them is raised in all.
        if message and not (_together() and os.environ.get("RANK") != "0"):
            sys.stderr.write(f"error: {_line(message)}\n")
            if hint:
                sys.stderr.write(f"hint: {_line(hint)}\n")
    found = code if isinstance(code, int) else 0
    if _together():
        # Of torch's communication some threads outlive it, and one run in twenty aborts when C++ takes itself down: a
        # success that torchrun reports as a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(found)
    sys.exit(found)


def _together() -> bool:
    """Whether `torchrun` started this process, as one of several perhaps."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _line(text: str) -> str:
    return visible(" ".join(text.split()))
