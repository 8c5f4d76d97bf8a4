from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_tools.evaluation.report import svg


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_are_round_cover_the_range_and_are_few(low: float, span: float, most: int) -> None:
    high = low + span
    ticks = svg.nice_ticks(low, high, most)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + step * 1e-6
    assert ticks[-1] >= high - step * 1e-6
    assert len(ticks) <= most + 2


@pytest.mark.parametrize("blocks", [1, 2, 40, 80, 400])
def test_block_numbers_have_room(blocks: int) -> None:
    bands = svg.Bands(range(blocks))
    assert bands.start(0) == svg.LEFT
    assert bands.start(blocks - 1) + bands.width == pytest.approx(svg.LEFT + svg.PLOT)
    assert 1 <= bands.axis(10, None).count("<text") <= svg.PLOT / 24


def test_attributes_are_escaped() -> None:
    assert svg.element("g", aria_label='"<&') == '<g aria-label="&quot;&lt;&amp;"></g>'


def test_what_cannot_be_seen_is_made_visible() -> None:
    assert svg.clean("a\x00\r\n\t\u202eb\ud800\x85") == "a\u2400\u240d\n\t\ufffdb\ufffd\ufffd"
