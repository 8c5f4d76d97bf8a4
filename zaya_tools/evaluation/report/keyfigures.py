"""The figures that decide, each with its limit and how much of it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zaya_tools.evaluation.report.document import (
    Document,
    blocks,
    equal,
    estimate,
    figures,
    least_sqnr,
    mapping,
    real,
    tensors,
    whole,
    worst,
)
from zaya_tools.evaluation.report.numbers import (
    number,
    percent,
    percent_with_error,
    with_error,
)


@dataclass(frozen=True)
class KeyFigure:
    """One row of the table. `used` is the share of the limit that is used, above 1 where it is passed.

    All three are empty where there is no limit.
    """

    name: str
    value: str
    unit: str
    limit: str = ""
    margin: str = ""
    used: float | None = None

    @property
    def over(self) -> bool:
        """Whether the value is beyond its limit; a value that is not a number is."""
        return self.used is not None and not self.used <= 1


def key_figures(document: Document) -> list[KeyFigure]:
    """Every key figure that was measured, in the order of the checks; limits are those of `thresholds`."""
    limits = {str(key): real(value) for key, value in mapping(document, "thresholds").items()}
    return [*_likelihood(document, limits), *_weights(document), *_generation(document)]


Limits = dict[str, float | None]


def _limited(
    row: KeyFigure, value: float, ideal: float, limits: Limits, name: str, show: Callable[[float], str]
) -> KeyFigure:
    """The row with the limit of that name, where it is set; `ideal` is the value of a perfect copy."""
    limit = limits.get(name)
    least = name.startswith("min")
    # At least 0 is how a limit is switched off.
    if limit is None or (least and limit == 0):
        return row
    room = value - limit if least else limit - value
    span = abs(limit - ideal)
    if math.isnan(room):
        margin, used = "", math.inf
    else:
        margin, used = _margin(room, show), 1 - room / span if span else (1.0 if room >= 0 else math.inf)
    bound = f"{'at least' if least else 'at most'} {show(limit)}"
    return replace(row, limit=bound, margin=margin, used=max(0.0, used))


def _margin(room: float, show: Callable[[float], str]) -> str:
    # A difference of shares is in points: 2 % of 95 % would be something else.
    points = number(100 * abs(room), 3)
    said = f"{points} point{'s' if points != '1' else ''}" if show is percent else show(abs(room))
    return f"{said} {'left' if room >= 0 else 'beyond'}"


def _likelihood(document: Document, limits: Limits) -> Iterator[KeyFigure]:
    found = figures(document, "likelihood")
    for key, name in (("perplexity", "Perplexity"), ("reference_perplexity", "Perplexity of the reference")):
        value, error = estimate(found.get(key))
        if value is not None:
            yield KeyFigure(name, with_error(value, error, 5), "a token")
    value, error = estimate(found.get("perplexity_ratio"))
    if value is not None:
        row = KeyFigure("Perplexity, model ÷ reference", with_error(value, error, 6), "paired")
        yield _limited(row, value, 1, limits, "max_perplexity_ratio", number)
    yield from _divergence(mapping(found, "kl"), limits)
    value, error = estimate(found.get("same_top_token"))
    if value is not None:
        row = KeyFigure("Same top token", percent_with_error(value, error), "of tokens")
        yield _limited(row, value, 1, limits, "min_top1", percent)
    yield from _blocks(document, limits)


def _divergence(kl: Document, limits: Limits) -> Iterator[KeyFigure]:
    value, error = estimate(kl.get("mean"))
    if value is not None:
        row = KeyFigure("KL, mean", with_error(value, error), "nats a token")
        yield _limited(row, value, 0, limits, "max_kl", number)
    for p, quantile in mapping(kl, "percentiles").items():
        name = "KL, median" if str(p) == "50" else f"KL, {p} % are below"
        yield KeyFigure(name, number(real(quantile)), "nats")
    if real(kl.get("max")) is not None:
        yield KeyFigure("KL, largest", number(real(kl.get("max"))), "nats")


def _blocks(document: Document, limits: Limits) -> Iterator[KeyFigure]:
    rows = blocks(document)
    errors = [(row.error, row.block) for row in rows if row.error is not None]
    if errors:
        # What is not a number is worse than any.
        error, block = max(errors, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
        yield KeyFigure("Hidden-state error, largest", number(error), f"relative, block {block}")
    agreements = [(row.agreement, row.block) for row in rows if row.agreement is not None]
    if agreements:
        agreement, block = min(agreements, key=lambda pair: -math.inf if math.isnan(pair[0]) else pair[0])
        row = KeyFigure("Router agreement, lowest", percent(agreement), f"of tokens, block {block}")
        yield _limited(row, agreement, 1, limits, "min_router_agreement", percent)
    used = [(min(row.experts), row.block) for row in rows if row.experts]
    if used:
        tokens, block = min(used)
        yield KeyFigure("Tokens of the least used expert", number(tokens), f"block {block}")


def _weights(document: Document) -> Iterator[KeyFigure]:
    furthest = worst(tensors(document), 1)
    same, compared = equal(document)
    wider = whole(figures(document, "weights").get("widened"))
    if compared:
        unit = f"compared, {wider:,} widened" if wider else "compared"
        yield KeyFigure("Tensors equal bit for bit", f"{same:,} of {compared:,}", unit)
    for row in furthest:
        yield KeyFigure("Weights, largest relative error", number(row.error), "of one tensor")
        if row.sqnr is not None:
            figure = KeyFigure("Weights, lowest SQNR", number(row.sqnr, 3, keep=True), "dB, of one tensor")
            yield _decibels(figure, row.sqnr, least_sqnr(document))


def _decibels(row: KeyFigure, value: float, least: float | None) -> KeyFigure:
    """The row with the scheme's limit; nothing is perfect in decibels, so the limit's share of the value is used."""
    if least is None:
        return row
    room = value - least
    used = least / value if value > 0 else math.inf
    return replace(row, limit=f"at least {number(least, 3)} dB", margin=_margin(room, _in_decibels), used=used)


def _in_decibels(value: float) -> str:
    return f"{number(value, 3)} dB"


def _generation(document: Document) -> Iterator[KeyFigure]:
    found = figures(document, "generation")
    names = {
        "agreement": ("Continuation as the reference's", "before they differ", percent),
        "largest_gap": ("Decoding against one pass", "logits, largest gap", number),
        "entropy": ("Entropy while generating", "nats", number),
        "repetition": ("Repetition while generating", "of 4-token runs", percent),
    }
    for key, (name, unit, show) in names.items():
        value, other = real(found.get(key)), real(found.get(f"reference_{key}"))
        if value is not None:
            yield KeyFigure(name, show(value), unit if other is None else f"{unit}, reference {show(other)}")
