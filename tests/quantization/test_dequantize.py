"""What stored tensors stand for, against compressed-tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.quantization.library import DTYPES, decompress, preset
from zaya_tools.quantization.dequantize import dequantize
from zaya_tools.quantization.quantize import quantize
from zaya_tools.quantization.scheme import OBSERVERS, SCHEMES, Observer


def sample(dtype: str, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.logspace(-4, 2, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * scales).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("name", ["fp8", "fp8-block", "int8", "int4", "int4-g32"])
def test_equal_to_the_librarys_in_float32(name: str, observer: Observer, dtype: str) -> None:
    rows = 256 if name == "fp8-block" else 130  # compressed-tensors 0.17 spreads scales wrongly over partial blocks
    weight = sample(dtype, rows, 256)
    tensors = quantize(weight, SCHEMES[name], observer).tensors
    mine = dequantize(tensors, SCHEMES[name], (rows, 256))
    assert mine.dtype == torch.float32
    assert torch.equal(mine, decompress(tensors, name, (rows, 256)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4a16"])
def test_fp4_equals_the_librarys_in_float32_and_in_its_bfloat16(name: str, observer: Observer, dtype: str) -> None:
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize as theirs

    weight = sample(dtype, 60, 64)
    tensors = quantize(weight, SCHEMES[name], observer).tensors
    mine = dequantize(tensors, SCHEMES[name], (60, 64))
    scale = tensors["weight_scale"]
    wide = torch.exp2(scale.float() - 127) if name == "mxfp4" else scale.float()
    numbers = unpack_fp4_from_uint8(tensors["weight_packed"], 60, 64, torch.float32)
    args: Any = preset(name).weights
    whole = tensors.get("weight_global_scale")
    assert torch.equal(mine, theirs(numbers, wide, args=args, dtype=torch.float32, global_scale=whole))
    assert torch.equal(mine.bfloat16(), decompress(tensors, name, (60, 64)))


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (127, 200), (129, 256), (256, 384)])
def test_blocks_that_are_not_whole(rows: int, columns: int) -> None:
    weight = sample("bfloat16", rows, columns)
    made = quantize(weight, SCHEMES["fp8-block"], "minmax")
    mine = dequantize(made.tensors, SCHEMES["fp8-block"], (rows, columns))
    scale = made.tensors["weight_scale"].float()
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(mine, made.tensors["weight"].float() * spread)


def test_every_code_of_four_bits() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    pairs = (codes[::2] | codes[1::2] << 4).view(1, 16)
    fp4 = dequantize({"weight_packed": pairs, "weight_scale": torch.tensor([[128]], dtype=torch.uint8)},
                     SCHEMES["mxfp4"], (1, 32))  # fmt: skip
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert fp4[0, :16].tolist() == [2 * m for m in magnitudes] + [-2 * m for m in magnitudes]
    words = {"weight_packed": pairs.view(torch.int32), "weight_scale": torch.tensor([[0.5]])}
    assert dequantize(words, SCHEMES["int4-g32"], (1, 32))[0, :16].tolist() == [n / 2 for n in range(-8, 8)]
