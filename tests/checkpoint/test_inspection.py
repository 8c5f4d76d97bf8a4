"""What `inspect` says, and that it says it without reading weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.synthetic import (
    LAYOUTS,
    ZAYA1_8B,
    ZAYA1_74B,
    config_of,
    headers,
    logical,
    read_tensors,
    small,
    smoe_config,
    write_checkpoint,
    write_sparse,
    write_tensors,
)
from zaya_tools import convert, inspect
from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError, SourceError, ZayaError
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW, SMOE
from zaya_tools.parameters import Role, parameters

RELEASED: dict[str, tuple[Layout, Architecture, int, int]] = {
    "8B raw": (RAW, ZAYA1_8B, 2483, 8_840_489_464),
    "8B native": (NATIVE, ZAYA1_8B, 1283, 8_840_489_464),
    "74B smoe": (SMOE, ZAYA1_74B, 4683, 74_793_954_644),
}


def bytes_read() -> int:
    """Bytes that this process has asked the kernel for so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_are_read_from_headers_and_biases_alone(tmp_path: Path, name: str) -> None:
    layout, architecture, count, numbers = RELEASED[name]
    config = smoe_config(architecture, padding=20) if layout is SMOE else config_of(layout, architecture)
    stored = headers(layout, architecture)
    sizes = write_sparse(tmp_path / "it", stored, config)
    inspect(tmp_path / "it")  # modules that are loaded on first use are no part of the figure
    before = bytes_read()
    report = inspect(tmp_path / "it")
    read = bytes_read() - before
    small_files = sum(file.stat().st_size for file in (tmp_path / "it").glob("*.json"))
    biases = sum(tensor.nbytes for tensor in stored.values() if tensor.name.endswith("balancing_biases"))
    # Python reads ahead by a buffer a file; the weights are gigabytes.
    assert read <= sum(sizes.values()) + small_files + 2 * biases + 1_000_000
    assert (report.tensors, report.parameters) == (count, numbers)
    assert report.architecture == architecture
    assert report.complete
    assert report.convertible is (layout is not NATIVE)
    assert report.nbytes == 2 * numbers
    assert len(report.skip) == architecture.blocks
    if layout is not NATIVE:
        assert report.verdict == f"convert would write {1283 if layout is RAW else 1923:,} native tensors"


def test_the_active_parameters_of_the_released_models(tmp_path: Path) -> None:
    # Published, embedding aside, as 8.3 billion in all and 760 million active.
    write_sparse(tmp_path / "8B", headers(RAW, ZAYA1_8B), config_of(RAW, ZAYA1_8B))
    report = inspect(tmp_path / "8B")
    expert = 3 * 2048 * 2048
    assert report.active == report.parameters - 40 * 15 * expert
    assert report.embedding == 262_272 * 2048
    assert 8.25e9 < report.parameters - report.embedding < 8.35e9
    assert 0.75e9 < report.active - report.embedding < 0.77e9


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_by_role_and_dtype_add_up(tmp_path: Path, layout: Layout) -> None:
    architecture = small(tied=False, attention_bias=True)
    tensors = write_checkpoint(tmp_path / "it", layout, architecture, shards=2)
    report = inspect(tmp_path / "it")
    assert report.nbytes == sum(row.nbytes for row in report.held) == sum(t.nbytes for t in tensors.values())
    assert report.tensors == sum(row.tensors for row in report.held) == len(tensors)
    assert report.files == 2
    roles = {row.role for row in report.held}
    assert roles == {role.value for role in Role}
    experts = 2 * sum(p.numel for p in parameters(architecture) if p.role is Role.EXPERT)
    assert [row.nbytes for row in report.held if row.role == "expert"] == [experts]
    assert [row.role for row in report.held] == [role.value for role in Role]


KEYS = {
    "": ["name", "layout", "architecture", "files", "tensors", "bytes", "parameters", "held", "quantization",
         "missing", "surplus", "dropped", "problems", "notes", "warnings", "skip_class", "side_files", "complete",
         "convertible", "verdict"],
    "parameters": ["total", "active_per_token", "embedding"],
    "side_files": ["copied", "missing", "left"],
    "held": ["role", "dtype", "tensors", "bytes"],
    "skip_class": ["block", "bias", "largest_expert_bias", "state"],
    "quantization": ["role", "quantized", "of", "format"],
    "architecture": ["blocks", "hidden_size", "query_heads", "kv_heads", "head_dim", "experts", "expert_width",
                     "router_width", "vocab_size", "time0", "time1", "tied", "attention_bias", "head_bias", "norm_eps",
                     "rope_theta", "sliding_rope_theta", "rotary_fraction", "rope_scaling", "max_positions", "sliding",
                     "sliding_window", "pad_token", "bos_token", "eos_token", "dtype", "clamp_temp"],
}  # fmt: skip
"""Scripts read these: a change here is a change of the interface."""


def keys_of(report: dict[str, Any]) -> dict[str, list[str]]:
    found = {"": list(report)}
    for key, value in report.items():
        entry = value[0] if isinstance(value, list) and value else value
        if isinstance(entry, dict) and key != "dropped":
            found[key] = list(entry)
    return found


def test_the_keys_of_the_report_are_stable(tmp_path: Path) -> None:
    scale = {"model.layers.0.mlp.experts.down_proj": torch.zeros(3, 32, 32).to(torch.float8_e4m3fn),
             "model.layers.0.mlp.experts.down_proj.weight_scale": torch.ones(3, 32, 1)}  # fmt: skip
    write_checkpoint(tmp_path / "it", NATIVE, small(), overrides=scale)
    report = inspect(tmp_path / "it").as_dict()
    assert keys_of(report) == KEYS
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_report_says_what_convert_does(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "it", LAYOUTS[name], small())
    report = inspect(tmp_path / "it")
    assert report.name == "it"
    assert report.layout == {"native per expert": "native (one tensor an expert)"}.get(name, name)
    if report.convertible:
        convert(tmp_path / "it", tmp_path / "native")
        assert report.verdict == f"convert would write {len(read_tensors(tmp_path / 'native'))} native tensors"
    else:
        with pytest.raises(ZayaError, match="already native"):
            convert(tmp_path / "it", tmp_path / "native")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_biases_that_stop_a_conversion_are_seen_before_it(tmp_path: Path, value: float) -> None:
    name = "model.layers.1.zaya_block.router.balancing_biases"
    broken = logical(small())["model.layers.0.mlp.gate.balancing_biases"].clone()
    broken[1] = value
    write_checkpoint(tmp_path / "it", LAYOUTS["raw"], small(), overrides={name: broken})
    report = inspect(tmp_path / "it")
    assert not report.convertible
    assert name in report.verdict
    with pytest.raises(ZayaError, match="1 value is NaN or infinite, the first at \\[1\\]"):
        convert(tmp_path / "it", tmp_path / "out")


def test_older_spellings_are_told_apart(tmp_path: Path) -> None:
    values = logical(small())
    values["model.final_norm.weight"] = values.pop("model.norm.weight")
    write_tensors(tmp_path / "it", values, config_of(NATIVE, small()))
    report = inspect(tmp_path / "it")
    assert report.layout == "native (older spellings)"
    assert report.convertible


def test_what_is_wrong_is_listed_and_the_rest_still_reported(tmp_path: Path) -> None:
    gone = "model.layers.1.zaya_block.experts.local_experts.1.linear_fc2.weight"
    overrides = {gone: None, "model.layers.0.mystery": torch.zeros(3)}
    write_checkpoint(tmp_path / "it", RAW, small(), overrides=overrides)
    report = inspect(tmp_path / "it")
    assert report.missing == (gone,)
    assert report.surplus == ("model.layers.0.mystery",)
    assert len(report.problems) == 2
    assert not report.complete
    assert not report.convertible
    assert "refuse" in report.verdict
    assert report.architecture == small()
    assert report.parameters == sum(p.numel for p in parameters(small()))
    with pytest.raises(LayoutError, match="mystery"):
        convert(tmp_path / "it", tmp_path / "native")


def test_what_would_be_dropped_is_named(tmp_path: Path) -> None:
    embedding = write_checkpoint(tmp_path / "plain", RAW, small())["model.embed_tokens.weight"]
    step = "model.layers.1.zaya_block.router.balance_step"
    overrides = {step: torch.tensor(3), "lm_head.weight": embedding.clone()}
    write_checkpoint(tmp_path / "it", RAW, small(), overrides=overrides)
    report = inspect(tmp_path / "it")
    assert report.convertible
    assert report.dropped.keys() == overrides.keys()
    assert any("lm_head.weight is stored though tied" in note for note in report.notes)


def test_side_files_are_sorted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "it", RAW, small())
    for name in ("tokenizer.json", "chat_template.jinja", "optimizer.pt", "training_args.bin", ".hidden"):
        (tmp_path / "it" / name).write_text("{}")
    sides = inspect(tmp_path / "it").as_dict()["side_files"]
    assert sides == {
        "copied": ["tokenizer.json", "chat_template.jinja"],
        "missing": ["tokenizer_config.json", "generation_config.json"],
        "left": ["optimizer.pt", "training_args.bin"],
    }


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        inspect(tmp_path)
    write_checkpoint(tmp_path / "it", RAW, small(), config={"model_type": "zaya"})
    with pytest.raises(LayoutError, match="does not say"):
        inspect(tmp_path / "it")
