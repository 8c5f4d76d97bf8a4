from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_tools.quantization.dequantize import dequantize
from zaya_tools.quantization.kernels import grouped, minmax
from zaya_tools.quantization.quantize import global_scale, largest, quantize
from zaya_tools.quantization.scheme import CALIBRATED, SCHEMES, Kind
from zaya_tools.quantization.weighted import encode, weighted_scales

ALL = {**SCHEMES, **CALIBRATED}
BY_ROW = [name for name, scheme in ALL.items() if scheme.rows == 1]


def whole_of(weight: torch.Tensor, name: str) -> torch.Tensor | None:
    if ALL[name].kind is not Kind.NVFP4:
        return None
    return torch.tensor([global_scale(largest(weight), weight.dtype)])


@pytest.mark.parametrize("name", [*BY_ROW, "fp8-block"])
def test_with_scales_by_minmax_the_same_is_stored(name: str) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    scheme, whole = ALL[name], whole_of(weight, name)
    scales = minmax(grouped(weight, scheme).abs().amax(-1), scheme, whole)
    made, expected = encode(weight, scheme, scales, whole), quantize(weight, scheme, "minmax")
    for suffix, tensor in expected.tensors.items():
        mine = made.tensors[suffix]
        assert (mine.dtype, mine.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(mine.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
    assert made.facts.squared_error == pytest.approx(expected.facts.squared_error, rel=1e-6)
    assert made.facts.clipped == expected.facts.clipped


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from([*BY_ROW, "fp8-block", "fp8-static"]), seed=st.integers(0, 999), narrow=st.booleans())
def test_the_weighted_error_is_never_larger_than_minmaxs(name: str, seed: int, narrow: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(20, 256, generator=generator) ** 3
    weight[3] = 0
    dtype = torch.bfloat16 if narrow else torch.float32
    weight = weight.to(dtype)
    heavy = torch.randn(256, generator=generator).exp() ** 2
    scheme, whole = ALL[name], whole_of(weight, name)
    groups = grouped(weight, scheme) if scheme.rows else weight.reshape(1, -1)
    plain = minmax(groups.abs().amax(-1), scheme, whole)

    def error(scales: object) -> float:
        made = encode(weight, scheme, scales, whole)  # type: ignore[arg-type]
        if scheme.rows:
            back = dequantize(made.tensors, scheme, (20, 256))
        else:
            back = made.tensors["weight"].float() * made.tensors["weight_scale"].float()
        return float(((back - weight.float()).square() * heavy).sum())

    best = weighted_scales(weight, scheme, heavy, dtype, whole)
    assert (best.value > 0).all()
    # A sliver of every channel's weight is even, so that none is given up.
    assert error(best) <= error(plain) * 1.001


def test_a_heavy_channel_is_served_first() -> None:
    weight = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    weight[0, 5] = 6.0  # an outlier that spoils the others' steps
    light = torch.ones(128)
    light[5] = 0
    scheme = SCHEMES["int4"]
    kept, given_up = (
        dequantize(encode(weight, scheme, weighted_scales(weight, scheme, h, torch.float32)).tensors, scheme, (1, 128))
        for h in (torch.ones(128) + 1e4 * (1 - light), light)
    )
    rest = light.bool()
    assert (kept[0, 5] - 6).abs() < 0.2
    assert (given_up - weight)[0, rest].norm() < 0.6 * (kept - weight)[0, rest].norm()


def test_one_scale_for_a_matrix_is_stored_as_one_number() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    scheme = CALIBRATED["fp8-static"]
    made = encode(weight, scheme, weighted_scales(weight, scheme, torch.ones(32), torch.bfloat16))
    stored = {s.suffix: (s.dtype, s.shape) for s in scheme.stored(8, 32, "BF16")}
    assert stored["weight_scale"] == ("BF16", (1,))
    assert made.tensors["weight_scale"].shape == (1,)
    assert made.tensors["weight_scale"].dtype == torch.bfloat16
    assert made.tensors["weight"].shape == (8, 32)
