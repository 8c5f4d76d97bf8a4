"""What the model does block by block, above one another on one axis: error, router agreement, coverage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zaya_tools.evaluation.report import svg
from zaya_tools.evaluation.report.document import BlockRow
from zaya_tools.evaluation.report.numbers import number, percent

_THIN = 0.1
"""An expert with less than this part of an equal share is marked: too little for calibration to see it."""
_LOST = 0.2
"""Share of tokens routed otherwise from which router agreement is drawn in full colour."""
_BAR = 64.0


def error_plot(rows: Sequence[BlockRow]) -> str:
    """Relative error of the hidden states after each block; empty without a reference."""
    known = [(index, row.error) for index, row in enumerate(rows) if _finite(row.error)]
    values = [float(error) for _, error in known if error is not None]
    if not values:
        return ""
    top, bottom = 14.0, 164.0
    ticks = svg.nice_ticks(0, max(values) or 1e-3)
    bands = svg.Bands([row.block for row in rows])

    def place(value: float) -> float:
        return bottom - (bottom - top) * value / ticks[-1]

    points = [(bands.middle(index), place(value)) for (index, _), value in zip(known, values, strict=True)]
    area = [(points[0][0], bottom), *points, (points[-1][0], bottom)]
    marks = [svg.element("circle", cx=x, cy=y, r=3.0, class_="dot") for x, y in points] if len(points) <= 48 else []
    hits = [
        svg.rect(bands.start(i), top, bands.width, bottom - top, "hit", f"block {row.block}: error {number(row.error)}")
        for i, row in enumerate(rows)
    ]
    label = f"Hidden-state error by block: {number(values[0])} after the first, {number(values[-1])} after the last."
    return svg.picture(
        bottom + 28, label, svg.value_axis(ticks, place, lambda v: number(v, 3)), svg.path(area, "area", close=True),
        svg.path(points, "curve"), *marks, *hits, bands.axis(bottom), name="hidden-error",
    )  # fmt: skip


def agreement_plot(rows: Sequence[BlockRow]) -> str:
    """Share of tokens routed as the reference does: what is missing hangs from 100 %; empty without a reference."""
    values = [float(row.agreement) for row in rows if row.agreement is not None and math.isfinite(row.agreement)]
    if not values:
        return ""
    top, bottom = 14.0, 114.0
    ticks = svg.nice_ticks(0, min(1.0, max(1 - min(values), 0.001)), 4)
    bands = svg.Bands([row.block for row in rows])

    def place(missing: float) -> float:
        return top + (bottom - top) * missing / ticks[-1]

    gap = min(6.0, 0.15 * bands.width)
    drawn = []
    for index, row in enumerate(rows):
        missing = 1 - row.agreement if _finite(row.agreement) and row.agreement is not None else None
        said = f"block {row.block}: {percent(row.agreement)} of tokens routed alike"
        width = bands.width - gap
        x, bar = bands.start(index) + gap / 2, min(width, _BAR)
        if missing is not None:
            # The shade is absolute: a router that is 1 % off must not look like one that is lost.
            shade = min(1.0, missing / _LOST)
            drawn.append(svg.rect(x, top, width, bottom - top, "warm", opacity=0.03 + 0.3 * shade))
            drawn.append(
                svg.rect(
                    bands.middle(index) - bar / 2, top, bar, place(missing) - top, "warm", opacity=0.45 + 0.55 * shade
                )
            )
        drawn.append(svg.rect(bands.start(index), top, bands.width, bottom - top, "hit", said))
    label = f"Router agreement by block: from {percent(min(values))} to {percent(max(values))} of tokens."
    return svg.picture(
        bottom + 28, label, svg.value_axis(ticks, place, lambda v: percent(1 - v)), *drawn,
        svg.line(svg.LEFT, top, svg.LEFT + svg.PLOT, top, "base"), bands.axis(bottom), name="router-agreement",
    )  # fmt: skip


def coverage_plot(rows: Sequence[BlockRow]) -> str:
    """Share of the tokens that each expert of each block took, and that skipped; experts without any are crossed."""
    experts = max((len(row.experts) for row in rows), default=0)
    if not experts:
        return ""
    bands = svg.Bands([row.block for row in rows])
    height = min(26.0, max(11.0, 340.0 / experts))
    top, skip = 8.0, 8.0 + experts * height + 6
    bottom = skip + height
    most = max(max((*row.experts, row.skipped)) / row.tokens if row.tokens else 0.0 for row in rows) or 1.0
    drawn = []
    for index, row in enumerate(rows):
        for expert, tokens in enumerate(row.experts):
            box = (bands.start(index), top + expert * height, bands.width, height)
            drawn.append(_cell(box, row, f"expert {expert}", tokens, most, experts))
        drawn.append(_cell((bands.start(index), skip, bands.width, height), row, "skip", row.skipped, most, 0))
    every = next(n for n in (1, 2, 4, 8, 16) if n * height >= 15 or n == 16)
    names = [
        svg.words(
            svg.LEFT - 10, top + (expert + 0.5) * height + 4, f"expert {expert}" if expert == 0 else expert, "end"
        )
        for expert in range(0, experts, every)
    ]
    names.append(svg.words(svg.LEFT - 10, skip + height / 2 + 4, "skip", "end"))
    starved = sum(len(row.starved) for row in rows)
    label = (
        f"Expert coverage: share of tokens by block and expert, {len(rows)} blocks of {experts} experts; "
        f"{starved} experts took no token."
    )
    return svg.picture(
        bottom + 82, label, *drawn, *names, bands.axis(bottom), _legend(bottom + 50, most, 1 / experts),
        name="coverage",
    )  # fmt: skip


def _cell(
    box: tuple[float, float, float, float], row: BlockRow, name: str, tokens: int, most: float, experts: int
) -> str:
    x, y, width, height = box
    gap = 1.0 if width < 30 else 2.0
    inner = (x + gap / 2, y + gap / 2, width - gap, height - gap)
    share = tokens / row.tokens if row.tokens else 0.0
    said = f"block {row.block}, {name}: {tokens:,} tokens ({percent(share)})"
    if not tokens and experts:
        reach = min(4.0, height / 4, width / 4)
        return svg.rect(*inner, "starved", f"{said}, never chosen") + svg.cross(x + width / 2, y + height / 2, reach)
    shade = _shade(share, most)
    thin = bool(experts) and share < _THIN / experts
    cell = svg.rect(*inner, "cool" if tokens else "empty", said + (", hardly chosen" if thin else ""), shade)
    middle = (x + width / 2, y + height / 2)
    if width >= 46 and height >= 17 and tokens:
        return cell + svg.words(middle[0], middle[1] + 4, percent(share, 2), "middle", svg.ink(shade, 0.78))
    return cell + (svg.element("circle", cx=middle[0], cy=middle[1], r=1.8, class_="thin") if thin else "")


def _shade(share: float, most: float) -> float:
    """Opacity of a share: its square root, so that small shares still differ from one another."""
    return 0.06 + 0.94 * math.sqrt(share / most) if share > 0 else 0.0


def _legend(y: float, most: float, equal: float) -> str:
    steps, width = 24, 240.0
    ramp = [
        svg.rect(
            svg.LEFT + i * width / steps, y, width / steps + 0.3, 9, "cool", opacity=0.06 + 0.94 * (i + 0.5) / steps
        )
        for i in range(steps)
    ]
    marks = [svg.words(svg.LEFT, y + 22, "0 %"), svg.words(svg.LEFT + width, y + 22, percent(most, 2), "end")]
    if equal < most:
        x = svg.LEFT + width * math.sqrt(equal / most)
        marks += [svg.line(x, y - 3, x, y + 11, "base"), svg.words(x, y - 7, f"equal {percent(equal, 2)}", "middle")]
    x = svg.LEFT + width + 36
    key = [
        svg.rect(x, y - 3, 15, 15, "starved"), svg.cross(x + 7.5, y + 4.5, 3.5),
        svg.words(x + 22, y + 9, "never chosen"),
        svg.rect(x + 118, y - 3, 15, 15, "cool", opacity=0.1),
        svg.element("circle", cx=x + 125.5, cy=y + 4.5, r=1.8, class_="thin"),
        svg.words(x + 140, y + 9, "under a tenth of an equal share"),
    ]  # fmt: skip
    return svg.words(svg.LEFT - 10, y + 9, "share of tokens", "end", "axis") + "".join((*ramp, *marks, *key))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
