from __future__ import annotations

from dataclasses import replace

import pytest

from zaya_tools.errors import LayoutError
from zaya_tools.model.rotary import frequencies

from .support import BASE


@pytest.mark.parametrize(("kind", "reason"), [("dynamic", "not supported"), ("yarm", "unknown")])
def test_types_that_one_table_cannot_serve_are_refused(kind: str, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        frequencies(replace(BASE, rope_scaling=(("rope_type", kind),)), sliding=False)


def test_scaling_leaves_sliding_blocks_alone() -> None:
    scaled = replace(BASE, sliding=(True, True, True), sliding_window=4, rope_scaling=(("rope_type", "dynamic"),))
    inverse, factor = frequencies(scaled, sliding=True)
    assert inverse.tolist() == pytest.approx([1.0, 0.01])
    assert factor == 1.0
