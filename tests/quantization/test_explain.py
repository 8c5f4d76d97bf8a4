"""Explanations: every tensor of a model, with the rule or the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given

from tests.quantization.test_recipe import ATTENTION, EXPERTS, read
from tests.quantization.test_resolve import TINY, UNTIED
from tests.strategies import architectures
from zaya_tools.architecture import Architecture
from zaya_tools.evaluation.units import all_units
from zaya_tools.parameters import PROTECTED, Role
from zaya_tools.quantization.explain import explain, fold
from zaya_tools.quantization.recipe import Recipe
from zaya_tools.quantization.resolve import resolve


@given(architectures())
def test_every_tensor_is_there(architecture: Architecture) -> None:
    entries = explain(resolve(Recipe("mine", "", "", ()), architecture))
    assert sum(entry.matrices for entry in entries) == len(all_units(architecture))
    for entry in entries:
        assert entry.scheme == "none"
        assert entry.protected == (entry.role in PROTECTED)
        assert entry.reason.startswith("protected: ") == entry.protected


def test_reasons(tmp_path: Path) -> None:
    recipe = read(tmp_path, {**EXPERTS, "blocks": "1-2"}, {**ATTENTION, "projections": "o_proj"})
    entries = {(e.block, e.module): e for e in explain(resolve(recipe, replace(TINY, attention_bias=True)))}
    experts = entries[1, "mlp.experts.0-7.up_proj"]
    assert (experts.scheme, experts.observer, experts.index) == ("fp8", "minmax", 0)
    assert experts.reason == "rule 1: experts, blocks 1-2: fp8"
    assert (experts.shape, experts.matrices) == ((128, 128), 8)
    assert entries[0, "mlp.experts.0-7.up_proj"].reason == "no rule names it: full precision"
    assert entries[3, "self_attn.o_proj"].reason == "rule 2: attention (o_proj): int8"
    assert entries[3, "self_attn.o_proj.bias"].reason == "a bias: always full precision"
    assert entries[None, "model.embed_tokens"].reason == "tied to the output head: always full precision"
    assert entries[0, "mlp.gate.router_mlp.out_proj"].reason == (
        "protected: a rounded router sends tokens to other experts"
    )
    untied = {e.module: e for e in explain(resolve(recipe, UNTIED))}
    assert untied["model.embed_tokens"].reason == untied["lm_head"].reason == "no rule names it: full precision"
    assert untied["lm_head"].role == Role.HEAD


def test_folding(tmp_path: Path) -> None:
    recipe = read(tmp_path, {**EXPERTS, "blocks": [0, "2-3"]})
    entries = explain(resolve(recipe, replace(TINY, experts=1)))
    folded = {(f.first.module, f.first.scheme): f.blocks for f in fold(entries)}
    assert folded["mlp.experts.0.gate_proj", "fp8"] == "0, 2-3"
    assert folded["mlp.experts.0.gate_proj", "none"] == "1"
    assert folded["mlp.gate.router_states_scale", "none"] == "1-3"
    assert folded["model.norm", "none"] == ""
    assert folded["self_attn.o_proj", "none"] == "0-3"
    assert set(entries[0].as_dict()) == {
        "block", "module", "role", "shape", "matrices", "scheme", "observer", "reason", "rule", "protected",
    }  # fmt: skip
