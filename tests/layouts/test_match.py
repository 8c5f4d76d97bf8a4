"""Every kind of tensor that is missing, surplus, misplaced or wrong is named, with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.synthetic import LAYOUTS, config_of, header, headers, small
from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.match import Match, match, require
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW, SMOE
from zaya_tools.parameters import Role, parameters
from zaya_tools.tensors import TensorInfo

A = small(blocks=3, experts=11)
FC1 = "model.layers.{half}.zaya_block.experts.local_experts.{expert}.linear_fc1.weight"
Headers = dict[str, TensorInfo]


def raw_headers(architecture: Architecture = A) -> Headers:
    return headers(RAW, architecture)


def read(stored: Headers, layout: Layout = RAW, architecture: Architecture = A, **config: Any) -> Match:
    return match(stored, {**config_of(layout, architecture), **config})


def refused(found: Match) -> str:
    """The first line that a user of `convert` sees, and that there is one line and a hint."""
    with pytest.raises(LayoutError) as caught:
        require(found)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value.message


def rename(stored: Headers, old: str, new: str) -> Headers:
    return {name.replace(old, new): header(name.replace(old, new), t.shape) for name, t in stored.items()}


def test_a_complete_match_is_handed_through() -> None:
    found = read(raw_headers())
    assert require(found) is found


@pytest.mark.parametrize("expert", [0, 5, 10])
@pytest.mark.parametrize("matrix", ["linear_fc1", "linear_fc2"])
def test_a_missing_expert_is_named(expert: int, matrix: str) -> None:
    stored = raw_headers()
    name = f"model.layers.3.zaya_block.experts.local_experts.{expert}.{matrix}.weight"
    del stored[name]
    found = read(stored)
    assert found.missing == (name,)
    assert refused(found) == f"1 tensor is missing for 3 blocks of 11 experts: {name}"


def test_experts_that_were_renumbered_past_a_missing_one_are_still_missed() -> None:
    # A converter that counts files would see 10 experts and shift the later ones.
    stored = {name: t for name, t in raw_headers().items() if ".3.zaya_block.experts.local_experts.4." not in name}
    found = read(stored)
    assert len(found.missing) == 2
    assert all(".local_experts.4." in name for name in found.missing)


@pytest.mark.parametrize("half", range(6))
def test_a_missing_half_layer_is_named(half: int) -> None:
    stored = {name: t for name, t in raw_headers().items() if not name.startswith(f"model.layers.{half}.")}
    gone = raw_headers().keys() - stored.keys()
    found = read(stored)
    assert set(found.missing) == gone
    assert f"{len(gone)} tensors are missing for 3 blocks" in refused(found)
    assert f"model.layers.{half}." in refused(found)


def test_the_last_block_is_missing_even_though_the_tensors_are_a_shorter_model() -> None:
    stored = {
        name: t for name, t in raw_headers().items() if not name.startswith(("model.layers.4.", "model.layers.5."))
    }
    assert set(read(stored).missing) == raw_headers().keys() - stored.keys()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_one_missing_tensor_is_named(layout: Layout) -> None:
    architecture = small(attention_bias=True, tied=False)
    complete = headers(layout, architecture)
    for name in complete:
        stored = {key: tensor for key, tensor in complete.items() if key != name}
        found = read(stored, layout, architecture)
        assert found.missing == (name,)
        assert name in refused(found)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_one_wrong_shape_is_named(layout: Layout) -> None:
    architecture = small(attention_bias=True, tied=False)
    complete = headers(layout, architecture)
    for name, tensor in complete.items():
        grown = header(name, (*tensor.shape[:-1], tensor.shape[-1] + 1))
        # Either a geometry that contradicts the config, or a shape that contradicts the table.
        with pytest.raises(LayoutError) as caught:
            require(read({**complete, name: grown}, layout, architecture))
        assert name in caught.value.message or "the tensors" in caught.value.message, name
        flat = header(name, (tensor.numel,)) if len(tensor.shape) > 1 else header(name, (1, tensor.numel))
        with pytest.raises(LayoutError) as caught:
            require(read({**complete, name: flat}, layout, architecture))
        assert f"{name} has shape {list(flat.shape)}, expected {list(tensor.shape)}" in caught.value.message


def test_an_attention_half_layer_where_a_moe_one_should_be() -> None:
    stored = rename(rename(rename(raw_headers(), ".layers.2.", ".layers.x."), ".layers.3.", ".layers.2."),
                    ".layers.x.", ".layers.3.")  # fmt: skip
    found = read(stored)
    assert "half-layer 2 holds MoE tensors where an attention half-layer should be" in refused(found)
    assert any("half-layer 3 holds attention tensors where a MoE half-layer should be" in p for p in found.problems)


@pytest.mark.parametrize("layout", [RAW, SMOE, NATIVE_PER_EXPERT], ids=["raw", "smoe", "native per expert"])
def test_experts_beyond_the_last_are_named(layout: Layout) -> None:
    stored = headers(layout, A)
    extra = {name.replace(".10.", ".11."): header(name.replace(".10.", ".11."), tensor.shape)
             for name, tensor in stored.items() if "experts.10." in name}  # fmt: skip
    found = read({**stored, **extra}, layout)
    assert set(found.surplus) == extra.keys()
    assert f"{len(extra)} tensors have no place in a model of 3 blocks and 11 experts" in refused(found)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("model.layers.2.self_attn.qkv.linear_qq.weight", "model.layers.2.self_attn.qkv.linear_q.weight"),
        ("model.layers.2.input_norms.weight", "model.layers.2.input_norm.weight"),
        (
            "model.layers.3.zaya_block.router.router_mlp.5.weight",
            "model.layers.3.zaya_block.router.router_mlp.4.weight",
        ),
    ],
)
def test_an_unknown_name_is_shown_with_the_nearest_known_one(wrong: str, right: str) -> None:
    stored = raw_headers()
    stored[wrong] = header(wrong, stored.pop(right).shape)
    found = read(stored)
    assert found.surplus == (wrong,)
    assert found.missing == (right,)
    assert f"1 tensor has no place in a model of 3 blocks and 11 experts: {wrong}" in refused(found)
    assert f"nearest known name: {right}" in refused(found)


def test_a_name_like_nothing_known_is_shown_alone() -> None:
    found = read({**raw_headers(), "ema.step": header("ema.step", (1,))})
    assert refused(found) == "1 tensor has no place in a model of 3 blocks and 11 experts: ema.step"


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod.", "module.model."])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_prefix_on_every_name_is_said(layout: Layout, prefix: str) -> None:
    stored = {prefix + name: header(prefix + name, t.shape) for name, t in headers(layout, A).items()}
    found = read(stored, layout)
    assert f"tensor names carry the prefix {prefix!r}" in refused(found)


@pytest.mark.parametrize("prefix", ["model.", "module."])
def test_one_tensor_under_a_second_prefix_is_two_tensors(prefix: str) -> None:
    name = FC1.format(half=3, expert=2)
    stored = {**raw_headers(), prefix + name: header(prefix + name, raw_headers()[name].shape)}
    assert f"one tensor under two names: {name} and {prefix}{name}" in refused(read(stored))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("model.norm.weight", "model.final_norm.weight"),
        ("model.layers.1.mlp.gate.router_mlp.norm.weight", "model.layers.1.mlp.gate.router_mlp.rmsnorm_eda.weight"),
        ("model.layers.1.mlp.gate.down_proj.weight", "model.layers.1.mlp.router.down_proj.weight"),
        ("model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj.weight"),
    ],
)
def test_both_spellings_of_one_tensor_are_refused(one: str, other: str) -> None:
    stored = headers(NATIVE, A)
    stored[other] = header(other, stored[one].shape)
    message = refused(read(stored, NATIVE))
    assert "one tensor under two names" in message
    assert one in message
    assert other in message


@pytest.mark.parametrize("block", ["zaya_block", "smoe_block"])
def test_what_trainers_leave_behind_is_dropped_with_a_reason(block: str) -> None:
    layout = RAW if block == "zaya_block" else SMOE
    stored = headers(layout, A)
    leftovers = {f"model.layers.1.{block}.router.router_states_scale": "first router"}
    for half in (1, 3, 5):
        for kind in ("m", "v", "step"):
            leftovers[f"model.layers.{half}.{block}.router.balance_{kind}"] = "optimiser"
    leftovers["model.layers.2.self_attn.rotary_emb.inv_freq"] = "rotary"
    stored |= {name: header(name, (8,), "F32") for name in leftovers}
    found = require(read(stored, layout))
    assert found.surplus == ()
    assert found.drops.keys() == leftovers.keys()
    for name, word in leftovers.items():
        assert word in found.drops[name]


def test_the_unused_scale_of_a_native_first_router_is_dropped() -> None:
    names = ("model.layers.0.mlp.gate.router_states_scale", "model.layers.1.mlp.tokens_per_expert")
    stored = {**headers(NATIVE, A), **{name: header(name, (8,)) for name in names}}
    assert require(read(stored, NATIVE)).drops.keys() == set(names)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_stored_head_of_a_tied_model_is_an_alias(layout: Layout) -> None:
    head = header("lm_head.weight", (A.vocab_size, A.hidden_size))
    found = require(read({**headers(layout, A), "lm_head.weight": head}, layout))
    assert found.head_alias is head
    assert dict(found.drops) == {}


@pytest.mark.parametrize("dtype", ["I64", "F64", "U8", "F8_E4M3", "BOOL"])
def test_only_16_and_32_bit_floats_are_trained_weights(dtype: str) -> None:
    for parameter in parameters(small()):
        (part, *_) = RAW.parts(parameter, small())
        stored = {**headers(RAW, small()), part.name: header(part.name, part.shape, dtype)}
        message = refused(read(stored, RAW, small()))
        assert f"{part.name} is {dtype}" in message


def fp8(stored: Headers, names: list[str], suffix: str = "weight_scale") -> Headers:
    """These matrices in FP8 with a scale a row."""
    result = dict(stored)
    for name in names:
        shape = stored[name].shape
        scale = f"{name.removesuffix('.weight')}.{suffix}"
        result[name] = header(name, shape, "F8_E4M3")
        result[scale] = header(scale, (*shape[:-1], 1), "F32")
    return result


def expert_names(layout: Layout, architecture: Architecture = A) -> list[str]:
    return [
        part.name for p in parameters(architecture) if p.role is Role.EXPERT for part in layout.parts(p, architecture)
    ]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_quantized_experts_are_complete_with_their_scales(layout: Layout) -> None:
    stored = fp8(headers(layout, A), expert_names(layout))
    found = require(read(stored, layout))
    assert found.quantized
    experts = [bound for p in parameters(A) if p.role is Role.EXPERT for bound in found.bound[p.name]]
    assert all(bound.quantized and set(bound.companions) == {"weight_scale"} for bound in experts)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_missing_scale_is_named(layout: Layout) -> None:
    name = expert_names(layout)[0]
    scale = f"{name.removesuffix('.weight')}.weight_scale"
    stored = fp8(headers(layout, A), expert_names(layout))
    del stored[scale]
    assert f"{name} is F8_E4M3 but there is no {scale} beside it" in refused(read(stored, layout))


@pytest.mark.parametrize("layout", [RAW, NATIVE_PER_EXPERT], ids=["raw", "native per expert"])
def test_an_input_scale_does_not_stand_for_the_weights_scale(layout: Layout) -> None:
    stored = fp8(headers(layout, A), expert_names(layout), suffix="input_scale")
    assert "there is no" in refused(read(stored, layout))


@pytest.mark.parametrize("layout", [RAW, NATIVE_PER_EXPERT], ids=["raw", "native per expert"])
def test_packed_weights_stand_in_for_the_plain_ones(layout: Layout) -> None:
    stored = headers(layout, A)
    for name in expert_names(layout):
        rows, columns = stored.pop(name).shape
        base = name.removesuffix("weight")
        for suffix, shape, dtype in (
            ("weight_packed", (rows, columns // 8), "I32"),
            ("weight_scale", (rows, columns // 16), "BF16"),
            ("weight_shape", (2,), "I64"),
        ):
            stored[base + suffix] = header(base + suffix, shape, dtype)  # fmt: skip
    assert require(read(stored, layout)).quantized
    first = expert_names(layout)[0].removesuffix("weight")
    packed_alone = {name: t for name, t in stored.items() if name != f"{first}weight_scale"}
    assert f"{first}weight_packed is I32 but there is no {first}weight_scale" in refused(read(packed_alone, layout))
    scale_alone = {name: t for name, t in stored.items() if name != f"{first}weight_packed"}
    assert f"{first}weight" in refused(read(scale_alone, layout))
    both = {**stored, f"{first}weight": header(f"{first}weight", (64, 32))}
    assert "one tensor in two forms" in refused(read(both, layout))


@pytest.mark.parametrize("layout", [RAW, NATIVE_PER_EXPERT], ids=["raw", "native per expert"])
def test_one_expert_stored_unlike_the_others_is_named(layout: Layout) -> None:
    names = expert_names(layout)
    odd = names[7]
    stored = fp8(headers(layout, A), [name for name in names if name != odd])
    assert f"{odd} is not quantized as the other experts of its block are" in refused(read(stored, layout))
    extra = f"{odd.removesuffix('.weight')}.input_scale"
    stored = {**fp8(headers(layout, A), names), extra: header(extra, (1,), "F32")}
    assert f"{odd} is not quantized as the other experts of its block are" in refused(read(stored, layout))


def test_a_protected_tensor_has_no_scale() -> None:
    name = "model.layers.1.zaya_block.router.down_proj.weight_scale"
    assert read({**raw_headers(), name: header(name, (8, 1))}).surplus == (name,)


def test_several_problems_are_counted() -> None:
    stored = raw_headers()
    del stored["model.final_norm.weight"]
    stored["model.layers.0.input_norm.weight"] = header("model.layers.0.input_norm.weight", (1,))
    stored["what.is.this"] = header("what.is.this", (1,))
    found = read(stored)
    assert len(found.problems) == 3
    assert "(and 2 more problems)" in refused(found)


REFUSED = {
    "vision tower": ("vision_tower.blocks.0.attn.qkv.weight", "vision"),
    "nested vision tower": ("model.vision_tower.blocks.0.attn.qkv.weight", "vision"),
    "vision language text": ("model.layers.0.attn.self_attn.qkv.linear_q.weight", "VL"),
    "vision adapter": ("model.layers.0.mlp.zaya_block.experts.local_experts.0.lora_fc1.0.weight", "VL"),
    "mlx": ("model.layers.1.zaya_block.experts.switch_mlp.gate_proj.weight", "MLX"),
}


@pytest.mark.parametrize(("name", "word"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "among raw names"])
def test_other_kinds_of_checkpoint_are_refused_in_words(name: str, word: str, alone: bool) -> None:
    stored = {**({} if alone else raw_headers()), name: header(name, (8, 8))}
    with pytest.raises(LayoutError, match=word) as caught:
        read(stored)
    assert name in caught.value.message
    assert caught.value.hint


def test_two_layouts_in_one_folder_are_refused() -> None:
    with pytest.raises(LayoutError, match="more than one layout") as caught:
        read({**headers(NATIVE, A), **raw_headers()})
    assert "(raw)" in caught.value.message
    assert "(native)" in caught.value.message


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.self_attn.linear_q.weight", "module.decoder.layers.1.zaya_block.router.down_proj.weight"]
)
def test_a_trainers_names_among_raw_ones_are_refused(name: str) -> None:
    with pytest.raises(LayoutError, match="more than one layout") as caught:
        read({**raw_headers(), name: header(name, (8, 8))})
    assert f"{name} (megatron)" in caught.value.message


@pytest.mark.parametrize(
    "names",
    [[], ["transformer.h.0.attn.weight"], ["model.embed_tokens.weight"], ["decoder.layers.0.mlp.linear_fc1.weight"]],
    ids=str,
)
def test_other_models_are_refused(names: list[str]) -> None:
    with pytest.raises(LayoutError, match=f"no ZAYA1 tensors among {len(names)} names"):
        read({name: header(name, (8, 8)) for name in names})


def test_only_one_of_many_unknown_names_is_compared_with_all_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[str] = []

    def close_matches(name: str, known: object, **_: object) -> list[str]:
        looked_for.append(name)
        return []

    monkeypatch.setattr("zaya_tools.layouts.match.difflib.get_close_matches", close_matches)
    unknown = {f"mystery.{number}": header(f"mystery.{number}", (1,)) for number in range(50)}
    found = read({**raw_headers(), **unknown})
    assert set(found.surplus) == unknown.keys()
    assert len(looked_for) == 1
