"""Pieces of the page that sections share: cards, figures, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zaya_tools.evaluation.report.svg import element, escape


def card(title: str, lead: str | None, *inner: str) -> str:
    """A section of the page."""
    return element(
        "section", element("h2", escape(title)), element("p", escape(lead), class_="soft") if lead else "", *inner
    )


def figure(plot: str, title: str, caption: str) -> str:
    """A plot under its title; nothing where there is no plot."""
    if not plot:
        return ""
    written = element("figcaption", element("b", escape(title)), escape(caption))
    return element("figure", written, element("div", plot, class_="scroll"))


def table(heads: Sequence[str], body: str, numeric: Sequence[int] = ()) -> str:
    """A table around rows of markup; the columns in `numeric` align right."""
    cells = (element("th", escape(head), class_="n" if i in numeric else None) for i, head in enumerate(heads))
    head = element("thead", element("tr", *cells))
    return element("div", element("table", head, element("tbody", body)), class_="scroll")


def row(cells: Sequence[str], numeric: Sequence[int] = (), name: int | None = None) -> str:
    """A row of escaped cells; the one at `name` may break anywhere."""
    written = (
        element("td", escape(cell), class_="n" if i in numeric else "name" if i == name else None)
        for i, cell in enumerate(cells)
    )
    return element("tr", *written)


def facts_list(facts: Iterable[tuple[str, str]]) -> str:
    """Labels and values, in as many columns as there is room for."""
    pairs = (element("div", element("dt", escape(key)), element("dd", escape(value))) for key, value in facts)
    return element("dl", *pairs, class_="facts")
