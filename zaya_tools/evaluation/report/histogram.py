"""How KL divergence is spread over the tokens: counts on a logarithmic axis, with mean and percentiles above."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zaya_tools.evaluation.report import svg
from zaya_tools.evaluation.report.document import Document, estimate, items, mapping, real, whole
from zaya_tools.evaluation.report.numbers import number, percent

_HEIGHT = 190.0
_BELOW = 46.0
"""Width of the bar of everything under the first edge, and the gap after it."""
_GAP = 12.0
_ROW = 17
_LETTER = 6.8


class _Axis:
    """Places of KL values: the first bin, which begins at 0, stands apart at the left."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.first, self.last = edges[1], edges[-1]
        self.left = svg.LEFT + _BELOW + _GAP
        self.scale = (svg.LEFT + svg.PLOT - self.left) / math.log10(self.last / self.first)

    def place(self, value: float) -> float:
        if value < self.first:
            return svg.LEFT + _BELOW / 2
        return self.left + self.scale * math.log10(min(value, self.last) / self.first)


def kl_plot(found: Document) -> str:
    """The histogram of the likelihood figures; empty where there is none."""
    histogram = mapping(found, "kl_histogram")
    edges = [float(real(edge) or 0) for edge in items(histogram.get("edges"))]
    counts = [whole(n) or 0 for n in items(histogram.get("counts"))]
    if len(edges) < 3 or len(counts) != len(edges) - 1 or not sum(counts) or not 0 < edges[1] < edges[-1]:
        return ""
    axis = _Axis(edges)
    markers = _markers(mapping(found, "kl"), axis)
    top = 22.0 + _ROW * (1 + max((row for _, row, _, _ in markers), default=-1))
    bottom = top + _HEIGHT
    ticks = svg.nice_ticks(0, max(*counts, 4), 5)
    unit = _HEIGHT / ticks[-1]
    bars = [_bar(axis, edges[i : i + 2], count, sum(counts), bottom, unit) for i, count in enumerate(counts) if count]
    lines = [
        svg.line(x, 8 + _ROW * row, x, bottom, f"marker {kind}") + _name(x, 16 + _ROW * row, text, kind)
        for x, row, text, kind in markers
    ]
    label = f"Histogram of KL divergence over {sum(counts):,} tokens, on a logarithmic axis from {edges[1]:g} nats."
    return svg.picture(
        bottom + 44, label, svg.value_axis(ticks, lambda tick: bottom - tick * unit, lambda tick: f"{tick:,.0f}"),
        *bars, _decades(axis, bottom), *lines, svg.words(svg.LEFT - 10, 16, "tokens", "end", "axis"),
        svg.words(svg.LEFT + svg.PLOT, bottom + 37, "nats a token", "end", "axis"), name="kl-histogram",
    )  # fmt: skip


def _bar(axis: _Axis, edges: Sequence[float], count: int, total: int, bottom: float, unit: float) -> str:
    low, high = edges
    below, last = low < axis.first, high >= axis.last
    x, width = (svg.LEFT, _BELOW) if below else (axis.place(low), axis.place(high) - axis.place(low))
    # One token among a million is a pixel high still: the tail is what a reader looks for.
    height = max(1.5, count * unit)
    said = f"below {number(high, 2)}" if below else f"{number(low, 2)} to {number(high, 2)}{' or more' if last else ''}"
    tokens = f"{count:,} token{'s' if count != 1 else ''} ({percent(count / total)})"
    return svg.rect(x + 0.5, bottom - height, width - 1, height, "cool", f"{said} nats: {tokens}")


def _decades(axis: _Axis, bottom: float) -> str:
    first, last = round(math.log10(axis.first)), math.floor(math.log10(axis.last) + 1e-9)
    drawn = [svg.words(svg.LEFT + _BELOW / 2, bottom + 18, f"< {_power(axis.first)}", "middle")]
    for power in range(first, last + 1):
        x = axis.place(10.0**power)
        if power > first:
            drawn.append(svg.words(x, bottom + 18, _power(10.0**power), "middle" if power < last else "end"))
        drawn.append(svg.line(x, bottom, x, bottom + 5, "base"))
    drawn.append(svg.line(svg.LEFT, bottom, svg.LEFT + _BELOW, bottom, "base"))
    drawn.append(svg.line(axis.left, bottom, svg.LEFT + svg.PLOT, bottom, "base"))
    return "".join(drawn)


def _power(value: float) -> str:
    return number(value).removeprefix("1 × ")


def _name(x: float, y: float, text: str, kind: str) -> str:
    if x + 10 + _LETTER * len(text) > svg.WIDTH:
        return svg.words(x - 4, y, text, "end", f"tick {kind}")
    return svg.words(x + 4, y, text, class_=f"tick {kind}")


def _markers(kl: Document, axis: _Axis) -> list[tuple[float, int, str, str]]:
    """(x, row of its label, label, class) of percentiles, mean and maximum; labels that would touch take other rows."""
    known = [(real(value), "median" if name == "50" else f"{name} %") for name, value in _percentiles(kl)]
    known += [(estimate(kl.get("mean"))[0], "mean"), (real(kl.get("max")), "max")]
    named: dict[float, list[str]] = {}
    for value, text in known:
        if value is not None and not math.isnan(value):
            named.setdefault(round(min(axis.place(value), svg.LEFT + svg.PLOT - 1.0), 1), []).append(text)
    ends: list[float] = []
    placed = []
    # From the right: a label reaches to the right of its line, and must not be cut by the next line.
    for x, texts in sorted(named.items(), reverse=True):
        text = texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
        need = x + 10 + _LETTER * len(text)
        row = next((row for row, start in enumerate(ends) if need <= start), len(ends))
        ends[row : row + 1] = [x]
        placed.append((x, row, text, "mean" if texts == ["mean"] else ""))
    return placed


def _percentiles(kl: Document) -> list[tuple[str, object]]:
    return [(str(name), value) for name, value in mapping(kl, "percentiles").items()]
