from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zaya_tools.quantization.gptq import gptq
from zaya_tools.quantization.kernels import LEVELS, nearest
from zaya_tools.quantization.polish import Rounded, damped, loss, polish, spread
from zaya_tools.quantization.scheme import CALIBRATED, SCHEMES, Kind
from zaya_tools.quantization.weighted import weighted_scales

BF16 = torch.bfloat16


def inputs(width: int, tokens: int, seed: int = 0) -> Tensor:
    """Correlated channels of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / float(width) ** 0.5
    strength = torch.randn(width, generator=generator).exp()
    return torch.mul(torch.randn(tokens, width, generator=generator) @ mix, strength)


def hessians(count: int, width: int, seed: int = 0) -> Tensor:
    made = [inputs(width, 3 * width, seed + index) for index in range(count)]
    return torch.stack([x.T @ x / len(x) for x in made])


def start(weight: Tensor, name: str) -> Rounded:
    scheme = {**SCHEMES, **CALIBRATED}[name]
    found = [weighted_scales(matrix, scheme, torch.ones(weight.shape[-1]), BF16) for matrix in weight]
    scales = torch.stack([s.value.view(weight.shape[1], -1) for s in found])
    return Rounded(nearest(weight / spread(scales, weight.shape[-1]), scheme.kind), scales)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(["int4", "int4-g32", "int8", "fp8", "mxfp4"]),
    rows=st.integers(1, 5),
    groups=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_the_loss_never_grows_and_numbers_stay_stored_ones(name: str, rows: int, groups: int, seed: int) -> None:
    weight = torch.randn(2, rows, 128 * groups, generator=torch.Generator().manual_seed(seed))
    h = damped(hessians(2, 128 * groups, seed))
    before = start(weight, name)
    after = polish(weight, before, h, SCHEMES[name], BF16, sweeps=2)
    assert (loss(weight, after, h) <= loss(weight, before, h) * (1 + 1e-4)).all()
    kind = SCHEMES[name].kind
    assert torch.equal(after.numbers, nearest(after.numbers.clone(), kind))
    assert torch.equal(after.scales, after.scales.to(BF16).float())
    assert (after.scales > 0).all()


def test_with_uncorrelated_inputs_the_nearest_number_stays_the_best() -> None:
    weight = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(0))
    h = torch.diag_embed(torch.rand(1, 128, generator=torch.Generator().manual_seed(1)) + 0.1)
    before = start(weight, "mxfp4")  # whose scales stay where they are
    after = polish(weight, before, h, SCHEMES["mxfp4"], BF16)
    assert torch.equal(after.numbers, before.numbers)


def test_no_other_number_for_a_single_weight_would_be_better() -> None:
    weight = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3))
    h = damped(hessians(1, 32))
    scheme = SCHEMES["int4-g32"]
    done = polish(weight, start(weight, "int4-g32"), h, scheme, BF16, sweeps=30)
    least = loss(weight, done, h)
    low, high = LEVELS[Kind.INT4]
    for row, column in product(range(2), range(32)):
        for number in range(int(low), int(high) + 1):
            numbers = done.numbers.clone()
            numbers[0, row, column] = number
            assert loss(weight, Rounded(numbers, done.scales), h) >= least * (1 - 1e-5)


def test_a_batch_is_its_matrices_one_by_one() -> None:
    weight = torch.randn(3, 4, 128, generator=torch.Generator().manual_seed(0))
    h = damped(hessians(3, 128))
    first = start(weight, "int4")
    together = polish(weight, first, h, SCHEMES["int4"], BF16)
    for index in range(3):
        at = slice(index, index + 1)
        alone = polish(weight[at], Rounded(first.numbers[at], first.scales[at]), h[at], SCHEMES["int4"], BF16)
        # Sums in another order now and then turn a number, and then what comes after it.
        torch.testing.assert_close(loss(weight[at], alone, h[at]), loss(weight, together, h)[at], rtol=0.05, atol=0)


@pytest.mark.parametrize("name", ["int4", "int4-g32", "int8", "fp8"])
def test_gptq_is_the_librarys_kernel_and_then_better(name: str) -> None:
    pytest.importorskip("llmcompressor")
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    weight = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(5))
    h, scheme = hessians(2, 256), SCHEMES[name]
    first = start(weight, name)
    args = QuantizationArgs(
        num_bits=scheme.bits, type="float" if name == "fp8" else "int", symmetric=True, actorder="static",
        **({"strategy": "group", "group_size": scheme.columns} if scheme.columns else {"strategy": "channel"}),
    )  # fmt: skip
    theirs, _, _ = quantize_weight(
        weight.clone(), h.clone(), first.scales, torch.zeros_like(first.scales), None, args, 128, 0.01
    )
    plain = gptq(weight, first.scales, h, scheme, BF16, sweeps=0)
    torch.testing.assert_close(plain.weight(), theirs, rtol=1e-5, atol=1e-6)
    polished = gptq(weight, first.scales, h, scheme, BF16)
    nearest_loss, kernel_loss, own = (loss(weight, r, damped(h)) for r in (first, plain, polished))
    assert (own < kernel_loss).all()
    assert (kernel_loss < nearest_loss).all()
