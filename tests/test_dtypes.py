"""Casts and scans, against torch, on every bit pattern where that is possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.synthetic import TORCH
from zaya_tools.dtypes import FLOATS, NAMES, SIZES, Bytes, from_float32, holds, nonfinite, to_float32
from zaya_tools.errors import LayoutError

EVERY_16_BITS = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)


def data(tensor: Tensor) -> Bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def edges() -> Tensor:
    """float32 patterns where rounding to 16 bits may go wrong, both signs, and two hundred thousand random ones."""
    sixteen = torch.arange(2**16, dtype=torch.int64) << 16  # exactly bfloat16
    around = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])  # just above, below a tie, on it, above it
    near = (sixteen[:, None] + around).flatten()
    halves = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.int32))
    steps = torch.arange(-1, 2)
    half_near = (halves.long()[:, None] + steps).flatten()
    # Ties between neighbouring float16 values, subnormal ones included.
    finite = torch.from_numpy(np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32))
    following = torch.from_numpy(np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32))
    ties = ((finite.double() + following.double()) / 2).float().view(torch.int32).long()
    tie_near = (ties[:, None] + steps).flatten()
    largest = torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 3.3895e38, 3.4e38, torch.finfo(torch.float32).max])
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 2**32, (200_000,), generator=generator)
    patterns = torch.cat([near, half_near, tie_near, tie_near + 2**31, largest.view(torch.int32).long(), random])
    return (patterns % 2**32).to(torch.uint32).view(torch.float32)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_pattern_becomes_the_float32_that_torch_makes(dtype: str) -> None:
    values = EVERY_16_BITS.view(TORCH[dtype])
    ours = torch.from_numpy(to_float32(data(values), dtype).copy())
    theirs = values.float()
    assert torch.equal(ours.isnan(), theirs.isnan())
    finite = ~theirs.isnan()
    assert torch.equal(ours.view(torch.int32)[finite], theirs.view(torch.int32)[finite])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_pattern_survives_a_round_trip(dtype: str) -> None:
    values = EVERY_16_BITS.view(TORCH[dtype])
    back = torch.from_numpy(from_float32(to_float32(data(values), dtype), dtype).copy()).view(TORCH[dtype])
    numbers = ~values.isnan()
    assert torch.equal(back.view(torch.int16)[numbers], values.view(torch.int16)[numbers])
    assert back[~numbers].isnan().all()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_rounding_is_torchs_bit_by_bit(dtype: str) -> None:
    values = edges()
    assert values.isnan().any()
    assert values.isinf().any()
    ours = torch.from_numpy(from_float32(values.numpy(), dtype).copy()).view(TORCH[dtype])
    theirs = values.to(TORCH[dtype])
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~theirs.isnan()
    assert torch.equal(ours.view(torch.int16)[numbers], theirs.view(torch.int16)[numbers])


def test_float32_is_handed_through() -> None:
    values = edges()
    assert np.array_equal(from_float32(values.numpy(), "F32"), data(values))
    assert np.array_equal(to_float32(data(values), "F32").view(np.uint8), data(values))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_casting_leaves_its_input_alone(dtype: str) -> None:
    values = edges().numpy()
    before = values.tobytes()
    from_float32(values, dtype)
    assert values.tobytes() == before


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3", "F64"])
def test_other_types_are_not_cast(dtype: str) -> None:
    with pytest.raises(LayoutError, match=dtype):
        to_float32(np.zeros(8, np.uint8), dtype)
    with pytest.raises(LayoutError, match=dtype):
        from_float32(np.zeros(8, np.float32), dtype)


def patterns(dtype: str) -> Tensor:
    if SIZES[dtype] == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8)
    if SIZES[dtype] == 2:
        return EVERY_16_BITS.view(torch.uint8)
    if dtype == "F32":
        return edges().view(torch.uint8)
    special = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan, 1e308, 5e-324], dtype=torch.float64)
    neighbours = torch.tensor([0x7FEFFFFFFFFFFFFF, 0x7FF0000000000001, -1, -(2**52)], dtype=torch.int64)
    return torch.cat([special.view(torch.uint8), neighbours.view(torch.uint8)])


FLOATING = {**{name: TORCH[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")},
            "F8_E8M0": torch.float8_e8m0fnu}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_scan_finds_what_torch_calls_nan_or_infinite(dtype: str) -> None:
    stored = patterns(dtype)
    wide = stored.view(FLOATING[dtype]).to(torch.float64)
    expected = (wide.isnan() | wide.isinf()).numpy()
    assert expected.any()
    mask = nonfinite(stored.numpy(), dtype)
    assert mask is not None
    assert np.array_equal(mask, expected)
    finite = stored.view(-1, SIZES[dtype])[torch.from_numpy(~expected)].flatten()
    assert nonfinite(finite.numpy(), dtype) is None


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_scan_finds_one_bad_element_wherever_it_stands(dtype: str) -> None:
    size = SIZES[dtype]
    stored = patterns(dtype).view(-1, size)
    wide = stored.flatten().view(FLOATING[dtype]).double()
    bad = stored[wide.isnan() | wide.isinf()]
    # Each kind alone: the smallest and the largest pattern of either sign.
    for pattern in (bad[0], bad[-1], bad[len(bad) // 2], bad[len(bad) // 2 - 1]):
        for place in (0, 3, 6):
            row = torch.zeros(7, size, dtype=torch.uint8)
            row[place] = pattern
            mask = nonfinite(row.flatten().numpy(), dtype)
            assert mask is not None
            assert mask.nonzero()[0].tolist() == [place]


@pytest.mark.parametrize("dtype", sorted(SIZES.keys() - FLOATING.keys()))
def test_whole_numbers_are_always_finite(dtype: str) -> None:
    assert nonfinite(np.full(64, 0xFF, np.uint8), dtype) is None


@pytest.mark.parametrize("dtype", SIZES)
def test_nothing_is_wrong_with_nothing(dtype: str) -> None:
    assert nonfinite(np.zeros(0, np.uint8), dtype) is None


def test_sizes_are_those_of_torch() -> None:
    for name, kind in {**FLOATING, **TORCH}.items():
        assert SIZES[name] == torch.empty(0, dtype=kind).element_size()


@pytest.mark.parametrize("narrow", FLOATS)
@pytest.mark.parametrize("wide", FLOATS)
def test_holds_says_whether_torch_loses_a_value(wide: str, narrow: str) -> None:
    values = (edges() if narrow == "F32" else EVERY_16_BITS.view(TORCH[narrow])).clone()
    values = values[values.isfinite()]
    exact = torch.equal(values.to(TORCH[wide]).to(torch.float64), values.to(torch.float64))
    assert holds(wide, narrow) is exact


def test_names_are_torchs_spellings() -> None:
    assert set(NAMES.values()) == set(FLOATS)
    for spelled, name in NAMES.items():
        assert getattr(torch, spelled) is TORCH[name]
