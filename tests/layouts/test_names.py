"""The names of every layout: unique, complete, in the order that concatenation needs."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.by_hand import by_hand
from tests.reference.raw_random import example_configs, random_raw
from tests.strategies import architectures
from tests.synthetic import GEOMETRIES, LAYOUTS, config_of, header, headers, small
from zaya_tools.architecture import Architecture
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.detect import RAW_FAMILY
from zaya_tools.layouts.match import match
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW, SMOE
from zaya_tools.parameters import Role, parameters


@settings(max_examples=60, deadline=None)
@given(architectures(max_experts=13), st.sampled_from(list(LAYOUTS.values())))
def test_parts_cut_every_parameter_without_overlap_or_gap(architecture: Architecture, layout: Layout) -> None:
    seen: set[str] = set()
    for parameter in parameters(architecture):
        # Every element numbered: the parts, one after another, have to give the numbers back in order.
        flat = np.arange(parameter.numel)
        position = 0
        for part in layout.parts(parameter, architecture):
            assert part.name not in seen
            seen.add(part.name)
            size = int(np.prod(part.shape))
            assert size > 0
            stretch = flat[position : position + size].reshape(part.shape)
            assert stretch.flat[0] == position
            if part.expert is not None:
                # A part of an expert lies inside that expert's row of the stacked parameter.
                each = parameter.numel // architecture.experts
                assert position // each == (position + size - 1) // each == part.expert
            position += size
        assert position == parameter.numel
    assert layout.count_blocks(sorted(seen)) == architecture.blocks


@settings(max_examples=40, deadline=None)
@given(architectures(), st.sampled_from(list(LAYOUTS.values())))
def test_single_tensors_are_found_under_their_local_name(architecture: Architecture, layout: Layout) -> None:
    for parameter in parameters(architecture):
        last = parameter.block == architecture.blocks - 1 and parameter.local.startswith("post_mlp_residual_scale.")
        if parameter.block is None or parameter.role is Role.EXPERT or (last and layout in RAW_FAMILY):
            continue
        (part,) = layout.parts(parameter, architecture)
        assert layout.local_name(parameter.local, parameter.block) == part.name


@pytest.mark.parametrize("layout", [RAW, SMOE, NATIVE_PER_EXPERT], ids=["raw", "smoe", "native per expert"])
@pytest.mark.parametrize("experts", [1, 2, 10, 11, 24, 101])
def test_experts_are_in_the_order_of_their_numbers(layout: Layout, experts: int) -> None:
    architecture = small(experts=experts)
    for parameter in parameters(architecture):
        if parameter.role is not Role.EXPERT:
            continue
        found: dict[int, list[str]] = defaultdict(list)
        for part in layout.parts(parameter, architecture):
            numbered = re.search(r"experts\.(\d+)\.", part.name)
            assert numbered
            assert part.expert == int(numbered[1])
            found[part.expert].append(part.name)
        assert list(found) == list(range(experts))  # 10 after 9, not after 1


def test_gate_rows_come_before_up_rows() -> None:
    architecture = small()
    parts = NATIVE_PER_EXPERT.parts(next(p for p in parameters(architecture) if p.name.endswith("gate_up_proj")),
                                    architecture)  # fmt: skip
    kinds = [part.name.split(".")[-2] for part in parts]
    assert kinds == ["gate_proj", "up_proj"] * architecture.experts


@pytest.mark.parametrize("fields", GEOMETRIES.values(), ids=GEOMETRIES)
def test_raw_and_smoe_names_are_the_published_ones(fields: dict[str, Any]) -> None:
    architecture = small(**fields)
    expected = by_hand(architecture.blocks, architecture.experts)
    for parameter in parameters(architecture):
        raw = [part.name for part in RAW.parts(parameter, architecture)]
        smoe = [part.name for part in SMOE.parts(parameter, architecture)]
        assert raw == expected[parameter.name]
        assert smoe == [name.replace(".zaya_block.", ".smoe_block.") for name in raw]


@pytest.mark.parametrize("name", sorted(example_configs()))
def test_names_and_shapes_are_those_that_the_reference_makes(name: str) -> None:
    config = example_configs()[name]
    tensors = {key: tuple(tensor.shape) for key, tensor in random_raw(config, seed=0).items()}
    found = match({key: header(key, shape) for key, shape in tensors.items()}, config)
    assert found.problems == ()
    parts = [part for p in parameters(found.architecture) for part in found.layout.parts(p, found.architecture)]
    assert {part.name: part.shape for part in parts} == tensors


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_complete_checkpoint_is_recognised_and_accounted_for(layout: Layout) -> None:
    architecture = small(attention_bias=True, tied=False)
    found = match(headers(layout, architecture), config_of(layout, architecture))
    assert found.layout is layout
    assert (found.problems, found.missing, found.surplus, dict(found.drops)) == ((), (), (), {})
    assert not found.renamed
    assert not found.quantized


SPELLINGS: dict[str, list[tuple[str, str]]] = {
    "snapshot's final norm": [("model.norm.", "model.final_norm.")],
    "snapshot's router norm": [(".router_mlp.norm.", ".router_mlp.rmsnorm_eda.")],
    "both": [("model.norm.", "model.final_norm."), (".router_mlp.norm.", ".router_mlp.rmsnorm_eda.")],
    "prime-rl": [("model.norm.", "model.final_norm."), (".router_mlp.norm.", ".router_mlp.rmsnorm_eda."),
                 (".mlp.gate.", ".mlp.router.")],
    "experts with .weight": [("gate_up_proj", "gate_up_proj.weight"),
                             ("experts.down_proj", "experts.down_proj.weight")],
}  # fmt: skip


@pytest.mark.parametrize("changes", SPELLINGS.values(), ids=SPELLINGS)
def test_in_between_spellings_are_native(changes: list[tuple[str, str]]) -> None:
    architecture = small()
    stored = {}
    for name, tensor in headers(NATIVE, architecture).items():
        for new, old in changes:
            name = name.replace(new, old)  # noqa: PLW2901
        stored[name] = header(name, tensor.shape)
    found = match(stored, config_of(NATIVE, architecture))
    assert found.problems == ()
    assert found.layout is NATIVE
    assert found.renamed
    assert {bound.tensor.name for parts in found.bound.values() for bound in parts if bound.tensor} == set(stored)
