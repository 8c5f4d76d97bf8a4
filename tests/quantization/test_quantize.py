"""`minmax` against compressed-tensors and llm-compressor, bit by bit; facts, slabs, and what is refused."""

from __future__ import annotations

import json
from math import inf, isnan, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.quantization.library import DTYPES, compress
from zaya_tools.dtypes import NAMES
from zaya_tools.errors import ZayaError
from zaya_tools.quantization.dequantize import dequantize
from zaya_tools.quantization.quantize import Facts, global_scale, largest, quantize
from zaya_tools.quantization.scheme import OBSERVERS, SCHEMES, Observer

PATHS = ("torch", "native")
OVERFLOW = 7
"""Row of `hostile` that reaches the end of the dtype's range."""


@pytest.fixture(params=PATHS, autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZAYA_KERNELS", request.param)


def hostile(dtype: torch.dtype, rows: int = 300, columns: int = 256) -> Tensor:
    """Rows of every magnitude, zeros of both signs, subnormals, and one at the end of the range."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    weight[3] = 0
    weight[4] = -0.0
    weight[5] = 1e-6
    weight[6] = 1e-38
    weight[OVERFLOW] *= torch.finfo(dtype).max / 3 / weight[OVERFLOW].abs().max()
    for row, scale in zip(range(8, 14), (1e-44, 1e-38, 1e-36, 1e-30, 1e-7, 1e-5), strict=True):
        weight[row] *= scale
    weight[14, :16] = -0.0
    weight[15] = -weight[5]
    weight[16] = torch.linspace(-8, 7, columns)  # ties
    weight[17] = 5e-8
    return weight.to(dtype)


def same(mine: Tensor, other: Tensor) -> bool:
    """Equal in type, shape and every bit."""
    form = mine.dtype == other.dtype and mine.shape == other.shape and mine.is_contiguous()
    return form and torch.equal(mine.view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_minmax_is_the_librarys_to_the_last_bit(name: str, dtype: str) -> None:
    weight = hostile(DTYPES[dtype])
    if name == "nvfp4a16":
        weight[OVERFLOW] = 0.1  # with one global scale nothing else would be left
    made = quantize(weight, SCHEMES[name], "minmax")
    assert made.finite
    theirs = compress(weight, name)
    for stored in SCHEMES[name].stored(300, 256, NAMES[dtype]):
        if stored.suffix == "weight_shape":
            assert tuple(theirs[stored.suffix].tolist()) == weight.shape
            continue
        assert tuple(made.tensors[stored.suffix].shape) == stored.shape
        assert same(made.tensors[stored.suffix], theirs[stored.suffix]), stored.suffix
    assert set(made.tensors) == set(theirs) - {"weight_shape"}


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 257])
@pytest.mark.parametrize("columns", [128, 200, 384])
def test_blocks_that_are_not_whole(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    made, theirs = quantize(weight, SCHEMES["fp8-block"], "minmax"), compress(weight, "fp8-block")
    assert all(same(made.tensors[suffix], theirs[suffix]) for suffix in ("weight", "weight_scale"))


@pytest.mark.parametrize("columns", [1, 5, 100, 129, 1000])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_rows_of_any_length(name: str, columns: int) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()
    made, theirs = quantize(weight, SCHEMES[name], "minmax"), compress(weight, name)
    assert all(same(made.tensors[suffix], theirs[suffix]) for suffix in ("weight", "weight_scale"))
    searched = quantize(weight, SCHEMES[name], "mse")
    assert searched.facts.squared_error <= made.facts.squared_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amax", [0.02, 0.05, 0.3, 1.7, 60000.0])
def test_a_global_scale_that_others_share(dtype: str, amax: float) -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype]).mul_(0.1 * amax)
    if dtype == "float16" and amax < 0.041:
        pytest.skip("the library gives up there")
    amax = torch.tensor(amax, dtype=DTYPES[dtype]).item()
    made, theirs = quantize(weight, SCHEMES["nvfp4a16"], "minmax", amax=amax), compress(weight, "nvfp4a16", amax)
    assert all(same(made.tensors[suffix], theirs[suffix]) for suffix in theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_global_scales_are_the_librarys(dtype: str) -> None:
    from compressed_tensors.quantization.utils import generate_gparam

    for exponent in torch.linspace(-30 if dtype != "float16" else -1.3, 4, 300).tolist():
        most = torch.tensor([10.0**exponent], dtype=DTYPES[dtype])
        assert global_scale(most.item(), DTYPES[dtype]) == generate_gparam(-most, most).item()
    for amax in (0.0, torch.finfo(DTYPES[dtype]).max):
        most = torch.tensor([amax], dtype=DTYPES[dtype])
        assert global_scale(amax, DTYPES[dtype]) == generate_gparam(-most, most).item()


def test_small_float16_matrices_keep_their_global_scale() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).half().mul_(0.005)
    made = quantize(weight, SCHEMES["nvfp4a16"], "minmax")
    as_bfloat16 = quantize(weight.bfloat16(), SCHEMES["nvfp4a16"], "minmax")
    assert made.tensors["weight_global_scale"].item() == pytest.approx(448 * 6 / largest(weight))
    assert made.facts.sqnr_db == pytest.approx(as_bfloat16.facts.sqnr_db, abs=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_scales_are_finite_and_positive(name: str, dtype: str, observer: Observer) -> None:
    weight = hostile(DTYPES[dtype])
    weight[OVERFLOW] = torch.finfo(DTYPES[dtype]).max
    made = quantize(weight, SCHEMES[name], observer)
    scale = made.tensors["weight_scale"]
    if name == "mxfp4":
        assert scale.max() < 255  # the code of NaN, which the library writes there
    else:
        assert scale.float().isfinite().all()
        assert (scale.float() > 0).all()
    numbers = dequantize(made.tensors, SCHEMES[name], (300, 256))
    assert (numbers[3:5] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_mxfp4_at_the_end_of_the_range(dtype: str, observer: Observer) -> None:
    most = torch.finfo(DTYPES[dtype]).max
    weight = torch.linspace(-most, most, 64, dtype=torch.float64).to(DTYPES[dtype]).view(2, 32)
    made = quantize(weight, SCHEMES["mxfp4"], observer)
    exponent = 13 if dtype == "float16" else 125  # of the dtype's largest power of two, less e2m1's two
    assert made.tensors["weight_scale"].tolist() == [[127 + exponent], [127 + exponent]]
    assert dequantize(made.tensors, SCHEMES["mxfp4"], (2, 32)).to(DTYPES[dtype]).isfinite().all()
    assert made.facts.relative_error < 0.2


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_facts_are_those_of_the_numbers(name: str, observer: Observer) -> None:
    weight = hostile(torch.bfloat16)
    weight[OVERFLOW] = 0.5
    scheme = SCHEMES[name]
    made = quantize(weight, scheme, observer)
    off = dequantize(made.tensors, scheme, (300, 256)).double() - weight.double()
    assert made.facts.squared_error == pytest.approx(off.square().sum().item(), rel=1e-6)
    assert made.facts.squared_norm == pytest.approx(weight.double().square().sum().item(), rel=1e-6)
    assert made.facts.numel == weight.numel()
    assert made.facts.sqnr_db == pytest.approx(-20 * torch.log10(off.norm() / weight.double().norm()).item())


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_facts_at_the_ends_of_the_range(name: str, dtype: str) -> None:
    most, tiny = torch.finfo(DTYPES[dtype]).max, torch.finfo(DTYPES[dtype]).smallest_normal
    generator = torch.Generator().manual_seed(0)
    for scale in (most / 6, tiny / 3, tiny * 1000):
        weight = (torch.randn(128, 256, generator=generator).clamp(-6, 6) * scale).to(DTYPES[dtype])
        weight[:5] = 0
        facts = quantize(weight, SCHEMES[name], "minmax").facts
        assert facts.squared_norm == pytest.approx(weight.double().square().sum().item(), rel=1e-6)
        assert 0 < facts.relative_error <= 1


def test_clipped_elements_are_those_that_rounding_does_not_explain() -> None:
    weight = torch.zeros(1, 128, dtype=torch.float32)
    weight[0, :4] = torch.tensor([-7.5, 7.5, 7.4, 1.0])
    assert quantize(weight, SCHEMES["int4"], "minmax").facts.clipped == 0  # 7.5 is half a step above 7
    made = quantize(weight, SCHEMES["nvfp4a16"], "minmax", amax=3.0)  # as if another slab had been looked at
    assert made.facts.clipped == 3
    assert made.facts.clipped_fraction == 3 / 128


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("observer", OBSERVERS)
def test_slabs_give_what_the_whole_gives(name: str, observer: Observer) -> None:
    weight, scheme = hostile(torch.bfloat16), SCHEMES[name]
    weight[OVERFLOW] = 0.5
    amax = largest(weight)
    whole = quantize(weight, scheme, observer, amax=amax)
    parts = [quantize(weight[first : first + 128], scheme, observer, amax=amax) for first in range(0, 300, 128)]
    for suffix, tensor in whole.tensors.items():
        if suffix != "weight_global_scale":
            assert same(tensor.view(torch.uint8), torch.cat([part.tensors[suffix].view(torch.uint8) for part in parts]))
    facts = sum((part.facts for part in parts), Facts())
    assert (facts.clipped, facts.numel) == (whole.facts.clipped, whole.facts.numel)
    assert facts.relative_error == pytest.approx(whole.facts.relative_error, rel=1e-6)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_weights_that_are_not_finite(name: str, dtype: str, bad: float) -> None:
    for row, column in ((0, 0), (299, 255), (150, 17)):
        weight = torch.ones(300, 256, dtype=DTYPES[dtype])
        weight[row, column] = bad
        for observer in OBSERVERS:
            assert not quantize(weight, SCHEMES[name], observer, amax=1.0).finite
            assert not quantize(weight, SCHEMES[name], observer).finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest(dtype: str) -> None:
    weight = hostile(DTYPES[dtype])
    assert largest(weight) == weight.abs().max().item()
    assert largest(weight.view(-1)[:0]) == 0
    assert largest(-weight[0]) == weight[0].abs().max().item()
    weight[9, 9] = -inf
    assert largest(weight) == inf
    weight[100, 2] = nan
    assert isnan(largest(weight))


def test_written_where_asked() -> None:
    weight, scheme = hostile(torch.bfloat16), SCHEMES["int4"]
    fresh = quantize(weight, scheme, "minmax").tensors
    out = {suffix: torch.zeros_like(tensor) for suffix, tensor in fresh.items()}
    places = {suffix: tensor.data_ptr() for suffix, tensor in out.items()}
    made = quantize(weight, scheme, "minmax", out=out).tensors
    assert {suffix: tensor.data_ptr() for suffix, tensor in made.items()} == places
    assert all(torch.equal(made[suffix], fresh[suffix]) for suffix in fresh)
    with pytest.raises(ValueError, match="weight_packed has to be I32"):
        quantize(weight, scheme, "minmax", out={"weight_packed": out["weight_packed"][1:]})


def test_views_are_quantized_like_copies() -> None:
    weight = hostile(torch.bfloat16, 256, 256)
    mine, other = (quantize(w, SCHEMES["int4"], "mse") for w in (weight.t(), weight.t().contiguous()))
    assert torch.equal(mine.tensors["weight_packed"], other.tensors["weight_packed"])


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(ZayaError, match=r"groups of 128 do not divide 96 columns"):
        quantize(torch.zeros(4, 96, dtype=torch.bfloat16), SCHEMES["int4"], "minmax")
    with pytest.raises(ZayaError, match=r"torch.float64 cannot"):
        quantize(torch.zeros(4, 128, dtype=torch.float64), SCHEMES["int4"], "minmax")
    with pytest.raises(ZayaError, match="nothing to quantize"):
        quantize(torch.zeros(4, 0), SCHEMES["fp8"], "minmax")


def test_facts_of_nothing_and_of_zeros() -> None:
    assert (Facts().relative_error, Facts().clipped_fraction, Facts().sqnr_db) == (0, 0, inf)
    zeros = quantize(torch.zeros(2, 128), SCHEMES["int4"], "mse").facts
    assert json.loads(json.dumps(zeros.as_dict())) == {
        "relative_error": 0.0, "sqnr_db": None, "clipped_fraction": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "preset"), [("fp8", "FP8_DYNAMIC"), ("fp8-block", "FP8_BLOCK"), ("int8", "INT8"),
                                              ("int4", "W4A16"), ("mxfp4", "MXFP4A16")])  # fmt: skip
def test_minmax_is_what_llm_compressor_writes(name: str, preset: str, tmp_path: Path) -> None:
    library = pytest.importorskip("llmcompressor")
    weight = hostile(torch.bfloat16)[:256]
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    save_file({"model.layers.0.mlp.down_proj.weight": weight}, source / "model.safetensors")
    (source / "config.json").write_text("{}")
    library.model_free_ptq(
        model_stub=str(source), save_directory=str(target), scheme=preset, ignore=[], device="cpu", max_workers=1
    )
    theirs = load_file(target / "model.safetensors")
    for suffix, tensor in quantize(weight, SCHEMES[name], "minmax").tensors.items():
        assert same(tensor, theirs[f"model.layers.0.mlp.down_proj.{suffix}"]), suffix
