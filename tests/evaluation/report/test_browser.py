"""The page as Chromium shows it: plots are drawn, labels are legible, and nothing is asked of any network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.evaluation.report.browser import Browser, binary, browser
from tests.evaluation.report.documents import full, hostile
from zaya_tools.evaluation.report import write_report

PLOTS = ["hidden-error", "router-agreement", "coverage", "kl-histogram", "weights"]
GEOMETRIES = [(2, 4), (4, 4), (40, 16), (80, 32)]

# Texts of a plot that leave it or run into one another.
CLASHES = """
[...document.querySelectorAll("svg.plot")].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  const outside = texts.filter(([, b]) => b.left < frame.left - 1 || b.right > frame.right + 1
    || b.top < frame.top - 1 || b.bottom > frame.bottom + 1).map(([t]) => `${svg.dataset.plot}: ${t} is cut`);
  const touching = texts.flatMap(([t, a], i) => texts.slice(i + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right && a.top + 4 < b.bottom && b.top + 4 < a.bottom)
    .map(([u]) => `${svg.dataset.plot}: ${t} touches ${u}`));
  return [...outside, ...touching];
})
"""
BOXES = """
Object.fromEntries([...document.querySelectorAll("svg.plot")].map(svg => {
  const box = svg.getBoundingClientRect();
  return [svg.dataset.plot, {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height}];
}))
"""
# Contrast (WCAG 2) of every line of text outside the plots with what is painted behind it.
CONTRASTS = """
(() => {
  const parse = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const poor = [];
  while (walker.nextNode()) {
    const text = walker.currentNode, node = text.parentElement;
    if (!text.data.trim() || node.closest("svg")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5) poor.push(text.data);
  }
  return poor;
})()
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if binary() is None:
        pytest.skip("there is no Chromium")
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    for blocks, experts in GEOMETRIES:
        write_report(full(blocks, experts, "FAIL"), folder / f"{blocks}.html")
    write_report(hostile(full()), folder / "hostile.html")
    write_report({}, folder / "empty.html")
    return folder


def asked(chromium: Browser) -> list[str]:
    """What was asked for besides the page itself and data that it holds."""
    return [url for url in chromium.requests[1:] if not url.startswith("data:")]


@pytest.mark.parametrize("blocks", [blocks for blocks, _ in GEOMETRIES])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plots_are_visible_and_legible(chromium: Browser, pages: Path, blocks: int, scheme: str) -> None:
    chromium.open(pages / f"{blocks}.html", scheme=scheme)
    boxes = chromium.evaluate(BOXES)
    assert list(boxes) == PLOTS
    for name, box in boxes.items():
        share, colours = chromium.colours(box)
        assert box["width"] > 800, name
        assert share > 0.05, name
        assert colours > 20, name
    assert chromium.evaluate(CLASHES) == []
    assert chromium.evaluate(CONTRASTS) == []
    assert asked(chromium) == []
    assert chromium.problems == []


def test_schemes_differ_and_print_is_light(chromium: Browser, pages: Path) -> None:
    seen = {}
    for scheme, media in (("light", ""), ("dark", ""), ("dark", "print")):
        chromium.open(pages / "4.html", scheme=scheme, media=media)
        seen[scheme, media] = chromium.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert seen["light", ""] == seen["dark", "print"] == "rgb(255, 255, 255)"
    assert seen["dark", ""] == "rgb(24, 28, 34)"


@pytest.mark.parametrize("width", [360, 720, 1180, 1920])
@pytest.mark.parametrize("name", ["80", "hostile", "empty"])
def test_the_page_never_scrolls_sideways(chromium: Browser, pages: Path, width: int, name: str) -> None:
    chromium.open(pages / f"{name}.html", width=width)
    assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_hostile_texts_do_nothing(chromium: Browser, pages: Path) -> None:
    chromium.open(pages / "hostile.html")
    assert asked(chromium) == []
    assert chromium.problems == []
    assert chromium.evaluate("document.querySelectorAll('script, img, iframe, object, form, a').length") == 0
    assert "alert" in chromium.evaluate("document.querySelector('.text').textContent")


def test_a_policy_stands_behind_the_escaping(chromium: Browser, pages: Path, tmp_path: Path) -> None:
    # Were a text not escaped after all, it could still neither run nor load anything.
    harm = "<script>document.title = 'harmed'</script><img src='https://example.com/a.png'>"
    leaky = tmp_path / "leaky.html"
    page = (pages / "empty.html").read_text(encoding="utf-8")
    leaky.write_text(page.replace("<main>", f"<main>{harm}"), encoding="utf-8")
    chromium.open(leaky)
    assert chromium.evaluate("document.title") != "harmed"
    assert chromium.refused == asked(chromium) == ["https://example.com/a.png"]
