"""The quantization_config: as the library's presets say it, as our own checks read it, and as vLLM does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from torch import Tensor

from tests.evaluation.support import compress, native
from tests.quantization.test_recipe import EXPERTS, read
from tests.quantization.test_resolve import TINY, UNTIED
from tests.synthetic import ZAYA1_8B, config_of, logical, write_tensors
from zaya_tools.architecture import Architecture
from zaya_tools.evaluation.modules import EMBEDDING, LINEAR, Declared, declared, modules, unmatched
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.model.model import ZayaModel
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import PROTECTED, Role, parameters
from zaya_tools.quantization.recipe import Recipe, RecipeError, load_recipe, recipe_names
from zaya_tools.quantization.resolve import Resolved, resolve
from zaya_tools.quantization.serving import quantization_config

CONFIGS: dict[str, Any] = json.loads((Path(__file__).parent / "configs.json").read_text(encoding="utf-8"))
"""What config.json says for ZAYA1-8B by each recipe. Read by compressed-tensors 0.17 and 0.19 and vLLM 0.32."""

PRESETS = {
    "fp8": "FP8_DYNAMIC", "fp8-experts": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "int8": "INT8", "int4": "W4A16",
    "mxfp4": "MXFP4A16", "nvfp4a16": "NVFP4A16", "nvfp4": "NVFP4", "fp8-static": "FP8",
}  # fmt: skip


def config(resolved: Resolved, **options: Any) -> dict[str, Any]:
    stated = quantization_config(resolved, **options)
    assert stated is not None
    assert json.loads(json.dumps(stated)) == stated
    return stated


def parsed(stated: dict[str, Any]) -> Declared:
    found = declared({"quantization_config": stated})
    assert found is not None
    return found


def recipes(folder: Path) -> dict[str, Recipe]:
    """Recipes that have every kind of rule, for TINY."""
    rules: dict[str, list[dict[str, Any]]] = {
        "blocks": [{**EXPERTS, "blocks": [0, "2-"]}],
        "projections": [{"role": "attention", "projections": ["q_proj", "v_proj_delayed"], "scheme": "int8"}],
        "both": [EXPERTS, {"role": "attention", "blocks": "1-2", "projections": "o_proj", "scheme": "fp8"}],
        "mixed": [
            {**EXPERTS, "blocks": 0},
            {"role": "experts", "scheme": "int4-g32"},
            {"role": "experts", "scheme": "none", "blocks": 3},
            {"role": "attention", "scheme": "int8"},
            {"role": "attention", "projections": "k_proj", "scheme": "none"},
            {"role": "attention", "projections": "o_proj", "scheme": {"kind": "int4", "group": -1}, "blocks": "2-"},
        ],
        "formats alike": [EXPERTS, {"role": "attention", "scheme": "fp8-block"}],
        "attention alone": [{"role": "attention", "scheme": "mxfp4"}],
    }
    made = {name: read(folder, *own, name=name) for name, own in rules.items()}
    return made | {name: load_recipe(name) for name in recipe_names() if name != "bf16"}


NAMES = ("blocks", "projections", "both", "mixed", "formats alike", "attention alone",
         *(name for name in recipe_names() if name != "bf16"))  # fmt: skip


def test_nothing_quantized_is_no_config() -> None:
    assert quantization_config(resolve(load_recipe("bf16"), TINY)) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_of_the_published_model(name: str) -> None:
    assert config(resolve(load_recipe(name), ZAYA1_8B)) == CONFIGS[name]
    assert config(resolve(load_recipe(name), ZAYA1_8B), target_vllm="0.32.0") == CONFIGS[name]
    assert set(CONFIGS) == set(recipe_names()) - {"bf16"}


def without_defaults(value: Any) -> Any:
    if isinstance(value, dict):
        # Observers are how a scale was found; 0.17 has a default for them, later releases have none.
        return {key: without_defaults(v) for key, v in value.items() if v not in (None, {}) and key != "observer"}
    return value


@pytest.mark.parametrize(("name", "preset"), PRESETS.items())
def test_the_schemes_are_the_librarys_presets(name: str, preset: str) -> None:
    found = QuantizationConfig.model_validate(CONFIGS[name])
    (scheme,) = found.config_groups.values()
    wanted = preset_name_to_scheme(preset, ["Linear"])
    for args in (scheme.input_activations, wanted.input_activations):
        if args is not None:
            args.observer = None  # how the library would find a scale, which is stored by now
    assert scheme.model_dump(exclude={"format"}) == wanted.model_dump(exclude={"format"})
    from compressed_tensors.compressors.format import infer_module_format

    assert str(scheme.format) == found.format == infer_module_format(torch.nn.Linear, wanted).value
    assert found.quantization_status.value == "compressed"
    stated = CONFIGS[name]["config_groups"]["group_0"]
    for part in ("weights", "input_activations"):
        args = getattr(wanted, part)
        everything = without_defaults(args.model_dump(mode="json")) if args is not None else None
        assert stated.get(part) == everything, "every key that says something, and no other"


def test_the_schemes_of_the_other_recipes() -> None:
    (scheme,) = QuantizationConfig.model_validate(CONFIGS["int4-g32"]).config_groups.values()
    wanted = preset_name_to_scheme("W4A16", ["Linear"])
    wanted.weights.group_size = 32
    for args in (scheme.input_activations, wanted.input_activations):
        if args is not None:
            args.observer = None  # how the library would find a scale, which is stored by now
    assert scheme.model_dump(exclude={"format"}) == wanted.model_dump(exclude={"format"})
    groups = QuantizationConfig.model_validate(CONFIGS["int4-experts-fp8-attention"]).config_groups.values()
    for scheme, preset in zip(groups, ("FP8_DYNAMIC", "W4A16"), strict=True):
        wanted = preset_name_to_scheme(preset, ["Linear"])
        assert scheme.model_dump(exclude={"format", "targets"}) == wanted.model_dump(exclude={"format", "targets"})


def test_whole_rows_of_int4_are_a_channel(tmp_path: Path) -> None:
    recipe = read(tmp_path, {"role": "experts", "scheme": {"kind": "int4", "group": "channel"}})
    stated = config(resolve(recipe, TINY))["config_groups"]["group_0"]["weights"]
    assert stated == {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    QuantizationConfig.model_validate(config(resolve(recipe, TINY)))


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for entry in value.values() for key in _keys(entry)}
    return set()


def _values(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        return [leaf for entry in (value.values() if isinstance(value, dict) else value) for leaf in _values(entry)]
    return [value]


@pytest.mark.parametrize("name", CONFIGS)
def test_no_key_that_older_readers_refuse(name: str) -> None:
    assert None not in _values(CONFIGS[name])
    groups = CONFIGS[name]["config_groups"].values()
    assert all(set(group) <= {"targets", "weights", "input_activations", "format"} for group in groups)
    assert not _keys(CONFIGS[name]) & {"zp_dtype", "observer", "observer_kwargs", "actorder", "kv_cache_scheme"}
    typed = {g["weights"]["scale_dtype"] for g in groups if "scale_dtype" in g["weights"]}
    e4m3 = {"torch.float8_e4m3fn"}
    assert typed == {"mxfp4": {"torch.uint8"}, "nvfp4a16": e4m3, "nvfp4": e4m3}.get(name, set())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("architecture", [TINY, UNTIED], ids=["tied", "untied"])
def test_every_module_gets_what_was_decided(
    tmp_path: Path, name: str, stacked: bool, architecture: Architecture
) -> None:
    resolved = resolve(recipes(tmp_path)[name], architecture)
    stated = config(resolved, stacked=stacked)
    found = parsed(stated)
    assert unmatched([*found.ignore, *found.targets], architecture) == ()
    assert len({*found.ignore, *found.targets}) == len([*found.ignore, *found.targets])
    check_every_module(found, resolved)
    for group, scheme in zip(stated["config_groups"].values(), resolved.schemes, strict=True):
        assert group["format"] == scheme.format
    formats = {scheme.format for scheme in resolved.schemes}
    assert stated["format"] == (formats.pop() if len(formats) == 1 else "mixed-precision")


def check_every_module(found: Declared, resolved: Resolved) -> None:
    seen = 0
    for module in modules(resolved.architecture).values():
        if module.kind not in (LINEAR, EMBEDDING):
            continue
        scheme = found.scheme(module)
        assert module.unit is not None
        decision = resolved.decisions.get(module.unit.parameter.name)
        wanted = decision.scheme if decision is not None else None
        assert (scheme is None) == (wanted is None), module.name
        if scheme is not None and wanted is not None:
            seen += 1
            assert found.format(scheme) == wanted.format
            assert (scheme.weights.num_bits, scheme.weights.group_size or 0) == (
                wanted.bits, 0 if wanted.rows > 1 else wanted.columns
            ), module.name  # fmt: skip
    assert seen == sum(done for done, _ in resolved.quantized.values())


def test_the_head_and_the_embedding_are_targeted_by_name(tmp_path: Path) -> None:
    rules = [{"role": role, "scheme": "int4"} for role in ("experts", "head", "embedding")]
    resolved = resolve(read(tmp_path, *rules), UNTIED)
    stated = config(resolved)
    assert stated["config_groups"]["group_0"]["targets"] == ["Linear", "model.embed_tokens", "lm_head"]
    assert "lm_head" not in stated["ignore"]
    check_every_module(parsed(stated), resolved)
    resolved = resolve(read(tmp_path, {"role": "head", "scheme": "fp8"}, extends="int4"), UNTIED)
    stated = config(resolved)
    assert stated["config_groups"]["group_1"]["targets"] == ["lm_head"]
    check_every_module(parsed(stated), resolved)
    assert "lm_head" in config(resolve(load_recipe("int4"), TINY))["ignore"], "a tied head is a module too"


def test_patterns_are_anchored(tmp_path: Path) -> None:
    recipe = read(tmp_path, {**EXPERTS, "blocks": "1"}, {"role": "attention", "scheme": "int8"})
    wide = replace(TINY, blocks=12, sliding=())
    stated = config(resolve(recipe, wide))
    patterns = [t for g in stated["config_groups"].values() for t in g["targets"]]
    assert all(pattern.startswith(r"re:^model\.layers\.") and pattern.endswith("$") for pattern in patterns)
    (experts,) = (re.compile(pattern[3:]) for pattern in patterns if "experts" in pattern)
    assert experts.match("model.layers.1.mlp.experts.11.up_proj")
    for name in (
        "model.layers.11.mlp.experts.1.up_proj",
        "model.layers.1.mlp.experts.1.up_proj.weight",
        "xmodel.layers.1.mlp.experts.1.up_proj",
        "model.layers.1.mlp.gate.down_proj",
        "model.layers.1.mlp.experts",
        "model.layers.1.mlp.experts.gate_up_proj",
    ):
        assert not experts.match(name), name
    (experts,) = (
        re.compile(target[3:])
        for group in config(resolve(recipe, wide), stacked=True)["config_groups"].values()
        for target in group["targets"]
        if "experts" in target
    )
    for name in ("gate_up_proj", "down_proj", "7.down_proj"):
        assert experts.match(f"model.layers.1.mlp.experts.{name}")
    assert not experts.match("model.layers.1.mlp.experts.7.gate_up_proj")


def quantized(resolved: Resolved, stated: dict[str, Any], layout: Layout) -> dict[str, Tensor]:
    """A checkpoint as the config says, compressed by compressed-tensors, each matrix by the scheme of its module."""
    a = resolved.architecture
    found, table = parsed(stated), modules(a)
    values, tensors = logical(a), native(layout, a)
    for parameter in parameters(a):
        if parameter.role in PROTECTED or len(parameter.shape) < 2:
            continue
        parts = layout.parts(parameter, a)
        for part in parts:
            first = next(p for p in NATIVE_PER_EXPERT.parts(parameter, a) if p.expert in (None, part.expert or 0))
            scheme = found.scheme(table[first.name.removesuffix(".weight")])
            if scheme is None:
                continue
            weight = tensors.pop(part.name)
            if weight.dim() == 3:
                each = [compress(expert, scheme) for expert in weight]
                stored = {local: torch.stack([one[local] for one in each]) for local in each[0]}
                stored.pop("weight_shape", None)
            else:
                fused = parameter.role is Role.EXPERT and len([p for p in parts if p.expert == part.expert]) > 1
                stored = compress(weight, scheme, values[parameter.name][part.expert] if fused else None)
            for local, tensor in stored.items():
                tensors[part.name if local == "weight" else part.companion(local)] = tensor
    return tensors


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", [NATIVE_PER_EXPERT, NATIVE], ids=["per expert", "stacked"])
def test_a_checkpoint_of_this_config_is_sound(tmp_path: Path, name: str, layout: Layout) -> None:
    # Two blocks of 128 each way: compressed-tensors 0.17 guesses blocks from shapes, and gets a single column wrong.
    small = replace(TINY, experts=2, vocab_size=64, router_width=8, hidden_size=256, expert_width=256, query_heads=8)
    resolved = resolve(recipes(tmp_path)[name], small)
    stated = config(resolved, stacked=layout is NATIVE)
    folder = tmp_path / "model"
    whole = {**config_of(layout, small), "quantization_config": stated}
    write_tensors(folder, quantized(resolved, stated, layout), whole)
    done = resolved.quantized["experts"]
    result = check_structure(folder, quantized=frozenset({Role.EXPERT} if done[0] == done[1] else ()))
    assert [finding.message for finding in result.findings if finding.severity != "note"] == []
    counts = {entry["role"]: (entry["quantized"], entry["of"]) for entry in result.figures["quantized"]}
    assert counts == {ROLE[word]: count for word, count in resolved.quantized.items()}
    write_tensors(tmp_path / "whole", native(NATIVE, small), config_of(NATIVE, small))
    ids = torch.randint(0, small.vocab_size, (2, 24), generator=torch.Generator().manual_seed(5))
    logits, wanted = (logits_of(path, ids) for path in (folder, tmp_path / "whole"))
    assert torch.isfinite(logits).all()
    assert 0 < (logits - wanted).abs().median() < 0.3 * wanted.std(), "the same model, a little off"


def logits_of(folder: Path, ids: Tensor) -> Tensor:
    weights = Weights.open(folder)
    return ZayaModel(weights.architecture, weights.ends(), weights.resident()).logits(ids)


ROLE = {"experts": Role.EXPERT, "attention": Role.ATTENTION, "embedding": Role.EMBEDDING, "head": Role.HEAD}


def test_a_target_that_is_not_known() -> None:
    with pytest.raises(RecipeError, match="is too old"):
        quantization_config(resolve(load_recipe("fp8"), TINY), "0.31.0")


@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_vllm_decides_the_same(tmp_path: Path, name: str) -> None:
    library = pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
    resolved = resolve(recipes(tmp_path)[name], TINY)
    reader = library.CompressedTensorsConfig.from_config(json.loads(json.dumps(config(resolved))))
    reader._add_fused_moe_to_target_scheme_map()
    kinds = {Role.EXPERT: "RoutedExperts", Role.HEAD: "ParallelLMHead", Role.EMBEDDING: "VocabParallelEmbedding"}
    for module in modules(TINY).values():
        if module.unit is None:
            continue
        role = module.unit.parameter.role
        layer = type(kinds.get(role, "ReplicatedLinear"), (torch.nn.Module,), {})()
        scheme = reader.get_scheme_dict(layer, module.name)
        decision = resolved.decisions.get(module.unit.parameter.name)
        wanted = decision.scheme if decision is not None else None
        assert (scheme is None) == (wanted is None), module.name
        if scheme is not None and wanted is not None:
            assert (scheme["format"], scheme["weights"].num_bits) == (wanted.format, wanted.bits)
