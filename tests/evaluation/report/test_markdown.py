from __future__ import annotations

import re

import pytest

from tests.evaluation.report.documents import full, hostile
from zaya_tools.evaluation.report.markdown import plain, text

markdown_it = pytest.importorskip("markdown_it")


def parsed(document: dict[str, object]) -> list[object]:
    tokens: list[object] = markdown_it.MarkdownIt("commonmark").enable("table").parse(text(document))
    return tokens


@pytest.mark.parametrize("document", [full(), full(80, 32, "FAIL"), hostile(full())], ids=["4", "80", "hostile"])
def test_tables_are_whole(document: dict[str, object]) -> None:
    tables = [part.splitlines() for part in text(document).split("\n\n") if part.startswith("| ")]
    assert len(tables) >= 8
    for head, rule, *rows in tables:
        assert set(rule) == set("| -") | ({":"} & set(rule))
        assert {len(re.split(r"(?<!\\)\|", row)) for row in (head, rule, *rows)} == {head.count("|") + 1}
    kinds = [token.type for token in parsed(document)]  # type: ignore[attr-defined]
    assert kinds.count("table_open") == len(tables)
    assert kinds.count("tr_open") == sum(len(table) - 1 for table in tables)


def test_hostile_texts_are_text() -> None:
    kinds = set()
    for token in parsed(hostile(full())):
        kinds |= {token.type, *(child.type for child in token.children or ())}  # type: ignore[attr-defined]
    assert not kinds & {"html_inline", "html_block", "link_open", "image", "code_inline"}


def test_all_sections_absent() -> None:
    written = text({})
    assert written.startswith("# no verdict: a checkpoint\n")
    assert written.count("not run") == 9


def test_reasons_come_before_figures() -> None:
    written = text(full(verdict="FAIL"))
    assert written.startswith("# FAIL: zaya1-tiny-fp8\n\n- block 1: gate and up of expert 3 are swapped")
    assert "| KL, mean | 0.0" in written
    assert "at most 0.02" in written


def test_fences_are_longer_than_any_in_the_text() -> None:
    document = full()
    document["checks"]["generation"]["figures"]["texts"][0]["text"] = "a\n````\nb"
    assert "`````text\na\n````\nb\n`````" in text(document)


def test_plain_is_one_line() -> None:
    assert plain("a | b\n<c> *d* `e` [f](g)") == r"a \| b \<c\> \*d\* \`e\` \[f\](g)"
