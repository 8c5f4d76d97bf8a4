"""The only place that prints: people's text, or one JSON document on stdout, never both."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

UNITS = ("B", "KB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """Decimal bytes in three digits: 17.7 GB."""
    for unit in UNITS:
        if nbytes < 999.5 or unit == UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def count(number: float) -> str:
    """A large number as people say it: 8.84 B."""
    for limit, unit in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if number >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.0f}"


def visible(text: str) -> str:
    """Text with control characters and undecodable bytes spelled out: names from files could steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_console = partial(Console, highlight=False, markup=False, emoji=False)


class Output:
    """Text for people goes to stdout, notices and progress to stderr; with `as_json` stdout has the document alone.

    A `silent` one says nothing: of several processes of a run one speaks.
    """

    def __init__(self, as_json: bool = False, silent: bool = False) -> None:
        self.as_json, self._silent = as_json, silent
        # Tables must not be cut off where the output is a pipe or a log of unknown width.
        width = None if sys.stdout.isatty() else 140
        # Names are printed as they are: [brackets] and :codes: in them mean nothing.
        self._out = _console(width=width, quiet=silent)
        self._err = _console(stderr=True, width=None if sys.stderr.isatty() else 1000, quiet=silent)

    def text(self, line: str = "") -> None:
        """A line for people; nothing in JSON mode."""
        if not self.as_json:
            self._out.print(visible(line), soft_wrap=True)

    def heading(self, line: str) -> None:
        """A line that stands out."""
        if not self.as_json:
            self._out.print(visible(line), style="bold", soft_wrap=True)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """A table for people; columns whose cells are all numbers or sizes align right."""
        if self.as_json or not rows:
            return
        table = Table(title=visible(title), title_justify="left", title_style="bold", header_style="dim")
        for index, column in enumerate(columns):
            numeric = all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(visible, row))
        self._out.print(table)

    def warn(self, line: str) -> None:
        """A warning, on stderr."""
        self._err.print(f"warning: {visible(line)}", style="yellow", soft_wrap=True)

    def step(self, name: str) -> None:
        """What a long command is about to do, on stderr; nothing where that is not a terminal."""
        if self._err.is_terminal:
            self._err.print(f"{visible(name)} ...", style="dim")

    def document(self, value: dict[str, Any]) -> None:
        """The one JSON document; nothing without JSON mode. Numbers that JSON does not have become null."""
        if self.as_json and not self._silent:
            sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes done; a bar with rate and time left where stderr is a terminal."""
        if not self._err.is_terminal:
            yield lambda _: None
            return
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.advance(task, done)

    @contextmanager
    def counting(self, label: str) -> Iterator[Callable[[int, int, str], None]]:
        """Yield a function that takes (steps done, steps in all, what was seen); a bar where stderr is a terminal."""
        if not self._err.is_terminal:
            yield lambda _, __, ___: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(label, total=None)

            def step(done: int, total: int, seen: str) -> None:
                bar.update(task, completed=done, total=total, description=visible(seen))

            yield step
