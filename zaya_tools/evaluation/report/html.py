"""The report as one HTML page: no script, nothing loaded from anywhere, light and dark, legible in print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources

from zaya_tools.evaluation.report import sections
from zaya_tools.evaluation.report.document import CHECKS, Document, facts, lines, mapping, passed, subject
from zaya_tools.evaluation.report.keyfigures import KeyFigure, key_figures
from zaya_tools.evaluation.report.markup import card, facts_list, table
from zaya_tools.evaluation.report.svg import element, escape

# Whatever a checkpoint's texts say: nothing is fetched and nothing runs.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_SIGNS = {"PASS": "M6 23 L18 35 L39 10", "FAIL": "M11 11 L34 34 M34 11 L11 34", "": "M10 22 L35 22"}


def page(document: Document) -> str:
    """The whole page. Equal documents give equal pages."""
    model = mapping(document, "model")
    name = str(model.get("name") or "a checkpoint")
    verdict = str(document.get("verdict") or "NO VERDICT")
    body = element(
        "main",
        _header(document, name),
        _verdict(document, verdict),
        _warnings(lines(document, "warnings")),
        _key_figures(key_figures(document)),
        sections.by_block(document),
        sections.divergence(document),
        sections.weights(document),
        sections.generation(document),
        sections.structure(document),
        _notes(lines(document, "notes")),
        _settings(document),
    )
    style = resources.files(__package__ or "").joinpath("style.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(verdict)} · {escape(name)} · zaya validate</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _header(document: Document, name: str) -> str:
    reference = mapping(document, "reference")
    described = [element("p", escape(" · ".join(subject(mapping(document, "model")))), class_="lead")]
    if reference:
        against = escape(str(reference.get("name") or "a reference"))
        described.append(
            element("p", f"against <b>{against}</b>: ", escape(" · ".join(subject(reference))), class_="lead")
        )
    else:
        described.append(element("p", "without a reference", class_="lead"))
    return element("header", element("div", "zaya validate", class_="eyebrow"), element("h1", escape(name)), *described)


def _verdict(document: Document, verdict: str) -> str:
    sign = element(
        "svg", element("path", d=_SIGNS.get(verdict, _SIGNS[""])), viewBox="0 0 45 45", aria_hidden="true"
    )  # fmt: skip
    kind = {"PASS": "pass", "FAIL": "fail"}.get(verdict, "unknown")
    reasons = lines(document, "reasons")
    if reasons:
        head = f"{len(reasons)} reason{'s' if len(reasons) != 1 else ''}"
        why = element("strong", head) + element("ul", *(element("li", escape(reason)) for reason in reasons))
    else:
        ran = [check for check in CHECKS if passed(document, check) is not None]
        said = f"{', '.join(ran)}: no fault found" if ran else "no check was run"
        why = element("strong", escape(said[:1].upper() + said[1:]))
    chips = element("ul", *(_chip(check, passed(document, check)) for check in CHECKS), class_="checks")
    return element(
        "div",
        element("div", sign, element("span", escape(verdict)), class_="stamp"),
        element("div", why, chips, class_="because"),
        class_=f"verdict {kind}",
        role="region",
        aria_label=f"verdict: {verdict}",
    )


def _chip(check: str, good: bool | None) -> str:
    kind, word = {True: ("ok", "✓ passed"), False: ("no", "✗ failed"), None: ("off", "not run")}[good]
    return element("li", f"{check} ", element("b", word), class_=kind)


def _warnings(warnings: Sequence[str]) -> str:
    notices = (element("div", "<b>Warning</b> ", escape(warning), class_="notice") for warning in warnings)
    return element("div", *notices, class_="warnings") if warnings else ""


def _key_figures(rows: Sequence[KeyFigure]) -> str:
    if not rows:
        return card("Key figures", None, element("p", "not run", class_="soft"))
    limited = any(row.limit for row in rows)
    heads = ["figure", "value", ""] + (["limit", "margin", "limit used"] if limited else [])
    body = "".join(_figure(row, limited) for row in rows)
    lead = (
        "± is one standard error of a block bootstrap over the text." if any("±" in row.value for row in rows) else None
    )
    return card("Key figures", lead, element("div", table(heads, body), class_="keys"))


def _figure(row: KeyFigure, limited: bool) -> str:
    cells = [
        element("td", escape(row.name), class_="name"),
        element("td", escape(row.value), class_="value"),
        element("td", escape(row.unit), class_="unit"),
    ]
    if limited:
        margin = f"✗ {row.margin}" if row.over else row.margin
        meter = _meter(row) if row.used is not None else ""
        cells += [element("td", escape(text), class_="bound") for text in (row.limit, margin)] + [element("td", meter)]
    return element("tr", *cells, class_="over" if row.over else None)


def _meter(row: KeyFigure) -> str:
    used = min(1.0, row.used or 0.0)
    said = f"{row.name}: {'beyond the limit' if row.over else f'{used:.0%} of the limit used'}"
    return element(
        "svg",
        element("title", escape(said)),
        element("rect", x=0, y=2, width=108, height=6, rx=3, class_="rail"),
        element("rect", x=0, y=2, width=108 * used, height=6, rx=3, class_="fill"),
        viewBox="0 0 108 10", class_="meter", role="img", aria_label=said,
    )  # fmt: skip


def _notes(notes: Iterable[str]) -> str:
    written = "".join(element("li", escape(note)) for note in notes)
    return card("Notes", None, element("ul", written)) if written else ""


def _settings(document: Document) -> str:
    groups = (("Settings", "settings"), ("Thresholds", "thresholds"), ("Versions", "tool"))
    shown = [
        element("div", element("h3", title), facts_list(facts(mapping(document, key))))
        for title, key in groups
        if mapping(document, key)
    ]
    if not shown:
        return ""
    return card("How this was measured", None, element("div", *shown, class_="columns"))
