"""The geometry and its native config, against transformers' own config class."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import architectures
from tests.synthetic import GEOMETRIES, ZAYA1_8B, ZAYA1_74B, small
from zaya_tools.architecture import FULL, SLIDING, Architecture, native_config
from zaya_tools.errors import LayoutError

YARN = (("factor", 2.0), ("original_max_position_embeddings", 128), ("rope_type", "yarn"))


def in_transformers(architecture: Architecture) -> Any:
    from transformers import ZayaConfig

    return ZayaConfig(**native_config(architecture))


def check_same(architecture: Architecture, config: Any) -> None:
    a = architecture
    assert config.num_hidden_layers == a.blocks
    assert config.hidden_size == a.hidden_size
    assert config.num_attention_heads == a.query_heads
    assert config.num_key_value_heads == a.kv_heads
    assert config.head_dim == a.head_dim
    assert config.num_experts == a.experts
    assert config.num_experts_per_tok == 1
    assert config.moe_intermediate_size == a.expert_width
    assert config.router_hidden_size == a.router_width
    assert config.vocab_size == a.vocab_size
    assert (config.cca_time0, config.cca_time1) == (a.time0, a.time1)
    assert config.tie_word_embeddings is a.tied
    assert config.attention_bias is a.attention_bias
    assert config.lm_head_bias is a.head_bias
    assert config.rms_norm_eps == a.norm_eps
    assert config.max_position_embeddings == a.max_positions
    assert config.layer_types == [SLIDING if slides else FULL for slides in a.sliding]
    assert config.sliding_window == (a.sliding_window if any(a.sliding) else None)
    assert config.pad_token_id == a.pad_token
    assert config.bos_token_id == a.bos_token
    assert config.eos_token_id == (list(a.eos_token) if isinstance(a.eos_token, tuple) else a.eos_token)
    assert str(config.dtype).removeprefix("torch.") == a.dtype
    plain = {"rope_type": "default", "partial_rotary_factor": a.rotary_fraction}
    expected = {}
    if not all(a.sliding):
        expected[FULL] = {**plain, "rope_theta": a.rope_theta, **dict(a.rope_scaling)}
    if any(a.sliding):
        expected[SLIDING] = {**plain, "rope_theta": a.sliding_rope_theta}
    assert config.rope_parameters == expected


@settings(max_examples=60, deadline=None)
@given(architectures())
def test_zaya_config_gives_the_geometry_back(architecture: Architecture) -> None:
    check_same(architecture, in_transformers(architecture))


@pytest.mark.parametrize(
    "fields",
    [
        *GEOMETRIES.values(),
        {"eos_token": (1, 106)},
        {"eos_token": None, "bos_token": None, "pad_token": None},
        {"dtype": "float16"},
        {"rope_scaling": YARN},
        {"rotary_fraction": 1.0},
    ],
    ids=str,
)
def test_zaya_config_gives_every_kind_of_field_back(fields: dict[str, Any]) -> None:
    check_same(small(**fields), in_transformers(small(**fields)))


@pytest.mark.parametrize("architecture", [ZAYA1_8B, ZAYA1_74B], ids=["8B", "74B"])
def test_zaya_config_gives_the_released_geometries_back(architecture: Architecture) -> None:
    check_same(architecture, in_transformers(architecture))


def test_zaya_config_knows_every_field_that_is_written() -> None:
    from transformers import ZayaConfig

    known = set(inspect.signature(ZayaConfig).parameters) | {"architectures", "model_type"}
    # Read by runtimes beside the nested tables; transformers keeps what it has no field for.
    known |= {"partial_rotary_factor", "dtype"}
    for architecture in (ZAYA1_8B, ZAYA1_74B, small(head_bias=True)):
        written = native_config(architecture)
        assert not set(written) - known
        assert written["model_type"] == ZayaConfig.model_type


def test_written_values_are_plain_json() -> None:
    import json

    for fields in (*GEOMETRIES.values(), {"eos_token": (1, 106)}, {"rope_scaling": YARN}):
        config = native_config(small(**fields))
        assert json.loads(json.dumps(config)) == config


def test_clamped_temperatures_have_no_native_config() -> None:
    with pytest.raises(LayoutError, match="clamp_temp"):
        native_config(small(clamp_temp=True))


COUNTS = ("blocks", "hidden_size", "query_heads", "kv_heads", "head_dim", "experts", "expert_width", "router_width",
          "vocab_size", "time0", "time1", "max_positions")  # fmt: skip


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "8"], ids=repr)
def test_a_count_is_a_positive_whole_number(field: str, value: Any) -> None:
    with pytest.raises(LayoutError, match=field):
        small(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"query_heads": 3, "kv_heads": 2}, "3 query heads are not a multiple of 2"),
        ({"kv_heads": 1, "head_dim": 7}, "cannot be halved"),
        ({"sliding": (True,), "sliding_window": 4}, "1 layer types for 2 blocks"),
        ({"sliding": (True, False)}, "sliding_window"),
        ({"sliding": (True, False), "sliding_window": 0}, "sliding_window"),
        ({"rotary_fraction": 0.0}, "rotary_fraction"),
        ({"rotary_fraction": 1.5}, "rotary_fraction"),
    ],
    ids=str,
)
def test_impossible_geometries_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        small(**fields)


@given(st.integers(1, 6), st.integers(1, 6))
def test_history_is_what_two_causal_convolutions_reach_back(time0: int, time1: int) -> None:
    # The last output sees time1 outputs of the first convolution, the earliest of which sees time0 inputs.
    reached = {back0 + back1 for back0 in range(time0) for back1 in range(time1)}
    assert small(time0=time0, time1=time1).history == max(reached)


def test_widths() -> None:
    a = ZAYA1_74B
    assert (a.query_width, a.key_width, a.value_half, a.conv_channels, a.history) == (2048, 256, 128, 2304, 2)


def test_a_report_of_the_geometry_names_every_field() -> None:
    report = small(eos_token=(1, 106)).as_dict()
    assert set(report) == set(inspect.signature(Architecture).parameters)
    assert report["eos_token"] == [1, 106]
    assert report["sliding"] == [False, False]


@pytest.mark.parametrize("field", ["norm_eps", "rope_theta", "sliding_rope_theta"])
@pytest.mark.parametrize("value", [0.0, -5.0, float("inf"), float("nan")])
def test_impossible_numbers_are_refused(field: str, value: float) -> None:
    with pytest.raises(LayoutError, match=field):
        small(**{field: value})
