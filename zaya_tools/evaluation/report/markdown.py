"""The report as Markdown, for a model card or a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from zaya_tools.evaluation.report.document import (
    CHECKS,
    Document,
    blocks,
    facts,
    figures,
    lines,
    mapping,
    passed,
    subject,
    tensors,
    worst,
)
from zaya_tools.evaluation.report.keyfigures import key_figures
from zaya_tools.evaluation.report.numbers import number
from zaya_tools.evaluation.report.samples import Sample, prompts
from zaya_tools.evaluation.report.sections import BLOCK_HEADS, WORST, bit_for_bit, block_cells
from zaya_tools.evaluation.report.svg import clean

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~&$@])")
_SAID = {True: "passed", False: "**failed**", None: "not run"}


def text(document: Document) -> str:
    """The whole report."""
    return "\n\n".join(part for part in _parts(document) if part) + "\n"


def plain(value: object) -> str:
    """Text in one line that Markdown shows as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(clean(value).split()))


def _parts(document: Document) -> Iterator[str]:
    model, reference = mapping(document, "model"), mapping(document, "reference")
    verdict = plain(document.get("verdict") or "no verdict")
    yield f"# {verdict}: {plain(model.get('name') or 'a checkpoint')}"
    yield _bullets(lines(document, "reasons"))
    yield plain(" · ".join(subject(model)))
    if reference:
        yield plain(f"against {reference.get('name') or 'a reference'}: {' · '.join(subject(reference))}")
    yield _table(("check", "result"), [[check, _SAID[passed(document, check)]] for check in CHECKS], raw=(1,))
    if lines(document, "warnings"):
        yield f"## Warnings\n\n{_bullets(lines(document, 'warnings'))}"
    yield _key_figures(document)
    rows = blocks(document)
    yield _section("Block by block", _table(BLOCK_HEADS, [block_cells(row) for row in rows], right=range(7)))
    yield _section("Weights", _weights(document))
    yield _section("Generation", "\n\n".join(_sample(i, s) for i, s in enumerate(prompts(document), 1)))
    yield _section("Structure", _facts(figures(document, "structure")))
    if lines(document, "notes"):
        yield f"## Notes\n\n{_bullets(lines(document, 'notes'))}"
    for title, key in (("Settings", "settings"), ("Thresholds", "thresholds"), ("Versions", "tool")):
        if mapping(document, key):
            yield _section(title, _facts(mapping(document, key)))


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body or 'not run'}"


def _key_figures(document: Document) -> str:
    rows = [[row.name, row.value, row.unit, row.limit, row.margin] for row in key_figures(document)]
    return _section("Key figures", _table(("figure", "value", "unit", "limit", "margin"), rows, right=(1,)))


def _weights(document: Document) -> str:
    found = figures(document, "weights")
    if not found:
        return ""
    said = bit_for_bit(document)
    cells = [
        [row.label, row.role, number(row.error, keep=True), number(row.sqnr, 3, keep=True)]
        for row in worst(tensors(document), WORST)
    ]
    named = _table(("tensor", "role", "relative error", "SQNR, dB"), cells, right=(2, 3))
    return f"{said} Furthest from the reference:\n\n{named}" if named else said


def _facts(found: Document) -> str:
    return _table(("", ""), [list(fact) for fact in facts(found)])


def _bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {plain(sentence)}" for sentence in sentences)


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), raw: Sequence[int] = ()
) -> str:
    """A table; empty for no rows. The columns in `raw` are Markdown already."""
    if not rows:
        return ""
    rule = ["---:" if column in right else "---" for column in range(len(heads))]
    body = [[cell if column in raw else plain(cell) for column, cell in enumerate(row)] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (list(heads), rule, *body))


def _sample(index: int, sample: Sample) -> str:
    shown = [("Prompt", sample.prompt), ("Model", sample.text)]
    if sample.reference is not None:
        shown.append(("Reference", sample.reference))
    return f"### {index}\n\n" + "\n\n".join(f"{who}:\n\n{_fenced(said)}" for who, said in shown)


def _fenced(said: str) -> str:
    longest = max((len(run) for run in re.findall("`+", said)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{clean(said)}\n{fence}"
