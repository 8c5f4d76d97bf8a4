from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from zaya_tools.errors import LayoutError
from zaya_tools.model.linear import Linear
from zaya_tools.model.loading import build_block, build_ends
from zaya_tools.parameters import parameters

from .support import GEOMETRIES, random_tensors

A = replace(GEOMETRIES["times 2 and 4, attention bias"], tied=False, head_bias=True)


class Recording(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.read: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def part(block: int | None) -> Recording:
    rows = [row for row in parameters(A) if row.block == block]
    return Recording({row.local or row.name: random_tensors(A)[row.name] for row in rows})


@pytest.mark.parametrize("block", [None, 0, 1])
def test_every_parameter_of_the_table_is_read_once(block: int | None) -> None:
    tensors = part(block)
    if block is None:
        build_ends(A, tensors)
    else:
        build_block(A, block, tensors)
    assert sorted(tensors.read) == sorted(tensors)


def test_a_missing_or_misshapen_tensor_is_named() -> None:
    tensors = dict(part(1))
    removed = tensors.pop("self_attn.qk_norm.temp")
    with pytest.raises(LayoutError, match=r"model\.layers\.1\.self_attn\.qk_norm\.temp is missing"):
        build_block(A, 1, tensors)
    tensors["self_attn.qk_norm.temp"] = removed[:1]
    with pytest.raises(LayoutError, match=r"temp has shape \(1,\), this architecture needs \(2,\)"):
        build_block(A, 1, tensors)


def test_supplied_layers_take_the_place_of_tensors() -> None:
    tensors = part(1)
    plain = build_block(A, 1, dict(tensors))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("self_attn.o_", "mlp.experts"))}

    def half(x: Tensor) -> Tensor:
        return plain.attention.output(x) / 2

    def linears(module: str) -> Linear | None:
        return half if module == "self_attn.o_proj" else None

    block = build_block(A, 1, kept, linears=linears, experts=plain.experts)
    assert block.attention.output is half
    assert block.experts is plain.experts


def test_clamped_temperatures_have_to_be_baked_first() -> None:
    with pytest.raises(LayoutError, match="clamp_temp"):
        build_block(replace(A, clamp_temp=True), 0, part(0))


def test_protected_vectors_stay_float32_in_a_bfloat16_block() -> None:
    block = build_block(A, 1, part(1), dtype=torch.bfloat16)
    assert torch.equal(block.attention.temperature, part(1)["self_attn.qk_norm.temp"])
    assert torch.equal(block.router.balancing, part(1)["mlp.gate.balancing_biases"])
