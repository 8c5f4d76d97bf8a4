"""Numbers as people read them: few digits, units, error bars, powers of ten."""

from __future__ import annotations

import math

NONE = "–"
_PERCENT = "\u00a0%"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 4, keep: bool = False) -> str:
    """A number in `digits` digits, without zeros at the end unless `keep`, so that a column of figures lines up.

    Integers are whole, with separators; powers of ten stand where zeros would not be read.
    """
    if value is None:
        return NONE
    if isinstance(value, int):
        written = f"{value:,}"
    elif not math.isfinite(value):
        written = "not a number" if math.isnan(value) else "∞" if value > 0 else "-∞"
    elif value == 0:
        written = "0"
    elif 0.99995e-4 <= abs(value) < 1e7:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        written = _trim(f"{value:,.{places}f}", keep)
    else:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        written = f"{_trim(mantissa, keep)} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    return written.replace("-", "−")


def percent(share: float | None, digits: int = 3, keep: bool = False) -> str:
    """A share as a percentage; close to 100 % the digits are those of what is missing. `keep` as in `number`."""
    if share is None:
        return NONE
    if not math.isfinite(100 * share):
        return number(share)
    near = min(abs(share), abs(1 - share))
    if near == 0:
        return f"{share:.0%}".replace("%", _PERCENT)
    places = min(6, max(0, digits - 3 - math.floor(math.log10(near)))) if near < 1 else 0
    return _trim(f"{100 * share:.{places}f}", keep).replace("-", "−") + _PERCENT


def with_error(value: float | None, error: float | None, digits: int = 4) -> str:
    """A value and its standard error, both to the error's second digit."""
    if value is None or error is None or not math.isfinite(value) or not math.isfinite(error) or error <= 0:
        return number(value, digits)
    places = max(0, 1 - math.floor(math.log10(error)))
    if abs(value) >= 1e-3 and places <= 7:
        return f"{value:,.{places}f} ± {error:,.{places}f}".replace("-", "−")
    return f"{number(value, digits)} ± {number(error, 2)}"


def percent_with_error(share: float | None, error: float | None) -> str:
    """A share and its standard error as percentages."""
    if share is None or error is None or not math.isfinite(share + 100 * error) or error <= 0:
        return percent(share)
    places = min(6, max(0, 1 - math.floor(math.log10(100 * error))))
    return f"{100 * share:.{places}f} ± {100 * error:.{places}f}{_PERCENT}"


def count(value: float) -> str:
    """A large number as people say it: 8.84 billion."""
    for limit, unit in ((1e9, "billion"), (1e6, "million"), (1e4, "thousand")):
        if value >= limit:
            return f"{value / limit if limit > 1e4 else value / 1e3:.3g} {unit}"
    return f"{value:,.0f}"


def size(nbytes: float) -> str:
    """Decimal bytes in three digits: 17.7 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _trim(digits: str, keep: bool) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits and not keep else digits
