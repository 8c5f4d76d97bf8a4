from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.calibration.support import scaled
from tests.megatron import write_distributed, write_ranks
from tests.synthetic import (
    GEOMETRIES,
    LAYOUTS,
    ZAYA1_8B,
    config_of,
    headers,
    logical,
    small,
    split,
    write_checkpoint,
    write_sparse,
    write_tensors,
)
from zaya_tools.calibration.identity import identity
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.data import TINY
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import parameters

WIDE = small(hidden_size=64, expert_width=96, query_heads=4, kv_heads=2, router_width=12, tied=False)


def of(folder: Path) -> str:
    return identity(Weights.open(folder).found)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_it_is_the_same_in_every_layout(geometry: str, tmp_path: Path) -> None:
    a = small(**GEOMETRIES[geometry])
    found = set()
    for name, layout in LAYOUTS.items():
        write_checkpoint(tmp_path / name, layout, a)
        found.add(of(tmp_path / name))
    assert len(found) == 1


def test_it_is_the_same_in_what_ranks_share_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw", RAW, WIDE)
    write_ranks(tmp_path / "experts" / "iter_0000100", WIDE, ep=3, pp=2)
    write_distributed(tmp_path / "shards" / "iter_0000100", WIDE)
    whole = of(tmp_path / "raw")
    assert of(tmp_path / "experts" / "iter_0000100") == of(tmp_path / "shards" / "iter_0000100") == whole


def test_it_is_the_same_after_every_conversion(tmp_path: Path) -> None:
    convert(TINY, tmp_path / "native")
    convert(TINY, tmp_path / "wide", dtype="float32")
    convert(tmp_path / "wide", tmp_path / "narrow", dtype="bfloat16", to="raw")
    convert(tmp_path / "native", tmp_path / "back", to="raw")
    assert {of(tmp_path / name) for name in ("native", "wide", "narrow", "back")} == {of(TINY)}


def test_float32_weights_keep_it_when_they_become_bfloat16(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wide", RAW, WIDE, dtype="F32")
    convert(tmp_path / "wide", tmp_path / "narrow", dtype="bfloat16")
    assert of(tmp_path / "narrow") == of(tmp_path / "wide")


def test_baked_temperatures_keep_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw", RAW, replace(WIDE, clamp_temp=True))
    convert(tmp_path / "raw", tmp_path / "native")
    write_checkpoint(tmp_path / "other", RAW, WIDE)
    assert of(tmp_path / "native") == of(tmp_path / "raw") != of(tmp_path / "other")


def test_a_change_of_any_parameter_changes_it(tmp_path: Path) -> None:
    """Training that freezes all but one tensor gives another model."""
    a = replace(WIDE, attention_bias=True)
    values = logical(a)

    def digest(changed: dict[str, Tensor]) -> str:
        write_tensors(tmp_path / "model", split(NATIVE, a, changed), config_of(NATIVE, a))
        return of(tmp_path / "model")

    found = {digest(values)}
    for parameter in parameters(a):
        found.add(digest({**values, parameter.name: (values[parameter.name].float() * 1.25).to(torch.bfloat16)}))
    assert len(found) == 1 + len(parameters(a))


@pytest.mark.parametrize("expert", [0, 5, 7])
@pytest.mark.parametrize("matrix", ["linear_fc1", "linear_fc2"])
def test_one_expert_of_one_block_is_enough(expert: int, matrix: str, tmp_path: Path) -> None:
    name = f"model.layers.5.zaya_block.experts.local_experts.{expert}.{matrix}.weight"
    assert of(scaled(tmp_path / "tuned", name, 1.05)) != of(TINY)


def test_vocabularies_padded_for_a_trainer_keep_it(tmp_path: Path) -> None:
    """The rows that padding adds or takes away are not those that count."""
    a = replace(WIDE, vocab_size=320)
    values = logical(a)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    padded = {n: torch.cat([v, torch.zeros_like(v[:64])]) if n in (head, embedding) else v for n, v in values.items()}
    for folder, geometry, held in (("own", a, values), ("padded", replace(a, vocab_size=384), padded)):
        write_tensors(tmp_path / folder, split(RAW, geometry, held), config_of(RAW, geometry))
    assert of(tmp_path / "own") == of(tmp_path / "padded")


def test_a_large_model_is_recognised_in_a_moment(tmp_path: Path) -> None:
    write_sparse(tmp_path / "large", headers(RAW, ZAYA1_8B), config_of(RAW, ZAYA1_8B))
    found = Weights.open(tmp_path / "large").found
    started = time.process_time()
    identity(found)
    assert time.process_time() - started < 1  # a tenth of that on an idle machine
