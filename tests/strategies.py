"""Random geometries for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from zaya_tools.architecture import Architecture


@st.composite
def architectures(draw: st.DrawFn, *, max_blocks: int = 3, max_experts: int = 12) -> Architecture:
    """Any geometry that a checkpoint may have, small. Fields that no config states for it have their defaults."""
    blocks = draw(st.integers(1, max_blocks))
    kv_heads = draw(st.integers(1, 3))
    sliding = tuple(draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)))
    rope: dict[str, Any] = {}
    if not all(sliding):
        rope["rope_theta"] = draw(st.sampled_from([1e4, 1e6, 5e6, 123.5]))
    if any(sliding):
        rope["sliding_rope_theta"] = draw(st.sampled_from([1e4, 2e4]))
    token = st.none() | st.integers(0, 9)
    return Architecture(
        blocks=blocks,
        hidden_size=draw(st.integers(1, 12)),
        query_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        experts=draw(st.integers(1, max_experts)),
        expert_width=draw(st.integers(1, 9)),
        router_width=draw(st.integers(1, 7)),
        vocab_size=draw(st.integers(10, 20)),
        time0=draw(st.integers(1, 4)),
        time1=draw(st.integers(1, 4)),
        tied=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        head_bias=draw(st.booleans()),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rotary_fraction=draw(st.sampled_from([0.25, 0.5, 1.0])),
        max_positions=draw(st.integers(1, 10**6)),
        sliding=sliding,
        sliding_window=draw(st.integers(2, 5000)) if any(sliding) else None,
        pad_token=draw(token),
        bos_token=draw(token),
        eos_token=draw(token | st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        **rope,
    )
