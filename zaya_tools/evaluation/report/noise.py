"""What quantization did to the weights: signal to noise by kind of tensor and block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from zaya_tools.evaluation.report import svg
from zaya_tools.evaluation.report.document import TensorRow
from zaya_tools.evaluation.report.numbers import number

GOOD = 45.0
"""Decibels from which a cell is as calm as can be."""
POOR = 10.0
"""Decibels under which a tenth of the signal is noise: no scheme in use is that coarse, so a cell is crossed."""
_HEIGHT = 22.0
_SUMMARY = 150.0
_LABELS = 70.0


@dataclass(frozen=True)
class _Cell:
    rows: tuple[TensorRow, ...]

    @property
    def ratios(self) -> list[float]:
        return [row.sqnr for row in self.rows if not row.exact and row.sqnr is not None and not math.isnan(row.sqnr)]

    @property
    def exact(self) -> bool:
        return all(row.exact for row in self.rows)


def noise_plot(rows: Sequence[TensorRow], limit: float | None = None) -> str:
    """A row a kind of tensor, a column a block; cells under `limit` dB (else `POOR`) are crossed. Empty for no rows.

    Tensors outside the blocks share one more column at the right.
    """
    numbers = sorted({row.block for row in rows if row.block is not None})
    kinds = list(dict.fromkeys(row.kind for row in rows))
    if not rows:
        return ""
    least = POOR if limit is None else limit
    outside = any(row.block is None for row in rows)
    columns: list[int | None] = [*numbers, *([None] if outside else [])]
    span = svg.PLOT - _SUMMARY - (46 if outside else 0) - _LABELS
    bands = svg.Bands(numbers, svg.LEFT + _LABELS, span)
    top = 26.0
    drawn = []
    for place, kind in enumerate(kinds):
        y = top + place * _HEIGHT
        mine = [row for row in rows if row.kind == kind]
        drawn.append(svg.words(svg.LEFT + _LABELS - 10, y + 15, kind, "end"))
        for index, column in enumerate(columns):
            cell = _Cell(tuple(row for row in mine if row.block == column))
            x, width = (bands.start(index), bands.width) if column is not None else (bands.left + span + 8, 38.0)
            if cell.rows:
                drawn.append(_draw(cell, x, y, width, kind, column, least))
        drawn.append(svg.words(svg.LEFT + svg.PLOT, y + 15, _summary(_Cell(tuple(mine))), "end"))
    bottom = top + len(kinds) * _HEIGHT
    heads = [svg.words(svg.LEFT + svg.PLOT, 14, "lowest · median", "end", "axis")]
    heads += [svg.words(bands.left + span + 27, bottom + 18, "ends", "middle")] if outside else []
    label = (
        f"Signal to noise of {len(rows)} tensors by kind and block: {_summary(_Cell(tuple(rows)))} (lowest, median)."
    )
    axis = bands.axis(bottom) if numbers else ""
    return svg.picture(
        bottom + 70,
        label,
        *heads,
        *drawn,
        axis,
        _legend(bands.left, bottom + 40, least, any(row.exact for row in rows)),
        name="weights",
    )


def _draw(cell: _Cell, x: float, y: float, width: float, kind: str, block: int | None, least: float) -> str:
    where = "outside the blocks" if block is None else f"block {block}"
    gap = 1.0 if width < 30 else 2.0
    box = (x + gap / 2, y + gap / 2, width - gap, _HEIGHT - gap)
    middle = (x + width / 2, y + _HEIGHT / 2)
    tensors = f"{len(cell.rows)} tensor{'s' if len(cell.rows) != 1 else ''}"
    if cell.exact:
        return svg.rect(*box, "exact", f"{where}, {kind}: {tensors}, equal bit for bit")
    if not cell.ratios:
        return svg.rect(*box, "starved", f"{where}, {kind}: {tensors}, no ratio") + svg.cross(*middle, 4)
    low = min(cell.ratios)
    noise = 1 - min(1.0, max(0.0, low) / GOOD)
    said = f"{where}, {kind}: {tensors}, lowest {_decibels(low)}, median {_decibels(median(cell.ratios))}"
    drawn = svg.rect(*box, "warm", said, 0.06 + 0.94 * noise)
    if low < least:
        drawn += svg.cross(*middle, min(4.0, width / 4), "cross over")
    elif width >= 40:
        drawn += svg.words(middle[0], middle[1] + 4, number(low, 3, keep=True), "middle", svg.ink(noise))
    return drawn


def _summary(cell: _Cell) -> str:
    if cell.exact:
        return "bit for bit"
    return f"{_decibels(min(cell.ratios))} · {_decibels(median(cell.ratios))}" if cell.ratios else "no ratio"


def _decibels(value: float) -> str:
    return f"{number(value, 3, keep=value != round(value))} dB"


def _legend(left: float, y: float, least: float, exact: bool) -> str:
    steps, width = 24, 200.0
    ramp = [
        svg.rect(left + i * width / steps, y, width / steps + 0.3, 9, "warm", opacity=1 - 0.94 * (i + 0.5) / steps)
        for i in range(steps)
    ]
    x = left + width + 40
    key = [
        svg.rect(x, y - 3, 15, 15, "warm"),
        svg.cross(x + 7.5, y + 4.5, 4, "cross over"),
        svg.words(x + 22, y + 9, f"under {_decibels(least)}"),
    ]
    if exact:
        key += [svg.rect(x + 122, y - 3, 15, 15, "exact"), svg.words(x + 144, y + 9, "equal bit for bit")]
    ends = [svg.words(left, y + 23, "0 dB"), svg.words(left + width, y + 23, f"{GOOD:.0f} dB and up", "end")]
    return svg.words(left - 10, y + 9, "lowest ratio", "end", "axis") + "".join((*ramp, *ends, *key))
