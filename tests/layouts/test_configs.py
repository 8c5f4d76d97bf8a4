"""Configs of every style, with the shapes of tensors that only exist as headers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layouts.published import BASE, NATIVE_8B, PUBLISHED, RAW_8B, SMOE_74B, TINY_SCALAR
from tests.reference.raw_random import example_configs, random_raw
from tests.strategies import architectures
from tests.synthetic import GEOMETRIES, LAYOUTS, ZAYA1_8B, ZAYA1_74B, config_of, header, headers, sliding, small
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.geometry import resolve
from zaya_tools.layouts.match import match, require
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW, SMOE
from zaya_tools.layouts.raw_config import raw_config


def read(layout: Layout, config: dict[str, Any], architecture: Architecture) -> Architecture:
    """The geometry of headers of `architecture` beside `config`, with everything accounted for."""
    found = match(headers(layout, architecture), config)
    assert found.problems == ()
    return found.architecture


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_mean_the_published_geometry(name: str) -> None:
    layout, config, architecture = PUBLISHED[name]
    assert read(layout, config, architecture) == architecture


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_tells_the_geometry_alone(name: str) -> None:
    layout, config, architecture = PUBLISHED[name]
    assert resolve(layout, config, {}, "BF16") == architecture


def test_a_stale_layer_count_is_said() -> None:
    found = match(headers(RAW, PUBLISHED["base"][2]), BASE)
    (note,) = (note for note in found.notes if "120" in note)
    assert "80 half-layers" in note
    assert any("float32" in note for note in found.notes)  # residual_in_fp32 false
    assert match(headers(RAW, ZAYA1_8B), RAW_8B).notes == ()


def test_lists_may_be_longer_than_the_layers_but_not_shorter() -> None:
    assert len(SMOE_74B["ffn_hidden_size_list"]) == 160 > len(SMOE_74B["smoe_layers"]) == 120
    # What lies beyond the last half-layer means nothing.
    config = {**SMOE_74B, "ffn_hidden_size_list": [0, 8192] * 60 + [7, 9] * 20}
    assert read(SMOE, config, ZAYA1_74B) == ZAYA1_74B
    for key in ("ffn_hidden_size_list", "cca_num_q_heads", "num_query_groups_list", "smoe_mlp_expansion"):
        with pytest.raises(LayoutError, match=f"{key} has 118 entries for 120"):
            read(SMOE, {**SMOE_74B, key: SMOE_74B[key][:118]}, ZAYA1_74B)
    with pytest.raises(LayoutError, match="swa_layers has 4 entries for 120"):
        read(SMOE, {**SMOE_74B, "swa_layers": [4096, 0, 0, 0]}, ZAYA1_74B)


def test_two_entries_may_stand_for_all_half_layers() -> None:
    config = {key: value[:2] if isinstance(value, list) and key != "zaya_layers" and len(value) > 2 else value
              for key, value in BASE.items()}  # fmt: skip
    assert read(RAW, config, PUBLISHED["base"][2]) == PUBLISHED["base"][2]


def test_a_raw_window_does_not_count_the_token_itself() -> None:
    found = read(SMOE, SMOE_74B, ZAYA1_74B)
    assert max(SMOE_74B["swa_layers"]) == 4096
    assert found.sliding_window == 4097
    assert native_config(found)["sliding_window"] == 4097
    assert raw_config(found, "list")["swa_layers"] == SMOE_74B["swa_layers"][:120]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("8B raw", {"rope_scaling": None}),
        ("8B raw", {"rope_theta": None, "rotary_base": 5000000}),
        ("8B raw", {"rotary_base": 5e6}),
        ("8B raw", {"partial_rotary_factor": None, "rope_pct": 0.5}),
        ("8B raw", {"dtype": None, "torch_dtype": "bfloat16"}),
        ("8B raw", {"dtype": None}),
        ("8B raw", {"dtype": "auto"}),
        ("8B raw", {"dtype": "torch.bfloat16"}),
        ("8B raw", {"head_dim": None}),
        ("8B raw", {"kv_channels": None}),
        ("8B raw", {"head_dim": None, "kv_channels": None}),
        ("8B raw", {"num_attention_heads": None}),
        ("8B raw", {"num_attention_heads": 16}),
        ("8B raw", {"num_query_groups": None}),
        ("8B raw", {"num_key_value_heads": None}),
        ("8B raw", {"cca_num_q_heads": 8, "num_attention_heads": 16}),
        ("8B raw", {"cca_time0": 2, "cca_time1": 2, "clamp_temp": False, "tie_word_embeddings": True}),
        ("8B raw", {"swa_layers": [0] * 80}),
        ("8B raw", {"swa_layers": [None] * 80}),
        ("8B raw", {"hidden_size": None, "vocab_size": None}),
        ("8B raw", {"rope_parameters": {"rope_type": "default"}}),
        ("8B native", {"rope_parameters": None}),
        ("8B native", {"rope_parameters": {"hybrid": NATIVE_8B["rope_parameters"]["hybrid"]}}),
        ("8B native", {"layer_types": None}),
        ("8B native", {"dtype": None, "torch_dtype": "bfloat16"}),
        ("8B native", {"partial_rotary_factor": None}),
        ("8B native", {"head_dim": None, "cca_time0": None, "cca_time1": None}),
        ("8B native", {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5000000}}),
        ("tiny scalar", {"rope_parameters": {**TINY_SCALAR["rope_parameters"], "factor": 1}}),
        ("74B smoe", {"num_hidden_layers": None}),
        ("74B smoe", {"rope_scaling": False}),
        ("74B smoe", {"smoe_use_eda": True, "smoe_use_mod": True, "cca": True}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_variants_mean_the_same_geometry(name: str, change: dict[str, Any]) -> None:
    layout, config, architecture = PUBLISHED[name]
    changed = {key: value for key, value in {**config, **change}.items() if value is not None or key == "rope_scaling"}
    assert read(layout, changed, architecture) == architecture


@pytest.mark.parametrize("name", sorted(example_configs()))
def test_the_reference_reads_the_same_out_of_these_configs(name: str) -> None:
    # The oracle's generator shapes its tensors by its own reading of the config.
    from tests.reference.raw_model import parse_config

    config = example_configs()[name]
    tensors = random_raw(config, seed=0)
    shapes = {key: header(key, tuple(tensor.shape)) for key, tensor in tensors.items()}
    found = match(shapes, config)
    assert found.problems == ()
    a = found.architecture
    theirs = parse_config(config, a.blocks)
    assert a.norm_eps == theirs.eps
    for slides, attention in zip(a.sliding, theirs.attention, strict=True):
        assert attention.rotary_base == (a.sliding_rope_theta if slides else a.rope_theta)
        assert attention.rotary_fraction == a.rotary_fraction
        assert attention.window == (a.sliding_window - 1 if slides and a.sliding_window else None)
        assert attention.clamp_temp == a.clamp_temp


@settings(max_examples=100, deadline=None)
@given(architectures(), st.sampled_from(["scalar", "list"]), st.booleans())
def test_raw_config_round_trip(architecture: Architecture, style: str, clamp: bool) -> None:
    architecture = replace(architecture, clamp_temp=clamp)
    config = raw_config(architecture, style)
    assert read(RAW, config, architecture) == architecture


@settings(max_examples=100, deadline=None)
@given(architectures(), st.sampled_from([NATIVE, NATIVE_PER_EXPERT]))
def test_native_config_round_trip(architecture: Architecture, layout: Layout) -> None:
    assert read(layout, native_config(architecture), architecture) == architecture


@settings(max_examples=40, deadline=None)
@given(architectures())
def test_smoe_config_round_trip(architecture: Architecture) -> None:
    assert read(SMOE, config_of(SMOE, architecture), architecture) == architecture


def test_extra_rotary_parameters_survive_a_native_round_trip() -> None:
    yarn = (("factor", 2.0), ("original_max_position_embeddings", 64), ("rope_type", "yarn"))
    architecture = small(rope_scaling=yarn, **sliding())
    assert read(NATIVE, native_config(architecture), architecture) == architecture
    with pytest.raises(LayoutError, match="rotary"):
        raw_config(architecture)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("8B raw", {"num_query_groups": 4, "num_key_value_heads": 4}, "kv_heads = 4, the tensors say 2"),
        ("8B raw", {"num_query_groups": 4}, "num_query_groups = 4, num_key_value_heads = 2"),
        ("8B raw", {"num_attention_heads": 32}, "num_attention_heads = 32, the tensors have 8"),
        ("8B raw", {"cca_num_q_heads": 16}, "query_heads = 16, the tensors say 8"),
        ("8B raw", {"head_dim": 64}, "head_dim = 64, the tensors say 128"),
        ("8B raw", {"hidden_size": 1024}, "hidden_size = 1024, the tensors say 2048"),
        ("8B raw", {"num_experts": 8}, "experts = 8, the tensors say 16"),
        ("8B raw", {"zaya_mlp_expansion": 128}, "router_width = 128, the tensors say 256"),
        ("8B raw", {"vocab_size": 262144}, "vocab_size = 262144, the tensors say 262272"),
        ("8B raw", {"cca_time0": 3}, "time0 = 3, the tensors say 2"),
        ("8B raw", {"num_hidden_layers": 78}, "blocks = 39, the tensors say 40"),
        ("8B raw", {"num_hidden_layers": 79}, "pairs"),
        ("8B raw", {"num_hidden_layers": 0}, "pairs"),
        ("8B raw", {"moe_router_topk": 2}, "moe_router_topk = 2"),
        ("8B raw", {"cca": False}, "cca = false"),
        ("8B raw", {"zaya_use_mod": False}, "zaya_use_mod = false"),
        ("8B raw", {"zaya_use_eda": False}, "zaya_use_eda = false"),
        ("8B raw", {"scale_residual_merge": False}, "scale_residual_merge = false"),
        ("8B raw", {"gated_linear_unit": False}, "gated_linear_unit = false"),
        ("8B raw", {"add_bias_linear": True}, "add_bias_linear = true"),
        ("8B raw", {"activation_func": "gelu"}, "gelu"),
        ("8B raw", {"normalization": "LayerNorm"}, "LayerNorm"),
        ("8B raw", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("8B raw", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ("8B raw", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ("8B raw", {"use_rope_scaling": True}, "use_rope_scaling"),
        ("8B raw", {"rotary_base": 10000}, "rope_theta = 5000000.0, rotary_base = 10000.0"),
        ("8B raw", {"rope_pct": 1.0}, "partial_rotary_factor = 0.5, rope_pct = 1.0"),
        ("8B raw", {"rope_theta": None}, "rope_theta"),
        ("8B raw", {"rope_theta": "5e6"}, "rope_theta must be a number"),
        ("8B raw", {"sliding_window": 4096}, "swa_layers"),
        ("8B raw", {"swa_layers": 4096}, "swa_layers must be a list"),
        ("8B raw", {"swa_layers": [0, 4096] * 40}, "MoE half-layer"),
        ("8B raw", {"swa_layers": [4096, 0, 512, 0] * 20}, "512, 4096"),
        ("8B raw", {"swa_layers": [4096.0, 0] * 40}, "swa_layers must hold a window"),
        ("8B raw", {"swa_layers": [-1, 0] * 40}, "swa_layers must hold a window"),
        ("8B raw", {"ffn_hidden_size": 4095}, "even"),
        ("8B raw", {"ffn_hidden_size": None}, "expert_width"),
        ("8B raw", {"ffn_hidden_size_list": [0, 8192] * 40}, "ffn_hidden_size = 4096"),
        ("8B raw", {"eos_token_id": "1"}, "eos_token_id"),
        ("8B raw", {"pad_token_id": [0]}, "pad_token_id"),
        ("8B raw", {"bos_token_id": True}, "bos_token_id"),
        ("8B raw", {"eos_token_id": [1, None]}, "eos_token_id"),
        ("8B raw", {"dtype": "bf16"}, "dtype must be one of bfloat16, float16, float32, found 'bf16'"),
        ("8B native", {"dtype": "float8_e4m3fn"}, "dtype must be one of"),
        ("8B raw", {"partial_rotary_factor": 2}, "rotary_fraction"),
        ("8B raw", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ("base", {"zaya_layers": ["a", 16] * 39}, "blocks = 39, the tensors say 40"),
        ("base", {"zaya_layers": ["a", 16] * 39 + ["a", 8]}, "alternate 'a' and one number"),
        ("base", {"zaya_layers": [16, "a"] * 40}, "alternate"),
        ("base", {"zaya_layers": ["a", 16] * 39 + ["a"]}, "alternate"),
        ("base", {"zaya_layers": []}, "alternate"),
        ("base", {"zaya_layers": 80}, "zaya_layers must be a list"),
        ("base", {"num_experts": 8}, "layers list = 16, num_experts = 8"),
        ("base", {"zaya_mlp_expansion": [0, 256] * 39 + [0, 128]}, "one whole number"),
        ("base", {"cca_num_q_heads": [8.0, 0] * 40}, "one whole number"),
        ("base", {"num_query_groups_list": [4, 0] * 40}, "num_query_groups_list = 4, num_key_value_heads = 2"),
        ("74B smoe", {"cca_num_q_heads": [32, 0] * 80}, "query_heads = 32, the tensors say 16"),
        ("74B smoe", {"swa_layers": [4096, 0, 0, 0] * 20}, "80 entries for 120"),
        ("74B smoe", {"smoe_use_mod": False}, "smoe_use_mod"),
        ("8B native", {"num_experts_per_tok": 2}, "num_experts_per_tok = 2"),
        ("8B native", {"hidden_act": "gelu"}, "gelu"),
        ("8B native", {"num_key_value_heads": 4}, "kv_heads = 4, the tensors say 2"),
        ("8B native", {"num_attention_heads": 16}, "query_heads = 16, the tensors say 8"),
        ("8B native", {"head_dim": 64}, "head_dim = 64, the tensors say 128"),
        ("8B native", {"layer_types": ["hybrid"] * 39}, "39 layer_types for num_hidden_layers = 40"),
        ("8B native", {"layer_types": ["attention"] * 40}, "attention"),
        ("8B native", {"layer_types": "hybrid"}, "layer_types must be a list"),
        ("8B native", {"layer_types": ["hybrid_sliding"] * 40}, "sliding_window"),
        ("8B native", {"num_hidden_layers": 80, "layer_types": None}, "missing"),
        ("8B native", {"rope_parameters": {"hybrid": {"rope_theta": 5e6}}, "partial_rotary_factor": None},
         "partial_rotary_factor"),
        ("8B native", {"layer_types": ["hybrid", "hybrid_sliding"] * 20, "sliding_window": 5,
                       "rope_parameters": {"hybrid": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
                                           "hybrid_sliding": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}},
         "hybrid = 0.5, hybrid_sliding = 0.25"),
        ("8B native", {"layer_types": ["hybrid_sliding"] * 40, "sliding_window": 5,
                       "rope_parameters": {"hybrid_sliding": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4,
                                                              "partial_rotary_factor": 0.5}}}, "sliding blocks"),
        ("8B native", {"vocab_size": 1000}, "vocab_size = 1000, the tensors say 262272"),
        ("8B native", {"tie_word_embeddings": False}, "lm_head.weight"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_contradicts_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    layout, config, architecture = PUBLISHED[name]
    changed = {key: value for key, value in {**config, **change}.items() if value is not None}
    with pytest.raises(LayoutError, match=message) as caught:
        require(match(headers(layout, architecture), changed))
    assert "\n" not in caught.value.message


def test_a_scaled_rotary_embedding_is_read_wherever_it_stands() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    extras = (("factor", 4.0), ("rope_type", "yarn"))
    for rope in ({"rope_parameters": {"hybrid": yarn}}, {"rope_parameters": yarn},
                 {"rope_parameters": None, "rope_scaling": yarn}):  # fmt: skip
        assert read(NATIVE, {**NATIVE_8B, **rope}, ZAYA1_8B) == replace(ZAYA1_8B, rope_scaling=extras)


@pytest.mark.parametrize("layout", [RAW, SMOE], ids=["raw", "smoe"])
def test_a_native_config_over_raw_names_is_refused(layout: Layout) -> None:
    with pytest.raises(LayoutError, match=f"tensors are in the {layout.name} layout but config.json is not: it has"):
        match(headers(layout, ZAYA1_8B), NATIVE_8B)


@pytest.mark.parametrize("layout", [NATIVE, NATIVE_PER_EXPERT], ids=["stacked", "per expert"])
@pytest.mark.parametrize("config", [RAW_8B, BASE, SMOE_74B], ids=["scalar", "list", "smoe"])
def test_a_raw_config_over_native_names_is_refused(layout: Layout, config: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="tensors are in the native layout but config"):
        match(headers(layout, ZAYA1_8B), config)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_empty_config_names_what_it_lacks(layout: Layout) -> None:
    with pytest.raises(LayoutError, match="does not say expert_width"):
        match(headers(layout, small()), {})


@pytest.mark.parametrize("fields", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_kind_of_geometry_is_read_back(layout: Layout, fields: dict[str, Any]) -> None:
    architecture = small(**fields)
    assert read(layout, config_of(layout, architecture), architecture) == architecture


def test_the_dtype_is_the_embeddings_when_the_config_states_none() -> None:
    config = {key: value for key, value in raw_config(small()).items() if key != "dtype"}
    assert match(headers(RAW, small(), "F32"), config).architecture.dtype == "float32"
    assert match(headers(RAW, small(), "F16"), config).architecture.dtype == "float16"


def test_raw_defaults_are_those_of_the_trainers() -> None:
    stated = {"ffn_hidden_size": 64, "rope_theta": 10000}
    found = match(headers(RAW, small()), stated).architecture
    assert (found.pad_token, found.bos_token, found.eos_token) == (0, 2, 1)
    assert (found.time0, found.time1, found.norm_eps, found.rotary_fraction) == (2, 2, 1e-5, 0.5)
    assert found.tied
    assert not found.attention_bias
    assert not found.head_bias
    assert not found.clamp_temp
    assert not any(found.sliding)


def test_native_defaults_are_those_of_transformers() -> None:
    from transformers import ZayaConfig

    found = read(NATIVE, {"moe_intermediate_size": 2048}, ZAYA1_8B)
    written = ZayaConfig(**native_config(found)).to_dict()
    default = ZayaConfig().to_dict()
    # Only what the model has: parameters of sliding blocks are left out where no block slides.
    rotary = default["rope_parameters"]
    assert written["rope_parameters"] == {"hybrid": rotary["hybrid"]}
    different = {key for key in default if written.get(key) != default[key]}
    assert different <= {"rope_parameters", "architectures", "dtype", "transformers_version", "_name_or_path"}
