from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.evaluation.report.documents import HOSTILE, full, hostile
from zaya_tools.evaluation.report.html import page

EMPTY = {"meta", "link"}
ALLOWED = frozenset(
    [
        "html",
        "head",
        "meta",
        "link",
        "title",
        "style",
        "body",
        "main",
        "header",
        "section",
        "div",
        "p",
        "h1",
        "h2",
        "h3",
        "b",
        "strong",
        "span",
        "ul",
        "li",
        "dl",
        "dt",
        "dd",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "figure",
        "figcaption",
        "details",
        "summary",
        "mark",
        "i",
        "svg",
        "rect",
        "path",
        "line",
        "circle",
        "text",
    ]
)


class Reader(HTMLParser):
    """Checks that elements are closed in order and known; gathers texts, titles of marks, and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tips: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED, tag
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data
        if self.open[-2:] in (["rect", "title"], ["circle", "title"]):
            self.tips.append(data)


@pytest.mark.parametrize("verdict", ["PASS", "FAIL"])
def test_the_verdict_is_a_word_and_comes_with_its_reasons_first(verdict: str) -> None:
    document = full(verdict=verdict)
    text = Reader(page(document)).text
    places = [text.index(verdict), *(text.index(reason) for reason in document["reasons"]), text.index("Key figures")]
    assert places == sorted(places)


def test_hostile_texts_are_text() -> None:
    read = Reader(page(hostile(full())))
    assert HOSTILE[: HOSTILE.index("\x00")] in read.text
    assert {name for name, _ in read.attributes if name.startswith("on")} == set()


def test_control_characters_are_shown_not_sent() -> None:
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page(hostile(full())))


@pytest.mark.parametrize("document", [full(), full(80, 32, "FAIL"), {}, hostile(full())], ids=["4", "80", "0", "!"])
def test_nothing_is_loaded(document: dict[str, object]) -> None:
    text = page(document)
    read = Reader(text)
    links = [value for name, value in read.attributes if name in ("src", "href", "srcset", "action", "data", "style")]
    assert links == ["data:,"]
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face|//", style)


def test_every_section_says_that_it_was_not_run() -> None:
    text = Reader(page({})).text
    assert "NO VERDICT" in text
    assert "No check was run" in text
    for title in ("Key figures", "Block by block", "Divergence", "Weights", "Generation", "Structure"):
        assert f"{title}not run" in text, title


def test_without_a_reference_only_coverage_is_drawn() -> None:
    document = full()
    document["reference"] = None
    found = document["checks"]["likelihood"]["figures"]
    blocks = [block | {"router_agreement": None, "hidden_error": None} for block in found["blocks"]]
    document["checks"]["likelihood"]["figures"] = {"perplexity": found["perplexity"], "blocks": blocks}
    text = page(document)
    assert re.findall(r'data-plot="([a-z-]+)"', text) == ["coverage", "weights"]
    assert "it takes a reference" in text


@pytest.mark.parametrize(("blocks", "experts"), [(2, 4), (80, 32)])
def test_every_cell_says_what_it_is(blocks: int, experts: int) -> None:
    document = full(blocks, experts)
    tips = Reader(page(document)).tips
    first = document["checks"]["likelihood"]["figures"]["blocks"][1]
    assert sum(": error " in tip for tip in tips) == blocks
    assert sum("routed alike" in tip for tip in tips) == blocks
    assert sum(re.match(r"block \d+, expert \d+: [\d,]+ tokens", tip) is not None for tip in tips) == blocks * experts
    assert any(tip.startswith(f"block 1, expert 2: {first['expert_tokens'][2]:,} tokens") for tip in tips)
    starved = [tip for tip in tips if tip.endswith("never chosen")]
    assert len(starved) == sum(0 in b["expert_tokens"] for b in document["checks"]["likelihood"]["figures"]["blocks"])


def test_a_limit_that_is_passed_is_marked_beside_its_colour() -> None:
    document = full()
    document["thresholds"]["max_kl"] = 1e-6
    rows = re.findall(r'<tr class="over">.*?</tr>', page(document))
    assert len(rows) == 1
    assert "KL, mean" in rows[0]
    assert "✗" in rows[0]
    assert "beyond" in rows[0]


def test_a_swapped_expert_is_crossed_and_heads_the_table() -> None:
    text = page(full(8, 8, "FAIL"))
    assert text.count('class="cross over"') == 3  # gate, up, and the legend
    assert re.findall(r'<td class="name">(model[^<]*)', text)[:2] == [
        "model.layers.1.mlp.experts.3.gate_proj.weight",
        "model.layers.1.mlp.experts.3.up_proj.weight",
    ]


def test_where_a_continuation_leaves_the_reference_is_marked() -> None:
    assert re.findall(r"<mark>(.*?)\n</mark>", page(full())) == ["continue", "raise KeyError(name)"]


def test_eighty_blocks_are_a_page_of_a_megabyte_at_most() -> None:
    assert len(page(full(80, 32)).encode()) < 2**20


def test_a_continuation_of_white_space_is_said_in_words() -> None:
    document = full()
    document["checks"]["generation"]["figures"]["texts"] = [{"prompt": "a", "text": "  \n ", "reference_text": ""}]
    text = Reader(page(document)).text
    assert "4 characters of white space" in text
    assert "nothing" in text


def test_short_tables_among_the_figures_are_told_row_by_row() -> None:
    text = Reader(page(full())).text
    assert "quantized, expert48 of 48" in text
    assert "limits, float 8 bits, channelsqnr db min 25, sqnr db usual 31.5" in text


def test_what_is_not_a_number_is_beyond_its_limit() -> None:
    document = full()
    document["checks"]["likelihood"]["figures"]["kl"]["mean"]["value"] = float("nan")
    document["checks"]["likelihood"]["figures"]["blocks"][2]["router_agreement"] = float("nan")
    rows = re.findall(r'<tr class="over"><td class="name">(.*?)</td><td class="value">(.*?)</td>', page(document))
    assert rows == [("KL, mean", "not a number"), ("Router agreement, lowest", "not a number")]
