"""The `mse` observer: never worse than `minmax`, close to the best there is, and worth it on trained weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import zaya_tools.data
from tests.quantization.library import DTYPES
from zaya_tools.quantization.dequantize import dequantize
from zaya_tools.quantization.kernels import Scales, divide, grouped, nearest
from zaya_tools.quantization.quantize import Facts, quantize
from zaya_tools.quantization.scheme import SCHEMES, Kind
from zaya_tools.quantization.search import LANES, exact_error, ordered_sum


def errors(weight: Tensor, name: str, observer: str) -> Tensor:
    """Squared error of every group, float64."""
    scheme = SCHEMES[name]
    made = quantize(weight, scheme, "mse" if observer == "mse" else "minmax")
    shape = (weight.shape[0], weight.shape[1])
    off = dequantize(made.tensors, scheme, shape).double() - weight.double()
    return grouped(off, scheme).square().sum(-1)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Bell-shaped to heavy-tailed rows of many magnitudes, some of them zero, some coarse."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    rows, columns = draw(st.integers(1, 140)), 128 * draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    weight = torch.randn(rows, columns, generator=generator)
    weight = weight.sign() * weight.abs() ** draw(st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    weight *= torch.exp(3 * torch.randn(rows, 1, generator=generator)) * 10.0 ** draw(st.integers(-6, 2))
    weight[:: draw(st.integers(2, 9))] *= draw(st.sampled_from([0.0, 1.0, 1e-30]))
    if draw(st.booleans()):
        weight = weight.half().clamp(-100, 100).round().float()
    return weight.clamp(-6e4, 6e4).to(dtype)


@settings(max_examples=40, deadline=None)
@given(weight=weights(), name=st.sampled_from(sorted(SCHEMES)))
def test_no_group_has_a_larger_error_than_with_minmax(weight: Tensor, name: str) -> None:
    mine, other = errors(weight, name, "mse"), errors(weight, name, "minmax")
    # Products of float32 scales are rounded in `dequantize`.
    slack = 1e-5 if weight.dtype == torch.float32 or name == "nvfp4a16" else 1e-12
    assert (mine <= other * (1 + slack)).all()


@pytest.mark.parametrize(("name", "share"), [("fp8", 1.012), ("int8", 1.02), ("int4", 1.004), ("int4-g32", 1.004)])
def test_close_to_the_best_of_all_scales(name: str, share: float) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    groups = grouped(weight, SCHEMES[name])
    kind = SCHEMES[name].kind
    start = groups.abs().amax(-1).float() / {Kind.FLOAT8: 448, Kind.INT8: 127.5, Kind.INT4: 7.5}[kind]
    # bfloat16 has 128 scales an octave: all of them.
    best = torch.stack([
        exact_error(groups.float(), (start * 1.1 * 2 ** (-step / 256)).bfloat16().float(), kind) for step in range(300)
    ]).amin(0).sum()  # fmt: skip
    assert errors(weight, name, "mse").sum() <= best * share


@pytest.mark.parametrize("name", ["int4", "int4-g32", "int8"])
@pytest.mark.parametrize("edge", ["lowest", "highest"])
def test_weights_that_are_on_the_grid_come_out_as_they_were(name: str, edge: str) -> None:
    generator = torch.Generator().manual_seed(0)
    levels = 8 if SCHEMES[name].kind is Kind.INT4 else 128
    weight = torch.randint(-levels + 1, levels, (16, 256), generator=generator).float()
    weight[:, ::32] = -levels if edge == "lowest" else levels - 1
    scale = torch.linspace(0.01, 0.03, 16).bfloat16().float()[:, None]
    made = quantize(weight * scale, SCHEMES[name], "mse")
    assert made.facts.relative_error < 1e-6
    if name != "int8":  # of which bfloat16 cannot hold level times scale
        assert quantize(weight.bfloat16() * 2**-6, SCHEMES[name], "mse").facts.squared_error == 0


def test_a_lone_outlier_is_clipped() -> None:
    weight = torch.full((1, 128), 0.1).bfloat16()
    weight[0, ::2] = -0.13
    weight[0, 5] = 0.5
    made = quantize(weight, SCHEMES["int4"], "mse")
    assert made.facts.clipped == 1
    assert made.facts.squared_error < quantize(weight, SCHEMES["int4"], "minmax").facts.squared_error


@pytest.mark.parametrize(("name", "gain"), [("fp8", 0.6), ("fp8-block", 0.1), ("int8", 0.8), ("int4", 0.75),
                                            ("int4-g32", 0.75), ("mxfp4", 0.03), ("nvfp4a16", 1.2)])  # fmt: skip
def test_gains_on_trained_weights(name: str, gain: float) -> None:
    tensors = load_file(Path(zaya_tools.data.__file__).parent / "tiny" / "model.safetensors")
    matrices = [value for name, value in tensors.items() if ".local_experts." in name or ".linear_" in name]
    assert len(matrices) > 60
    totals = [
        sum((quantize(matrix, SCHEMES[name], observer).facts for matrix in matrices), Facts())
        for observer in ("minmax", "mse")
    ]
    assert totals[1].sqnr_db - totals[0].sqnr_db > gain


@pytest.mark.parametrize("name", SCHEMES)
def test_where_squares_would_overflow_the_scales_are_minmaxs(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1e-36, 1e34):
        weight = (torch.randn(128, 128, generator=generator) * size).bfloat16()
        mine, other = (quantize(weight, SCHEMES[name], observer, amax=1e34).tensors for observer in ("mse", "minmax"))
        assert torch.equal(mine["weight_scale"].view(torch.uint8), other["weight_scale"].view(torch.uint8))


def test_once_rounded_is_never_worse_than_twice() -> None:
    """What lets `mse` keep the scale of `minmax` without a look at the error."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = (weight.abs().amax(-1) / 127.5).float()
    scales = Scales(scale.bfloat16(), scale.bfloat16().float())
    off = [
        (nearest(divide(weight, scales, Kind.INT8, exact=exact), Kind.INT8).double() * scales.value.double()[:, None]
         - weight.double()).abs() for exact in (True, False)
    ]  # fmt: skip
    assert (off[0] <= off[1]).all()
    assert (off[0] < off[1]).any()


@pytest.mark.parametrize("width", [1, 16, 17, 32, 100, 128, 129, 500, 2048])
def test_ordered_sums(width: int) -> None:
    terms = torch.rand(5, width, generator=torch.Generator().manual_seed(width))
    assert torch.allclose(ordered_sum(terms), terms.double().sum(-1), rtol=1e-6)
    assert torch.allclose(ordered_sum(terms.double()), terms.double().sum(-1), rtol=1e-14)
    # Zeros behind the last element change nothing: the native path does not have them.
    filled = torch.nn.functional.pad(terms, (0, -width % LANES))
    assert torch.equal(ordered_sum(filled), ordered_sum(terms))
