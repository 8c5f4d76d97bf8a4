from __future__ import annotations

from functools import partial

import pytest
import torch

from zaya_tools.model.linear import Dense, join


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("opaque", [False, True])
def test_joined_layers_give_their_outputs_side_by_side(bias: bool, opaque: bool) -> None:
    layers = [Dense(torch.randn(n, 6), torch.randn(n) if bias else None) for n in (3, 5)]
    x = torch.randn(2, 4, 6)
    joined = join([layers[0], partial(layers[1]) if opaque else layers[1]])
    assert isinstance(joined, Dense) is not opaque
    torch.testing.assert_close(joined(x), torch.cat([layer(x) for layer in layers], dim=-1))
