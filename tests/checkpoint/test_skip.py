"""The proof that skip never wins, against the router's own choice in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.synthetic import LAYOUTS, TORCH, small, write_checkpoint
from zaya_tools import convert, inspect
from zaya_tools.checkpoint.skip import SkipClass, skip_classes, warnings
from zaya_tools.checkpoint.source import open_source
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.match import match
from zaya_tools.layouts.raw import RAW

BIAS = st.floats(-3, 3, width=32)


def chooses_skip(probabilities: torch.Tensor, biases: torch.Tensor) -> bool:
    """The router's rule: the highest probability plus bias in float32, the first one when several are."""
    return int((probabilities + biases).argmax()) == len(biases) - 1


def near(value: float, steps: int) -> float:
    """The float32 `steps` units in the last place away."""
    found = np.float32(value)
    for _ in range(abs(steps)):
        found = np.nextafter(found, np.float32(np.inf if steps > 0 else -np.inf))
    return float(found)


@settings(max_examples=300, deadline=None)
@given(st.lists(BIAS, min_size=2, max_size=6), st.integers(0, 2**16))
@example([0.0, -1.0], 0)
@example([0.5, -0.5], 0)
@example([near(0.25, 1), -0.75], 0)
@example([0.25, near(-0.75, 1)], 0)
@example([0.25, near(-0.75, -1)], 0)
@example([1e-9, -1.0], 0)
def test_the_proof_is_what_the_router_does(values: list[float], seed: int) -> None:
    biases = torch.tensor(values)
    skip = SkipClass(0, values[-1], max(values[:-1]))
    certain = torch.zeros(len(values))
    certain[-1] = 1.0  # the router is as sure of skip as it can be
    assert chooses_skip(certain, biases) is skip.reachable
    if not skip.reachable:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(64, len(values), generator=generator) * 10 ** torch.randint(-1, 3, (64, 1)).float()
        logits[::2, -1] += logits.abs().max()
        assert not any(chooses_skip(p, biases) for p in logits.softmax(dim=-1))


def test_a_tie_goes_to_the_expert() -> None:
    assert not SkipClass(0, -1.0, 0.0).reachable
    assert SkipClass(0, near(-1.0, 1), 0.0).reachable
    assert not chooses_skip(torch.tensor([0.0, 1.0]), torch.tensor([0.0, -1.0]))
    assert SkipClass(0, -1.0, 0.0).state == "unreachable (proven)"
    assert SkipClass(0, -0.5, 0.0).state == "reachable"


@pytest.mark.parametrize(("bias", "largest"), [(float("nan"), 0.0), (-1.0, float("nan"))])
def test_a_nan_proves_nothing(bias: float, largest: float) -> None:
    assert SkipClass(0, bias, largest).reachable


def name_of(layout: Layout, block: int) -> str:
    return layout.local_name("mlp.gate.balancing_biases", block)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_biases_are_read_as_stored(tmp_path: Path, layout: Layout, dtype: str) -> None:
    values = ([0.01, 0.03, -0.02, -1.0], [0.5, -0.25, 0.0, 0.125])
    overrides = {name_of(layout, block): torch.tensor(row).to(TORCH[dtype]) for block, row in enumerate(values)}
    write_checkpoint(tmp_path / "it", layout, small(), overrides=overrides)
    source = open_source(tmp_path / "it")
    classes = skip_classes(match(source.tensors, source.config))
    stored = [torch.tensor(row).to(TORCH[dtype]).float() for row in values]
    assert classes == tuple(SkipClass(block, row[-1].item(), row[:-1].max().item()) for block, row in enumerate(stored))
    assert [skip.reachable for skip in classes] == [False, True]


@pytest.mark.parametrize(
    "bad", [None, torch.zeros(3), torch.zeros(4, dtype=torch.int64)], ids=["missing", "shape", "dtype"]
)
def test_biases_that_cannot_be_read_are_left_out(tmp_path: Path, bad: torch.Tensor | None) -> None:
    write_checkpoint(tmp_path / "it", RAW, small(), overrides={name_of(RAW, 0): bad})
    report = inspect(tmp_path / "it")
    assert [skip.block for skip in report.skip] == [1]
    assert not report.complete


def test_nothing_is_warned_of_where_skip_is_dead() -> None:
    assert warnings([SkipClass(block, -1.0, 0.1) for block in range(3)]) == []
    assert warnings([]) == []


def test_reachable_blocks_are_listed_one_by_one() -> None:
    first, *lines = warnings([SkipClass(0, -1.0, 0.1), SkipClass(1, 0.25, 0.5), SkipClass(2, -0.5, 0.125)])
    assert "2 of 3 blocks" in first
    assert "input times p" in first
    assert lines == [
        "block 1: skip is reachable (bias 0.25, largest expert bias 0.5)",
        "block 2: skip is reachable (bias -0.5, largest expert bias 0.125)",
    ]


def test_inspect_and_convert_say_it(tmp_path: Path) -> None:
    alive = torch.tensor([0.0, 0.0, 0.0, 0.5]).bfloat16()
    write_checkpoint(tmp_path / "raw", RAW, small(), overrides={name_of(RAW, 1): alive})
    report: dict[str, Any] = inspect(tmp_path / "raw").as_dict()
    assert [row["state"] for row in report["skip_class"]] == ["unreachable (proven)", "reachable"]
    assert report["skip_class"][1] == {"block": 1, "bias": 0.5, "largest_expert_bias": 0.0, "state": "reachable"}
    assert "1 of 2 blocks" in report["warnings"][0]
    result = convert(tmp_path / "raw", tmp_path / "native")
    assert list(result.conversion.warnings) == report["warnings"]
    manifest = json.loads((tmp_path / "native" / "zaya_manifest.json").read_text())
    assert manifest["warnings"] == report["warnings"]
