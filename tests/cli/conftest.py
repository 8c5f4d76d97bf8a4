"""The command line, run in this process and looked at from outside."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.support import one_line_and_hint
from zaya_tools.cli.app import main


@dataclass(frozen=True)
class Result:
    """What a command left behind: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        """Stdout as the one JSON document that it must be, by the letter of JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        value = json.loads(self.out, parse_constant=refuse)
        assert isinstance(value, dict)
        return value

    def error(self, code: int = 2) -> tuple[str, str]:
        """Message and hint of a command that failed with nothing on stdout and nothing else on stderr."""
        assert (self.code, self.out) == (code, "")
        return one_line_and_hint(self.err)


Zaya = Callable[..., Result]


@pytest.fixture
def zaya(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Zaya:
    """A function that runs `zaya` with these arguments."""

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["zaya", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Result(caught.value.code, captured.out, captured.err)

    return run
