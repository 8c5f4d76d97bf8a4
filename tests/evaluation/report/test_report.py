from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.report.documents import full, hostile
from zaya_tools.errors import DestinationError, ZayaError
from zaya_tools.evaluation.report import check_suffix, render, write_report


def holes(document: Any, depth: int = 6) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a document; of a list, its first entry stands for all."""
    keys = list(document) if isinstance(document, dict) else [0] if isinstance(document, list) and document else []
    for key in keys if depth else []:
        yield (key,)
        yield from ((key, *rest) for rest in holes(document[key], depth - 1))


def without(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(document)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


@pytest.mark.parametrize("value", [None, "text", [], {}, 7, float("nan")], ids=repr)
def test_anything_may_be_absent_or_something_else(value: Any) -> None:
    document = full(2, 4, "FAIL", tokens=600)
    for path in holes(document):
        made = without(document, path, value)
        for suffix in (".html", ".md", ".json"):
            assert render(made, suffix), path


@pytest.mark.parametrize("suffix", [".html", ".md", ".json"])
def test_equal_documents_give_equal_bytes(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        write_report(full(), tmp_path / f"{name}{suffix}")
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_json_is_the_document(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_report(hostile(full()), path)
    assert json.loads(path.read_text(encoding="utf-8")) == hostile(full())
    assert path.read_text(encoding="utf-8").startswith('{\n  "verdict"')


def test_json_has_null_for_what_it_cannot_say() -> None:
    assert json.loads(render({"a": [float("nan"), float("inf"), 1.5]}, ".json")) == {"a": [None, None, 1.5]}


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.html.gz"])
def test_an_unknown_suffix_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ZayaError, match=r"no report ends in") as caught:
        write_report(full(), tmp_path / name)
    assert caught.value.hint == "end it in .html, .md, .json"
    assert list(tmp_path.iterdir()) == []


def test_suffixes_in_capitals_count() -> None:
    check_suffix(Path("REPORT.HTML"))


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="No such file") as caught:
        write_report(full(), tmp_path / "absent" / "report.html")
    assert caught.value.hint is not None
