"""Recipes applied to geometries: who gets what, which rule wins, and what cannot be served."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quantization.test_recipe import ATTENTION, EXPERTS, read
from tests.strategies import architectures
from tests.synthetic import ZAYA1_8B, ZAYA1_74B, small
from zaya_tools.architecture import Architecture
from zaya_tools.evaluation.units import all_units
from zaya_tools.layouts.match import QUANTIZABLE
from zaya_tools.quantization.recipe import Recipe, RecipeError, Rule, load_recipe, recipe_names
from zaya_tools.quantization.resolve import Resolved, matrices, quantizable, resolve
from zaya_tools.quantization.scheme import SCHEMES, Scheme
from zaya_tools.quantization.words import PROJECTIONS, ROLES, Blocks

TINY = Architecture(
    blocks=4, hidden_size=128, query_heads=4, kv_heads=2, head_dim=32, experts=8, expert_width=128, router_width=64,
    vocab_size=320,
)  # fmt: skip
"""The geometry of the bundled model: value projections of 32 rows."""


def named(name: str) -> str:
    return f"model.layers.{name}"


def refused(recipe: Recipe, architecture: Architecture, **options: Any) -> tuple[str, str]:
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, architecture, **options)
    assert caught.value.hint
    return caught.value.message, caught.value.hint


def scheme(resolved: Resolved, name: str) -> str:
    return found.name if (found := resolved.decisions[name].scheme) else "none"


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("bf16", (128, 128)), ("fp8", (128, 128)), ("fp8-experts", (128, 128)), ("int8", (128, 128)),
        ("fp8-block", (16, 32)), ("int4", (16, 32)), ("int4-experts-fp8-attention", (16, 32)), ("int4-g32", (64, 128)),
        ("mxfp4", (64, 128)), ("nvfp4a16", (128, 128)),
    ],
)  # fmt: skip
def test_the_published_models(name: str, largest: tuple[int, int]) -> None:
    recipe = load_recipe(name)
    for architecture, experts, attention, split in (
        (ZAYA1_8B, 1920, 200, largest[0]),
        (ZAYA1_74B, 4320, 300, largest[1]),
    ):
        resolved = resolve(recipe, architecture, tensor_parallel=8, target_vllm="0.33.0")
        done = {rule.role for rule in recipe.rules}
        assert resolved.quantized == {
            "experts": (experts if "experts" in done else 0, experts),
            "attention": (attention if "attention" in done else 0, attention),
            "embedding": (0, 1),
        }
        assert [(m.matched, m.decided, m.of) for m in resolved.rules] == [
            (n, n, n) for n in (experts, attention)[: len(recipe.rules)]
        ]
        assert resolved.max_tensor_parallel == split
        assert set(resolved.schemes) == {rule.scheme for rule in recipe.rules}
        document = resolved.as_dict()
        assert json.loads(json.dumps(document)) == document == resolve(
            load_recipe(name), architecture, tensor_parallel=8, target_vllm="0.33.0"
        ).as_dict()  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_the_bundled_model(name: str) -> None:
    resolved = resolve(load_recipe(name), TINY)
    assert resolved.max_tensor_parallel == {"fp8-block": 1, "int4": 1, "int4-experts-fp8-attention": 1, "bf16": 64,
                                            "int4-imatrix": 1, "int4-gptq": 1, "int4-awq": 1,
                                            "mxfp4": 4, "int4-g32": 4}.get(name, 8)  # fmt: skip


@given(architectures())
def test_what_may_be_quantized_is_what_layouts_expect(architecture: Architecture) -> None:
    own = quantizable(architecture)
    assert frozenset(ROLES.values()) == QUANTIZABLE
    units = [u for u in all_units(architecture) if u.parameter.role in QUANTIZABLE and len(u.parameter.shape) > 1]
    assert sum(map(matrices, own)) == len(units)
    resolved = resolve(Recipe("mine", "", "", ()), architecture)
    assert list(resolved.decisions) == [p.name for p in own]
    assert all(d.scheme is None and d.index is None for d in resolved.decisions.values())


def test_a_single_projection_and_blocks(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        {**ATTENTION, "projections": "k_proj", "scheme": "none"},
        {**ATTENTION, "blocks": "1-2", "scheme": "fp8"},
        {"role": "attention", "scheme": "int4"},
        {**EXPERTS, "blocks": [0, "3-"]},
    )
    resolved = resolve(recipe, TINY)
    got = [scheme(resolved, named(f"{b}.self_attn.qkv_proj.q_proj.weight")) for b in range(4)]
    assert got == ["int4", "fp8", "fp8", "int4"], "blocks win over a later rule without"
    got = [scheme(resolved, named(f"{b}.self_attn.qkv_proj.k_proj.weight")) for b in range(4)]
    assert got == ["none"] * 4, "a projection wins over blocks"
    got = [scheme(resolved, named(f"{b}.mlp.experts.down_proj")) for b in range(4)]
    assert got == ["fp8", "none", "none", "fp8"]
    assert [(m.matched, m.decided, m.of) for m in resolved.rules] == [
        (4, 4, 20), (10, 8, 20), (20, 8, 20), (48, 48, 96),
    ]  # fmt: skip
    assert resolved.quantized == {"experts": (48, 96), "attention": (16, 20), "embedding": (0, 1)}
    assert resolved.decisions[named("1.self_attn.o_proj.weight")].rule == "attention, blocks 1-2: fp8"


def test_a_later_rule_wins_over_one_that_is_as_specific(tmp_path: Path) -> None:
    recipe = read(tmp_path, {"role": "experts", "scheme": "int8"}, extends="fp8")
    resolved = resolve(recipe, TINY)
    assert {s.name for s in resolved.schemes} == {"fp8", "int8"}
    assert [m.decided for m in resolved.rules] == [0, 20, 96]
    assert scheme(resolved, named("0.mlp.experts.gate_up_proj")) == "int8"


RULES = st.builds(
    Rule,
    role=st.just("attention"),
    scheme=st.sampled_from([SCHEMES["fp8"], SCHEMES["int8"], None]),
    observer=st.just("minmax"),
    blocks=st.none() | st.integers(0, 3).map(lambda n: Blocks(((n, None),))),
    projections=st.none() | st.sampled_from(PROJECTIONS).map(lambda p: (p,)),
)


@given(st.lists(RULES, max_size=6))
def test_the_order_of_rules(rules: list[Rule]) -> None:
    resolved = resolve(Recipe("mine", "", "", tuple(rules)), TINY)
    for block in range(4):
        for projection in PROJECTIONS:
            prefix = "" if projection == "o_proj" else "qkv_proj."
            decision = resolved.decisions[named(f"{block}.self_attn.{prefix}{projection}.weight")]
            own = [
                (r.projections is not None, r.blocks is not None, n)
                for n, r in enumerate(rules)
                if (r.blocks is None or block in r.blocks) and (r.projections is None or projection in r.projections)
            ]
            assert decision.index == (max(own)[2] if own else None)
            assert decision.scheme == (rules[max(own)[2]].scheme if own else None)
    assert sum(m.decided for m in resolved.rules) == sum(d.index is not None for d in resolved.decisions.values())


def test_rules_that_match_nothing(tmp_path: Path) -> None:
    message, hint = refused(read(tmp_path, {**EXPERTS, "blocks": "2-7"}), TINY)
    assert "rule `experts, blocks 2-7: fp8` names block 7, which this model lacks" in message
    assert "blocks 0-3" in hint
    message, _ = refused(read(tmp_path, {**EXPERTS, "blocks": "4-"}), TINY)
    assert "names block 4" in message
    message, hint = refused(read(tmp_path, {"role": "head", "blocks": 0, "scheme": "fp8"}), replace(TINY, tied=False))
    assert "matches nothing: the head is in no block" in message


@pytest.mark.parametrize("role", ["head", "embedding"])
@pytest.mark.parametrize("stated", ["fp8", "int4", "none"])
def test_a_tied_head_stays_as_it_is(tmp_path: Path, role: str, stated: str) -> None:
    message, hint = refused(read(tmp_path, {"role": role, "scheme": stated}, extends="fp8"), TINY)
    assert "the output head is tied to the embedding" in message
    assert "untied" in hint


UNTIED = replace(TINY, tied=False, vocab_size=384)


def test_an_untied_head_and_embedding(tmp_path: Path) -> None:
    for name in SCHEMES:
        recipe = read(tmp_path, {"role": "head", "scheme": name}, extends="fp8")
        if name == "fp8-block":
            message, hint = refused(recipe, UNTIED)
            assert "does not fit lm_head.weight: vLLM cuts the output head by vocabulary rows" in message
            assert "fp8, int8, int4" in hint
            continue
        resolved = resolve(recipe, UNTIED)
        assert scheme(resolved, "lm_head.weight") == name
        assert resolved.quantized["head"] == (1, 1)
    for name in SCHEMES:
        recipe = read(tmp_path, {"role": "embedding", "scheme": name}, extends="fp8")
        if name.startswith("int4"):
            assert scheme(resolve(recipe, UNTIED), "model.embed_tokens.weight") == name
        else:
            message, hint = refused(recipe, UNTIED)
            assert "does not fit model.embed_tokens.weight: vLLM looks embeddings up in INT4" in message
            assert hint.endswith(": int4, int4-g32, none")


@pytest.mark.parametrize(
    ("fields", "stated", "message", "fitting"),
    [
        ({"expert_width": 96}, "int4", "96 columns are not a multiple of 128, and groups of 128", "fp8, int8"),
        ({"expert_width": 96}, "fp8-block", "gate and up have 96 rows each, not a multiple of 128", "fp8, int8"),
        ({"hidden_size": 64}, "fp8-block", "and 128x128 blocks have to divide a row", "fp8, int8, int4-g32"),
        ({"expert_width": 40}, "mxfp4", "its 40 columns are not a multiple of 32", "none"),
        ({"expert_width": 40}, "nvfp4a16", "its 40 columns are not a multiple of 16", "none"),
        ({"expert_width": 20}, {"kind": "int4", "group": -1}, "its 20 columns are not a multiple of 8", "none"),
        ({"expert_width": 40}, "fp8", "its 40 columns are not a multiple of 16, and kernels read rows", "none"),
        ({"hidden_size": 64}, {"kind": "int4", "group": -1}, "a hidden size that is a multiple of 128", "fp8, int8"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(
    tmp_path: Path, fields: dict[str, Any], stated: Any, message: str, fitting: str
) -> None:
    architecture = replace(TINY, **fields)
    said, hint = refused(read(tmp_path, {"role": "experts", "scheme": stated}), architecture)
    assert "rule `experts: " in said
    assert "model.layers.0.mlp.experts." in said
    assert message in said
    offered = hint.removeprefix("schemes that fit all that the rule decides: ")
    assert offered.startswith(fitting)
    for name in offered.split(", "):
        resolve(read(tmp_path, {"role": "experts", "scheme": name}), architecture)


def test_blocks_end_partially_everywhere_but_between_gate_and_up(tmp_path: Path) -> None:
    resolve(read(tmp_path, {"role": "attention", "scheme": "fp8-block"}), TINY)
    recipe = read(tmp_path, {"role": "experts", "scheme": "fp8-block"})
    message, _ = refused(recipe, replace(TINY, expert_width=192))
    assert "gate_up_proj: its gate and up have 192 rows each, not a multiple of 128" in message


@pytest.mark.parametrize(
    ("architecture", "name", "fits", "not_fits"),
    [
        (ZAYA1_8B, "int4", (1, 2, 4, 8, 16), (3, 5, 32)),
        (ZAYA1_8B, "int4-g32", (1, 64), (128,)),
        (replace(TINY, expert_width=96), "int4-g32", (1,), (2, 3, 4)),
        (replace(TINY, expert_width=96, vocab_size=3 * 64), "int4-g32", (1, 3), (2, 6)),
        (TINY, "int4", (1,), (2,)),
        (TINY, "fp8", (1, 2, 4, 8), (16, 3)),
        (TINY, "bf16", (1, 64), (3, 128)),
    ],
)
def test_tensor_parallel_sizes(
    architecture: Architecture, name: str, fits: tuple[int, ...], not_fits: tuple[int, ...]
) -> None:
    recipe = load_recipe(name) if name != "int4-g32" else Recipe("g32", "", "", load_recipe(name).rules[:1])
    for size in fits:
        assert resolve(recipe, architecture, tensor_parallel=size).max_tensor_parallel == max(fits)
    for size in not_fits:
        message, hint = refused(recipe, architecture, tensor_parallel=size)
        assert f"tensor-parallel size {size}" in message
        assert f"the largest size for this recipe and model is --tp {max(fits)}" in hint


def test_the_tensor_parallel_size_says_which_matrix_it_cuts() -> None:
    message, _ = refused(load_recipe("int4"), ZAYA1_8B, tensor_parallel=32)
    assert message == (
        "recipe int4: tensor-parallel size 32 leaves model.layers.0.mlp.experts.down_proj 64 of its 2048 columns, not "
        "a whole number of 128 (rule `experts: int4`)"
    )
    message, _ = refused(load_recipe("bf16"), TINY, tensor_parallel=128)
    assert message == "tensor-parallel size 128 does not divide the padded vocabulary"
    with pytest.raises(RecipeError, match="makes no sense"):
        resolve(load_recipe("bf16"), TINY, tensor_parallel=0)


@given(architectures(), st.sampled_from([*SCHEMES.values(), None]))
def test_a_size_that_is_allowed_keeps_groups_whole(architecture: Architecture, chosen: Scheme | None) -> None:
    recipe = Recipe("mine", "", "", (Rule("experts", chosen, "minmax" if chosen else None),))
    try:
        largest = resolve(recipe, architecture).max_tensor_parallel
    except RecipeError:
        return
    width = architecture.expert_width
    if chosen is not None and chosen.columns:
        assert width % chosen.columns == 0
        assert (width // largest) % chosen.columns == 0
    assert width % largest == 0
    for size in range(1, largest + 1):
        if largest % size == 0:
            assert resolve(recipe, architecture, tensor_parallel=size).tensor_parallel == size


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.33.1", "v0.33", "0.33.0rc1", "0.33.0+cpu"])
def test_targets_that_are_known(version: str) -> None:
    assert resolve(load_recipe("fp8"), TINY, target_vllm=version).target_vllm == version


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.31.2", "too old"), ("0.9", "too old"), ("0.34.0", "newer"), ("1.0", "newer"), ("latest", "not a vLLM version"),
     ("", "not a vLLM version"), ("0.330", "newer"), ("33", "not a vLLM version")],
)  # fmt: skip
def test_targets_that_are_not(version: str, message: str) -> None:
    said, hint = refused(load_recipe("fp8"), TINY, target_vllm=version)
    assert message in said
    assert "0.32 and 0.33" in hint


def test_a_geometry_whose_experts_are_few_and_small() -> None:
    resolved = resolve(load_recipe("int4-g32"), small(blocks=1, experts=1))
    assert resolved.quantized["experts"] == (3, 3)
