"""Stored matrices cut for the ranks of tensor parallelism, before they are dequantized."""

from __future__ import annotations

import pytest
import torch

from tests.evaluation.support import PRESETS, compress, format_of, scheme_of
from zaya_tools.errors import LayoutError

pytestmark = pytest.mark.vllm

ROWS, COLUMNS = 128, 192


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("preset", PRESETS)
def test_shares_are_parts_of_the_whole(preset: str, axis: int) -> None:
    from zaya_tools.evaluation.stored import Decoder
    from zaya_tools.vllm_plugin.emulation import Form

    scheme = scheme_of(preset)
    if scheme.weights.block_structure:  # its activations come in groups of 128, too long for a matrix this small
        scheme.input_activations = None
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    stored = {suffix: t for suffix, t in compress(weight, scheme).items() if suffix != "weight_shape"}
    decoder = Decoder(scheme, format_of(scheme))

    def dequantized(rank: int, ranks: int) -> torch.Tensor:
        form = Form(decoder, torch.float32, ROWS, COLUMNS, axis, rank, ranks)
        state = {suffix: form.cut(suffix, tensor) for suffix, tensor in stored.items()}
        assert {suffix: (t.dtype, tuple(t.shape)) for suffix, t in state.items()}.keys() == form.share().keys()
        found: torch.Tensor = form.linear("m", state).weight()  # type: ignore[attr-defined]
        assert tuple(found.shape) == form.shape
        return found

    whole = dequantized(0, 1)
    assert (whole - weight).abs().max() < 1
    assert torch.equal(torch.cat([dequantized(rank, 2) for rank in range(2)], dim=axis), whole)


def test_in_full_precision() -> None:
    from zaya_tools.vllm_plugin.emulation import Form

    weight = torch.randn(6, 4)
    form = Form(None, torch.float32, 6, 4, 0, 1, 2)
    assert torch.equal(form.cut("weight", weight), weight[3:])
    assert form.share() == {"weight": (torch.float32, (3, 4))}
    with pytest.raises(LayoutError, match=r"shape \[4, 6\], expected \[6, 4\]"):
        form.cut("weight", weight.t())


@pytest.mark.parametrize(
    ("preset", "axis", "ranks", "message"),
    [
        ("W4A16", 1, 12, "through groups of 32"),
        ("W4A16", 1, 5, "5 ranks do not divide"),
        ("NVFP4A16", 1, 24, "through groups of 16"),
        ("FP8_BLOCK", 0, 8, "through groups of 32"),
        ("FP8_BLOCK", 1, 2, "through groups of 128"),  # of the activations
    ],
)
def test_no_cut_goes_through_what_is_quantized_together(preset: str, axis: int, ranks: int, message: str) -> None:
    from zaya_tools.evaluation.stored import Decoder
    from zaya_tools.vllm_plugin.emulation import Form

    scheme = scheme_of(preset)
    with pytest.raises(LayoutError, match=message):
        Form(Decoder(scheme, format_of(scheme)), torch.float32, ROWS, COLUMNS, axis, 0, ranks).share()
