"""The runtimes' modules, and what entries of a quantization config mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.evaluation.support import (
    EXPERTS,
    GATE,
    SMALL,
    UP,
)
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.evaluation.modules import LINEAR, Declared, declared, modules, unmatched


def test_modules_are_those_of_the_runtimes() -> None:
    import transformers

    config = transformers.ZayaConfig(**native_config(SMALL))
    with torch.device("meta"):
        model = transformers.ZayaForCausalLM(config)
    classes = {name: type(module).__name__ for name, module in model.named_modules()}
    table = modules(SMALL)
    expanded = {name for name in table if ".mlp.experts." in name}
    assert len(expanded) == 2 * 4 * 4  # the model in memory keeps its experts stacked
    ours = {name for name in table if name not in expanded and name}
    assert ours <= classes.keys()
    for kind in (LINEAR, "Conv1d", "Embedding"):
        assert {n for n in ours if table[n].kind == kind} == {n for n, c in classes.items() if c == kind}


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("Linear", True),
        ("lm_head", True),
        (r"re:.*mlp\.experts$", True),
        ("model.layers.0.mlp.gate", True),
        (r"re:lm_hea", True),
        (r"re:mlp\.gate", False),
        ("mlp.gate", False),
        ("ReLU", False),
    ],
)
def test_entries_match_from_the_start_of_a_name(entry: str, found: bool) -> None:
    assert unmatched([entry], SMALL) == (() if found else (entry,))


def test_a_name_wins_over_a_pattern_and_a_pattern_over_a_class() -> None:
    def group(target: str, bits: int) -> dict[str, Any]:
        return {"targets": [target], "weights": {"num_bits": bits, "strategy": "channel"}}

    groups = {"a": group("Linear", 8), "b": group(r"re:.*experts\.2\..*", 6), "c": group(GATE, 4)}
    stated = declared({"quantization_config": {"config_groups": groups}})
    assert isinstance(stated, Declared)
    table = modules(SMALL)
    bits = [stated.scheme(table[name]).weights.num_bits for name in (GATE, UP, f"{EXPERTS}0.up_proj")]  # type: ignore[union-attr]
    assert bits == [4, 6, 8]
    assert stated.scheme(table["model.embed_tokens"]) is None


def test_a_larger_geometry_is_quick_to_describe() -> None:
    large = Architecture(60, 4096, 16, 2, 128, 24, 4096, 256, 262_272)
    assert len(modules(large)) > 60 * 24 * 4
