"""Numbers and lines as people read them."""

from __future__ import annotations

import json
import math

import pytest

from zaya_tools.cli.output import Output, count, size, visible


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1 KB"), (1234, "1.23 KB"), (99_949, "99.9 KB"), (99_950, "100 KB"),
     (999_499, "999 KB"), (999_500, "1 MB"), (17_684_000_000, "17.7 GB"), (148e9, "148 GB"), (5e15, "5000 TB")],
)  # fmt: skip
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (31_700, "31.7 K"), (8.84e9, "8.84 B"),
                                              (742e6, "742 M")])  # fmt: skip
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("plain é ✓ [x]", "plain é ✓ [x]"), ("a\tb", "a\\tb"), ("\x1b[1m", "\\x1b[1m"), ("two\nlines", "two\nlines"),
     ("\udcff", "\\udcff"), ("\u202e", "\\u202e"), ("\0", "\\x00")],
)  # fmt: skip
def test_what_could_steer_a_terminal_is_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_json_mode_prints_the_document_alone(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=True)
    out.text("text")
    out.heading("heading")
    out.table("title", ["a"], [["b"]])
    out.warn("look")
    out.document({"x": [1.5, math.nan, {"y": (math.inf, -math.inf)}], "n": 2**60, "s": "NaN", "none": None})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "x": [1.5, None, {"y": [None, None]}], "n": 2**60, "s": "NaN", "none": None
    }  # fmt: skip
    assert captured.err == "warning: look\n"


def test_people_get_text_and_no_document(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output()
    out.text("a line [red]of[/red] :tiger: " + "x" * 300)
    out.table("[t]", ["name", "bytes"], [["[/b]", "1 KB"], [":smile:", "22 KB"]])
    out.document({"x": 1})
    with out.progress("working", 10) as advance:
        advance(5)
    captured = capsys.readouterr()
    assert captured.out.startswith("a line [red]of[/red] :tiger: " + "x" * 300 + "\n[t]")
    assert "[/b]" in captured.out
    assert ":smile:" in captured.out
    assert '"x"' not in captured.out
    assert captured.err == ""


def test_an_empty_table_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table("title", ["a"], [])
    assert capsys.readouterr().out == ""
