"""Markup and the geometry of plots: escaping, elements, scales, ticks, axes. Colours are classes of the style sheet."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

WIDTH = 960
LEFT = 118
RIGHT = 22
PLOT = WIDTH - LEFT - RIGHT

# Characters that a page may not hold, or that would reorder or hide what stands around them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def clean(text: object) -> str:
    """Text with control characters made visible, so that it can stand in any document."""
    return _CONTROL.sub(_visible, str(text))


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    return chr(0x2400 + code) if code < 0x20 else "\ufffd"


def escape(text: object) -> str:
    """Text as it may stand in markup and in quoted attributes."""
    return html.escape(clean(text), quote=True)


def element(name: str, *inner: str, **attributes: object) -> str:
    """An element around markup; attribute `class_` is class, `stroke_width` is stroke-width; None leaves one out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(inner)}</{name}>"


def _plain(value: object) -> object:
    """Coordinates to a tenth of a pixel: no more is seen, and a page stays small."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def words(x: float, y: float, text: object, anchor: str = "start", class_: str = "tick") -> str:
    """A line of text."""
    return element("text", escape(text), x=float(x), y=float(y), text_anchor=anchor, class_=class_)


def ink(opacity: float, deep: float = 2.0) -> str:
    """The class of text on a shade, legible in light and dark; shades beyond `deep` are dark in light."""
    return "off" if opacity < 0.55 else "mid" if opacity < deep else "on"


def tip(text: object) -> str:
    """What a pointer sees."""
    return element("title", escape(text))


def rect(
    x: float, y: float, width: float, height: float, class_: str, tooltip: str | None = None,
    opacity: float | None = None,
) -> str:  # fmt: skip
    """A rectangle; `opacity` is that of its fill, by which shades are made."""
    return element(
        "rect", tip(tooltip) if tooltip else "", x=float(x), y=float(y), width=float(width), height=float(height),
        class_=class_, fill_opacity=None if opacity is None else f"{opacity:.2f}",
    )  # fmt: skip


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str, close: bool = False) -> str:
    """A line through points."""
    steps = " ".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points))
    return element("path", d=steps + (" Z" if close else ""), class_=class_)


def cross(x: float, y: float, reach: float, class_: str = "cross") -> str:
    """A small cross: what must be seen without colours too."""
    span = f"{2 * reach:.1f}"
    steps = f"M{x - reach:.1f} {y - reach:.1f}l{span} {span}m0 -{span}l-{span} {span}"
    return element("path", d=steps, class_=class_)


def picture(height: float, label: str, *inner: str, name: str) -> str:
    """A plot `WIDTH` wide that scales with the page; `label` says in words what it shows."""
    return element(
        "svg", *inner, viewBox=f"0 0 {WIDTH} {math.ceil(height)}", role="img", aria_label=label, class_="plot",
        data_plot=name,
    )  # fmt: skip


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        high = low + 1
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Bands:
    """Blocks side by side across a plot; `width` is a block's."""

    numbers: Sequence[int]
    left: float = LEFT
    span: float = PLOT

    @property
    def width(self) -> float:
        """Width of one block."""
        return self.span / max(1, len(self.numbers))

    def start(self, index: int) -> float:
        """Left edge of the block at `index`."""
        return self.left + index * self.width

    def middle(self, index: int) -> float:
        """Middle of the block at `index`."""
        return self.start(index) + self.width / 2

    def axis(self, y: float, title: str | None = "block") -> str:
        """The blocks' numbers under a plot whose lower edge is at `y`; as many as there is room for."""
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if n * self.width >= 24 or n == 1000)
        shown = [
            words(self.middle(index), y + 18, number, "middle")
            for index, number in enumerate(self.numbers)
            if number % every == 0
        ]
        return "".join(shown) + (words(self.left - 10, y + 18, title, "end", "axis") if title else "")


def value_axis(ticks: Sequence[float], place: Callable[[float], float], show: Callable[[float], str]) -> str:
    """Horizontal grid lines with their values at the left."""
    return "".join(
        line(LEFT, place(tick), LEFT + PLOT, place(tick), "grid") + words(LEFT - 10, place(tick) + 4, show(tick), "end")
        for tick in ticks
    )
