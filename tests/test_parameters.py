"""The table, against transformers' own model and the published counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.synthetic import GEOMETRIES, LAYOUTS, ZAYA1_8B, ZAYA1_74B, small
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import BLOCK_NAMES, PROTECTED, TOP_NAMES, Parameter, Role, active, parameters, total


@lru_cache(maxsize=32)
def in_transformers(architecture: Architecture) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that ZayaForCausalLM saves, built without memory."""
    from transformers import ZayaConfig, ZayaForCausalLM

    with torch.device("meta"):
        model = ZayaForCausalLM._from_config(ZayaConfig(**native_config(architecture)), dtype=torch.bfloat16)
    state = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    if architecture.tied:
        # The head is the embedding under a second name, which save_pretrained leaves out.
        assert state.pop("lm_head.weight") == state["model.embed_tokens.weight"]
    return state


ODD: dict[str, dict[str, Any]] = {**GEOMETRIES, "head bias": {"tied": False, "head_bias": True},
                                  "tied head with bias": {"head_bias": True}}  # fmt: skip


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_names_shapes_and_types_are_those_of_transformers(fields: dict[str, Any]) -> None:
    architecture = small(**fields)
    table = {p.name: (p.shape, torch.float32 if p.float32 else torch.bfloat16) for p in parameters(architecture)}
    assert table == in_transformers(architecture)


@pytest.mark.parametrize("architecture", [ZAYA1_8B, ZAYA1_74B], ids=["8B", "74B"])
def test_the_released_widths_are_those_of_transformers(architecture: Architecture) -> None:
    # Three blocks: a first one, one in the middle, a last one.
    short = replace(architecture, blocks=3, sliding=architecture.sliding[:3])
    assert {p.name: p.shape for p in parameters(short)} == {
        n: shape for n, (shape, _) in in_transformers(short).items()
    }


@pytest.mark.parametrize(
    ("architecture", "native", "raw", "numbers"),
    [(ZAYA1_8B, 1283, 2483, 8_840_489_464), (ZAYA1_74B, 1923, 4683, 74_793_954_644)],
    ids=["8B", "74B"],
)
def test_the_released_models_have_the_published_counts(
    architecture: Architecture, native: int, raw: int, numbers: int
) -> None:
    table = parameters(architecture)
    assert len(table) == native
    assert sum(len(RAW.parts(parameter, architecture)) for parameter in table) == raw
    assert total(architecture) == numbers


def test_a_native_8b_has_the_published_bytes() -> None:
    # 2 bytes each; float32 balancing biases add 2 bytes for each of 40 * 17.
    stored = sum(p.numel * (4 if p.float32 else 2) for p in parameters(ZAYA1_8B))
    assert stored == 17_680_978_928 + 1_360


@pytest.mark.parametrize("fields", ODD.values(), ids=ODD)
def test_one_expert_of_each_block_is_active(fields: dict[str, Any]) -> None:
    architecture = small(**fields)
    one_expert = replace(architecture, experts=1)
    # The router's last matrix and the biases have a row an expert, and all of them take part.
    routed = architecture.blocks * (architecture.experts - 1) * (architecture.router_width + 1)
    assert active(architecture) == total(one_expert) + routed


def test_protected_roles_are_all_but_matrices_and_ends() -> None:
    assert set(Role) - PROTECTED == {Role.EMBEDDING, Role.ATTENTION, Role.EXPERT, Role.HEAD}
    for parameter in parameters(small(tied=False, attention_bias=True, head_bias=True)):
        assert parameter.protected is (parameter.role in PROTECTED)


def role_by_module(name: str) -> Role:
    """What a parameter is by the transformers module that owns it."""
    path = name.split(".")
    if "gate" in path:
        return Role.BALANCING if path[-1] == "balancing_biases" else Role.ROUTER
    for module, role in (
        ("embed_tokens", Role.EMBEDDING),
        ("lm_head", Role.HEAD),
        ("experts", Role.EXPERT),
        ("conv_qk_depthwise", Role.CONVOLUTION),
        ("conv_qk_grouped", Role.CONVOLUTION),
        ("qk_norm", Role.TEMPERATURE),
        ("self_attn", Role.ATTENTION),
        ("input_layernorm", Role.NORM),
        ("post_attention_layernorm", Role.NORM),
        ("norm", Role.NORM),
    ):
        if module in path:
            return role
    return Role.RESIDUAL


def test_every_role_is_that_of_the_module_that_owns_the_parameter() -> None:
    table = parameters(small(tied=False, head_bias=True, attention_bias=True))
    assert {p.name: p.role for p in table} == {p.name: role_by_module(p.name) for p in table}
    assert {p.role for p in table} == set(Role)


def test_only_balancing_biases_are_float32() -> None:
    assert {p.role for p in parameters(ZAYA1_8B) if p.float32} == {Role.BALANCING}


def test_local_names_are_the_names_inside_a_block() -> None:
    table = parameters(small(blocks=12, tied=False, head_bias=True, attention_bias=True))

    def inside(parameter: Parameter) -> str:
        return parameter.name if parameter.block is None else f"model.layers.{parameter.block}.{parameter.local}"

    assert all(p.name == inside(p) for p in table)
    assert Counter(p.block for p in table)[11] == len(BLOCK_NAMES)
    assert {p.name for p in table if p.block is None} == set(TOP_NAMES)
    assert {p.local for p in table if p.block is not None} == set(BLOCK_NAMES)
    assert [p.block for p in table if p.block is not None] == sorted(p.block for p in table if p.block is not None)


def test_the_first_router_has_no_earlier_state_to_scale() -> None:
    scaled = [p.block for p in parameters(small(blocks=4)) if p.local == "mlp.gate.router_states_scale"]
    assert scaled == [1, 2, 3]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_table_has_one_parameter_a_name(layout: Any) -> None:
    architecture = small(blocks=3, tied=False, head_bias=True, attention_bias=True)
    names = Counter(part.name for p in parameters(architecture) for part in layout.parts(p, architecture))
    assert set(names.values()) == {1}
