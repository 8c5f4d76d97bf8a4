from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_tools.evaluation.report import numbers


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"), (0, "0"), (0.0, "0"), (12345, "12,345"), (-3.0, "−3"), (4.31724, "4.317"), (0.0012, "0.0012"),
        (1e-4, "0.0001"), (0.001 - 1e-18, "0.001"),
        (2.1e-5, "2.1 × 10⁻⁵"), (1.5e9, "1.5 × 10⁹"), (math.nan, "not a number"), (math.inf, "∞"), (-math.inf, "−∞"),
    ],
)  # fmt: skip
def test_number(value: float | None, said: str) -> None:
    assert numbers.number(value) == said


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "100 %"),
        (0.0, "0 %"),
        (0.9741, "97.41 %"),
        (0.99987, "99.987 %"),
        (0.5, "50 %"),
        (None, "–"),
        (0.95, "95 %"),
    ],
)
def test_percent(share: float | None, said: str) -> None:
    assert numbers.percent(share).replace("\u00a0", " ") == said


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (4.3172, 0.0611, "4.317 ± 0.061"), (1.00444, 0.00071, "1.00444 ± 0.00071"),
        (0.0074, 0.00011, "0.00740 ± 0.00011"),
        (3e-6, 2e-7, "3 × 10⁻⁶ ± 2 × 10⁻⁷"), (1.0, 0.0, "1"), (123.4, 5.6, "123.4 ± 5.6"), (1234.5, 56.0, "1,234 ± 56"),
    ],
)  # fmt: skip
def test_with_error(value: float, error: float, said: str) -> None:
    assert numbers.with_error(value, error) == said


def test_percent_with_error() -> None:
    assert numbers.percent_with_error(0.9741, 0.0012) == "97.41 ± 0.12\u00a0%"


def test_count_and_size() -> None:
    assert [numbers.count(n) for n in (512, 8840, 12_600, 4.19e6, 8.84e9)] == [
        "512", "8,840", "12.6 thousand", "4.19 million", "8.84 billion",
    ]  # fmt: skip
    assert [numbers.size(n) for n in (7, 1_204_336, 17.7e9, 151e9, 2e12)] == [
        "7 bytes", "1.2 MB", "17.7 GB", "151 GB", "2 TB",
    ]  # fmt: skip


@given(st.floats(), st.floats())
def test_any_number_can_be_said(value: float, error: float) -> None:
    for said in (
        numbers.number(value), numbers.percent(value), numbers.with_error(value, error),
        numbers.percent_with_error(value, error),
    ):  # fmt: skip
        assert said
        assert "nan" not in said
