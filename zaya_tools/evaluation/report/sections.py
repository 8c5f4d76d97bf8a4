"""The page's sections, one a check; likelihood has two. A check that did not run says so."""

from __future__ import annotations

from collections.abc import Sequence

from zaya_tools.evaluation.report.by_block import agreement_plot, coverage_plot, error_plot
from zaya_tools.evaluation.report.document import (
    BlockRow,
    Document,
    blocks,
    equal,
    facts,
    figures,
    items,
    least_sqnr,
    mapping,
    passed,
    tensors,
    whole,
    worst,
)
from zaya_tools.evaluation.report.histogram import kl_plot
from zaya_tools.evaluation.report.markup import card, facts_list, figure, row, table
from zaya_tools.evaluation.report.noise import noise_plot
from zaya_tools.evaluation.report.numbers import number, percent
from zaya_tools.evaluation.report.samples import Sample, prompts, shared
from zaya_tools.evaluation.report.svg import element, escape

WORST = 12
_STARVED = 24


def by_block(document: Document) -> str:
    """Hidden-state error, router agreement and expert coverage of every block."""
    title, rows = "Block by block", blocks(document)
    if not rows:
        return _absent(title, document, "likelihood")
    plots = [
        figure(
            error_plot(rows), "Hidden-state error",
            "Relative Frobenius distance to the reference's hidden states after each block.",
        ),
        figure(
            agreement_plot(rows), "Router agreement",
            "Share of tokens sent to the reference's expert; what is missing hangs from 100 %.",
        ),
        figure(
            coverage_plot(rows), "Expert coverage",
            "Share of tokens that each expert took; calibration on such text sees no more of an expert than this.",
        ),
    ]  # fmt: skip
    return card(title, None, _alone(document), *plots, _starved(rows), _block_table(rows))


def _alone(document: Document) -> str:
    said = "Without a reference there is no error and no agreement to show."
    return "" if mapping(document, "reference") else element("p", said, class_="soft")


def _starved(rows: Sequence[BlockRow]) -> str:
    empty = [(block.block, expert) for block in rows for expert in block.starved]
    if not empty:
        return element("p", "Every expert of every block took part.", class_="soft")
    total = sum(len(block.experts) for block in rows)
    listed: dict[int, list[str]] = {}
    for block, expert in empty[:_STARVED]:
        listed.setdefault(block, []).append(str(expert))
    named = "; ".join(f"{', '.join(experts)} in block {block}" for block, experts in listed.items())
    more = f"; and {len(empty) - _STARVED:,} more" if len(empty) > _STARVED else ""
    return element("p", element("b", f"Never chosen, {len(empty):,} of {total:,} experts:"), escape(f" {named}{more}."))


def block_cells(block: BlockRow) -> list[str]:
    """One block's numbers: error, agreement, least and most used expert, experts never chosen, skipped."""
    low, high = (min(block.experts), max(block.experts)) if block.experts else (0, 0)
    tokens = block.tokens or 1
    return [
        str(block.block), number(block.error, keep=True), percent(block.agreement, keep=True),
        percent(low / tokens, keep=True), percent(high / tokens, keep=True),
        str(len(block.starved)), percent(block.skipped / tokens, keep=True),
    ]  # fmt: skip


BLOCK_HEADS = ("block", "hidden error", "router agreement", "least used expert", "most used", "never chosen", "skipped")


def _block_table(rows: Sequence[BlockRow]) -> str:
    every = range(len(BLOCK_HEADS))
    body = "".join(row(block_cells(block), every) for block in rows)
    return element("details", element("summary", "The same as a table"), table(BLOCK_HEADS, body, every))


def divergence(document: Document) -> str:
    """How the model's distributions differ from the reference's, token by token."""
    title, found = "Divergence", figures(document, "likelihood")
    if not found:
        return _absent(title, document, "likelihood")
    plot = kl_plot(found)
    if not plot:
        return card(title, None, element("p", "not run: it takes a reference", class_="soft"))
    caption = "KL(reference ‖ model) of each token's distribution; percentiles say what share of tokens lies below."
    return card(title, None, figure(plot, "KL divergence of the tokens", caption))


def weights(document: Document) -> str:
    """What was stored against what the reference holds."""
    title, found = "Weights", figures(document, "weights")
    if not found:
        return _absent(title, document, "weights")
    rows = tensors(document)
    changed = worst(rows, WORST)
    if not changed:
        return card(title, bit_for_bit(document), _others(found))
    cells = [
        [entry.label, entry.role, number(entry.error, keep=True), number(entry.sqnr, 3, keep=True)] for entry in changed
    ]
    body = "".join(row(line, (2, 3), 0) for line in cells)
    plot = noise_plot(rows, least_sqnr(document))
    caption = "The lowest ratio in each block, in decibels: 20 dB is a tenth of relative error, 40 dB a hundredth."
    return card(
        title, bit_for_bit(document), figure(plot, "Signal to quantization noise", caption),
        element("h3", "Furthest from the reference"),
        table(("tensor", "role", "relative error", "SQNR, dB"), body, (2, 3)), _others(found),
    )  # fmt: skip


def bit_for_bit(document: Document) -> str:
    """How many of the compared tensors are the reference's."""
    same, compared = equal(document)
    wider = whole(figures(document, "weights").get("widened")) or 0
    if not compared:
        return "Nothing was compared."
    said = f"{same:,} of {compared:,} tensors are" if same < compared else f"All {compared:,} tensors are"
    more = f"; {wider:,} hold its numbers in a wider dtype" if wider else ""
    return f"{said} the reference's, bit for bit{more}."


def generation(document: Document) -> str:
    """Greedy continuations beside the reference's."""
    title, found = "Generation", figures(document, "generation")
    samples = prompts(document)
    # The rest is among the key figures, with limits.
    rest = "" if samples else facts_list(facts(found))
    if not samples:
        return card(title, None, rest) if found else _absent(title, document, "generation")
    lead = "Greedy continuations; what no longer agrees with the reference is marked."
    compared = any(sample.reference is not None for sample in samples)
    return card(title, lead if compared else "Greedy continuations.", *map(_sample, samples), rest)


def _sample(sample: Sample) -> str:
    agreement = "" if sample.agreement is None else f"{percent(sample.agreement)} of it shared"
    common = len(sample.text) if sample.reference is None else shared(sample.text, sample.reference)
    given = element("div", element("span", escape(sample.prompt), class_="given"), class_="text")
    made = [_text("model", agreement, sample.text, common)]
    if sample.reference is not None:
        made.append(_text("reference", "", sample.reference, common))
    kind = "pair" if len(made) == 2 else "pair single"
    prompt = element("div", element("div", "prompt", class_="label"), given)
    return element("div", prompt, element("div", *made, class_=kind), class_="sample")


def _text(who: str, note: str, text: str, common: int) -> str:
    other = element("mark", escape(text[common:])) if text[common:] else ""
    label = element("div", element("span", who), element("span", escape(note)), class_="label")
    # An empty box would look like a fault of the page.
    blank = "nothing" if not text else f"{len(text)} characters of white space" if text.isspace() else ""
    said = element("i", blank) if blank else escape(text[:common]) + other
    return element("div", label, element("div", said, class_="text"))


def structure(document: Document) -> str:
    """What the headers say."""
    found = figures(document, "structure")
    if not found:
        return _absent("Structure", document, "structure")
    return card("Structure", None, facts_list(facts(found)))


def _others(found: Document) -> str:
    # Those are in the plot and the table above.
    rest = {k: v for k, v in found.items() if not str(k).startswith("by_") and not (k == "tensors" and items(v))}
    return element("h3", "More") + facts_list(facts(rest)) if rest else ""


def _absent(title: str, document: Document, check: str) -> str:
    ran = passed(document, check) is not None
    return card(title, None, element("p", "no figures" if ran else "not run", class_="soft"))
