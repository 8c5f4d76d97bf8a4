"""`quantize` as a whole: what is written is what compressed-tensors would have written, and the rest is untouched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from tests.checkpoint.support import SIDE_FILES, TRAINING_FILES, model, no_leftovers, tree
from tests.quantization.support import DATA_FREE, GEOMETRY, LIBRARY, full_precision, geometry, library, minmax
from tests.synthetic import LAYOUTS, config_of, read_tensors, same_bits, small, write_checkpoint, write_tensors
from zaya_tools import convert, quantize
from zaya_tools.checkpoint.source import CONFIG
from zaya_tools.errors import DestinationError, LayoutError, NonFiniteError, ZayaError
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.parameters import PROTECTED, parameters
from zaya_tools.quantization.conversion import plan_quantization
from zaya_tools.quantization.summary import summarize


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantize") / "source"
    model(folder, GEOMETRY, shards=2)
    return folder


@pytest.mark.parametrize("base", LIBRARY)
def test_equal_to_the_library_bit_for_bit(base: str, source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", minmax(tmp_path, base), max_shard_size=100_000)
    written, expected = read_tensors(tmp_path / "out"), library(base)
    assert written.keys() == expected.keys()
    wrong = [name for name in expected if not same_bits(written[name], expected[name])]
    assert wrong == []


@pytest.mark.parametrize("base", ["fp8", "int4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_checkpoint(base: str, layout: str, source: Path, tmp_path: Path) -> None:
    """Values, files and config do not depend on how the source names and groups its tensors."""
    write_checkpoint(tmp_path / "source", LAYOUTS[layout], GEOMETRY)
    quantize(source, tmp_path / "expected", base, max_shard_size=200_000)
    quantize(tmp_path / "source", tmp_path / "out", base, max_shard_size=200_000)
    written, expected = tree(tmp_path / "out"), tree(tmp_path / "expected")
    same = [name for name in expected if name.endswith(".safetensors") or name.endswith("index.json")]
    assert len(same) > 2
    assert [name for name in same if written[name] != expected[name]] == []


@pytest.mark.parametrize("recipe", DATA_FREE)
def test_every_recipe_passes_the_checks(recipe: str, source: Path, tmp_path: Path) -> None:
    """The validator, which decodes with the library and was written apart, finds nothing wrong."""
    quantize(source, tmp_path / "out", recipe)
    for result in (check_structure(tmp_path / "out", source), check_weights(tmp_path / "out", source)):
        assert [finding.message for finding in result.failures] == []


@pytest.mark.parametrize("recipe", DATA_FREE)
def test_protected_tensors_and_side_files_are_the_sources(recipe: str, source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", recipe)
    written, expected = read_tensors(tmp_path / "out"), full_precision()
    untouched = [p.name for p in parameters(GEOMETRY) if p.role in PROTECTED]
    assert len(untouched) > 40
    assert [name for name in untouched if not same_bits(written[name], expected[name])] == []
    for name, content in SIDE_FILES.items():
        assert (tmp_path / "out" / name).read_bytes() == content


def test_training_files_stay_behind_and_a_card_is_written(tmp_path: Path) -> None:
    model(tmp_path / "source", GEOMETRY)
    for name in (*TRAINING_FILES, "README.md"):
        (tmp_path / "source" / name).write_bytes(b"old")
    quantize(tmp_path / "source", tmp_path / "out", "int4")
    names = {entry.name for entry in (tmp_path / "out").iterdir()}
    assert names.isdisjoint(TRAINING_FILES)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\n")
    assert "recipe int4" in card
    assert "vllm serve" in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("name", ["my: model", "- x", "#c", "{", "`x`", "on", os.fsdecode(b"bad\xff")])
def test_any_name_gives_a_card_that_hubs_can_read(name: str, tmp_path: Path) -> None:
    model(tmp_path / name, GEOMETRY)
    (tmp_path / "own.yaml").write_text('name: "a: [b"\ndescription: A test.\nrules: []\n')
    quantize(tmp_path / name, tmp_path / "out", tmp_path / "own.yaml")
    front = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    assert front["base_model"] == name.encode(errors="replace").decode()
    assert front["tags"] == ["zaya", "a: [b"]  # and not compressed-tensors: nothing is


def test_manifest_records_recipe_errors_and_digests(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "out", "int4-experts-fp8-attention")
    text = (tmp_path / "out" / "zaya_manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["recipe"]["name"] == "int4-experts-fp8-attention"
    measured = manifest["quantized"]
    assert len(measured) == 2 * (5 + 3 * GEOMETRY.experts)
    for name, entry in measured.items():
        expert = ".experts." in name
        assert entry["scheme"] == ("int4" if expert else "fp8")
        assert (0.05 < entry["relative_error"] < 0.15) if expert else (0.02 < entry["relative_error"] < 0.03)
        assert entry["sqnr_db"] == pytest.approx(-20 * torch.tensor(entry["relative_error"]).log10().item(), abs=1e-3)
        assert 0 <= entry["clipped_fraction"] < 0.05
    assert "README.md" in manifest["files"]
    assert str(tmp_path) not in text


def test_the_recorded_error_is_the_error_of_what_is_stored(source: Path, tmp_path: Path) -> None:
    """Measured again from the files, by the validator's decoder."""
    quantize(source, tmp_path / "out", "mxfp4")
    recorded = json.loads((tmp_path / "out" / "zaya_manifest.json").read_text())["quantized"]
    found = check_weights(tmp_path / "out", source).figures["by_tensor"]
    assert len(found) == len(recorded)
    for entry in found:
        assert recorded[entry["name"]]["relative_error"] == pytest.approx(entry["relative_error"], rel=1e-3)


def test_summary_counts_every_matrix(source: Path) -> None:
    work = plan_quantization(source, "fp8")
    found = {entry["role"]: entry for entry in summarize(work).as_dict()["roles"]}
    experts = GEOMETRY.blocks * GEOMETRY.experts * 3
    assert (found["expert"]["quantized"], found["expert"]["of"]) == (experts, experts)
    assert (found["attention projection"]["quantized"], found["attention projection"]["of"]) == (10, 10)
    for entry in found.values():
        assert entry["protected"] == (entry["role"] in {role.value for role in PROTECTED})
        if entry["protected"]:
            assert entry["quantized"] == 0


def test_written_bytes_are_the_planned_ones(source: Path, tmp_path: Path) -> None:
    work = plan_quantization(source, "nvfp4a16", max_shard_size=150_000)
    result = quantize(source, tmp_path / "out", planned=work)
    for shard in work.plan.shards:
        assert (tmp_path / "out" / shard.filename).stat().st_size == shard.nbytes
    assert result.digests.keys() == {shard.filename for shard in work.plan.shards}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            assert len(opened.keys()) > 0


@pytest.mark.parametrize("width", [16, 48, 80])
def test_odd_sizes_keep_every_tensor_aligned(width: int, tmp_path: Path) -> None:
    """Shapes whose tensors cannot all begin at multiples of their elements side by side; torch would refuse them."""
    odd = small(hidden_size=32, expert_width=width, head_dim=6, query_heads=8, kv_heads=1, experts=5, vocab_size=33)
    write_checkpoint(tmp_path / "source", RAW, odd)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: odd\ndescription: Odd.\nrules:\n- {role: experts, scheme: int8}\n- {role: attention, scheme: int8}\n"
    )
    quantize(tmp_path / "source", tmp_path / "out", recipe)
    for file in (tmp_path / "out").glob("*.safetensors"):
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8 : 8 + size]).items():
            if name != "__metadata__":
                step = {"F32": 4, "BF16": 2, "I8": 1}[entry["dtype"]]
                assert entry["data_offsets"][0] % step == 0, name
    assert check_weights(tmp_path / "out", tmp_path / "source").failures == ()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("recipe", ["fp8", "int4", "nvfp4a16", "bf16"])
@pytest.mark.parametrize("where", ["zaya_block.experts.local_experts.1.linear_fc1.weight", "self_attn.o_proj.weight"])
def test_numbers_that_are_none_stop_the_run(value: float, recipe: str, where: str, tmp_path: Path) -> None:
    """Infinity would saturate to the largest FP8 number, and NaN hide in a maximum."""
    layer = 3 if "experts" in where else 2
    name = f"model.layers.{layer}.{where}"
    tensors = write_checkpoint(tmp_path / "source", RAW, GEOMETRY)
    broken = tensors[name].clone()
    broken[5, 7] = value
    write_tensors(tmp_path / "source", {**tensors, name: broken}, config_of(RAW, GEOMETRY))
    with pytest.raises(NonFiniteError) as caught:
        quantize(tmp_path / "source", tmp_path / "out", recipe)
    assert f"{name}: 1 value is NaN or infinite, the first at [5, 7]" in caught.value.message
    assert not (tmp_path / "out").exists()
    assert no_leftovers(tmp_path)


@pytest.mark.parametrize("layout", [RAW, NATIVE_PER_EXPERT])
def test_a_bad_number_in_a_stack_of_several_tensors_is_named(layout: Layout, tmp_path: Path) -> None:
    names = [name for name in write_checkpoint(tmp_path / "source", layout, GEOMETRY) if "experts" in name]
    name = next(name for name in reversed(names) if name.endswith(("linear_fc2.weight", "down_proj.weight")))
    broken = read_tensors(tmp_path / "source")[name]
    broken[5, 7] = float("nan")
    write_checkpoint(tmp_path / "source", layout, GEOMETRY, overrides={name: broken})
    with pytest.raises(NonFiniteError) as caught:
        quantize(tmp_path / "source", tmp_path / "out", "fp8", expert_layout="stacked")
    assert f"{name}: 1 value is NaN or infinite, the first at [5, 7]" in caught.value.message
    assert no_leftovers(tmp_path)


@pytest.mark.parametrize("base", LIBRARY)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_extreme_rows_get_scales_that_work(base: str, dtype: str, tmp_path: Path) -> None:
    """Rows of zeros, of tiny numbers and of huge ones: scales are finite and positive, zeros stay zeros."""
    tensors = write_checkpoint(tmp_path / "source", NATIVE_PER_EXPERT, GEOMETRY, dtype=dtype)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    extreme = tensors[name].clone()
    for row, value in enumerate((0.0, 1e-6, 1e-38, 3e38, -3e38)):
        extreme[row] = torch.linspace(-1, 1, extreme.shape[1]) * value
    extreme[5, ::2] = 0
    config = config_of(NATIVE_PER_EXPERT, GEOMETRY)
    write_tensors(tmp_path / "source", {**tensors, name: extreme}, config)
    for recipe in (base, minmax(tmp_path, base)):
        quantize(tmp_path / "source", tmp_path / "out", recipe, force=True)
        result = check_structure(tmp_path / "out")
        assert [f.message for f in result.failures if "impossible size" not in f.message] == []
        stored = read_tensors(tmp_path / "out")
        for suffix in ("weight_scale", "weight_global_scale"):
            scale = stored.get(f"{name.removesuffix('.weight')}.{suffix}")
            if scale is not None:
                numbers = scale.float()
                assert numbers.isfinite().all()
                assert scale.dtype == torch.uint8 or bool((numbers > 0).all())


def test_untouched_source(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    quantize(source, tmp_path / "out", "int4")
    assert tree(source) == before


def test_quantized_sources_are_refused(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "once", "fp8")
    with pytest.raises(LayoutError, match="quantized already"):
        quantize(tmp_path / "once", tmp_path / "twice", "int4")


def test_stacked_experts_hold_the_same_numbers(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "each", "fp8-experts")
    quantize(source, tmp_path / "stacked", "fp8-experts", expert_layout="stacked")
    each, stacked = read_tensors(tmp_path / "each"), read_tensors(tmp_path / "stacked")
    for block in range(GEOMETRY.blocks):
        prefix = f"model.layers.{block}.mlp.experts"
        for suffix, whole in (("weight", ""), ("weight_scale", ".weight_scale")):
            for number in range(GEOMETRY.experts):
                own = [each[f"{prefix}.{number}.{part}_proj.{suffix}"] for part in ("gate", "up")]
                assert same_bits(stacked[f"{prefix}.gate_up_proj{whole}"][number], torch.cat(own))
                down = each[f"{prefix}.{number}.down_proj.{suffix}"]
                assert same_bits(stacked[f"{prefix}.down_proj{whole}"][number], down)
    assert check_structure(tmp_path / "stacked", source).failures == ()
    assert check_weights(tmp_path / "stacked", source).failures == ()


@pytest.mark.parametrize("recipe", ["int4", "nvfp4a16"])
def test_stacks_that_have_no_form_are_refused(recipe: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match=r"stack|expert layout"):
        quantize(source, tmp_path / "out", recipe, expert_layout="stacked")
    assert list(tmp_path.iterdir()) == []


def test_bf16_is_the_conversion_with_a_record(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "converted")
    quantize(source, tmp_path / "out", "bf16")
    converted, written = read_tensors(tmp_path / "converted"), read_tensors(tmp_path / "out")
    assert converted.keys() == written.keys()
    assert all(same_bits(converted[name], written[name]) for name in converted)
    assert "quantization_config" not in json.loads((tmp_path / "out" / CONFIG).read_text())


def test_partly_quantized_experts_are_all_stored_one_by_one(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "half.yaml"
    recipe.write_text("name: half\ndescription: Half.\nrules:\n- {role: experts, scheme: fp8, blocks: 1}\n")
    quantize(source, tmp_path / "out", recipe)
    written = read_tensors(tmp_path / "out")
    assert written["model.layers.0.mlp.experts.2.up_proj.weight"].dtype == torch.bfloat16
    assert written["model.layers.1.mlp.experts.2.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert check_structure(tmp_path / "out", source).failures == ()
    assert check_weights(tmp_path / "out", source).failures == ()


def test_the_record_and_the_tensors_have_to_agree(source: Path, tmp_path: Path) -> None:
    """A quantized matrix put back in full precision, and one that the record does not know."""
    recipe = tmp_path / "half.yaml"
    recipe.write_text("name: half\ndescription: Half.\nrules:\n- {role: experts, scheme: fp8, blocks: 1}\n")
    quantize(source, tmp_path / "out", recipe)
    manifest = tmp_path / "out" / "zaya_manifest.json"
    record = json.loads(manifest.read_text())
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    lacking = {key: entry for key, entry in record["quantized"].items() if key != name}
    for changed, text in (
        ({**record["quantized"], "model.layers.0.mlp.experts.0.up_proj.weight": {}}, "in full precision although"),
        (lacking, "quantized although"),
    ):
        manifest.write_text(json.dumps({**record, "quantized": changed}))
        (failure,) = check_structure(tmp_path / "out").failures
        assert text in failure.message


@pytest.mark.parametrize("options", [{"workers": 0}, {"expert_layout": "sideways"}, {"device": "cuda:99"},
                                     {"device": "tpu"}, {"max_shard_size": "none"}, {"recipe": "fp9"}])  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    with pytest.raises(ZayaError) as caught:
        quantize(source, tmp_path / "out", **options)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_rules_that_decide_nothing_are_told(source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yaml"
    recipe.write_text("name: twice\ndescription: Twice.\nrules:\n- {role: experts, scheme: int4}\n"
                      "- {role: experts, scheme: fp8}\n")  # fmt: skip
    assert any("`experts: int4` decides nothing" in warning for warning in plan_quantization(source, recipe).warnings)


def test_a_source_of_other_values_is_not_complete(tmp_path: Path) -> None:
    """The next iteration of a run has files of the same names, sizes and headers."""
    model(tmp_path / "source", GEOMETRY)
    quantize(tmp_path / "source", tmp_path / "out", "fp8")
    assert quantize(tmp_path / "source", tmp_path / "out", "fp8", resume=True).already_complete
    os.utime(tmp_path / "source" / "model.safetensors")
    assert quantize(tmp_path / "source", tmp_path / "out", "fp8", resume=True).already_complete
    model(tmp_path / "source", GEOMETRY, seed=1)
    with pytest.raises(DestinationError):
        quantize(tmp_path / "source", tmp_path / "out", "fp8", resume=True)


def test_a_wish_for_other_kernels_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZAYA_KERNELS", "fortran")
    with pytest.raises(ZayaError, match="ZAYA_KERNELS is 'fortran'"):
        quantize(source, tmp_path / "out", "fp8")
    assert no_leftovers(tmp_path)


def test_tied_heads_that_differ_are_refused(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path / "source", NATIVE, GEOMETRY)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    write_tensors(tmp_path / "source", {**tensors, **head}, config_of(NATIVE, GEOMETRY))
    with pytest.raises(LayoutError, match="differs from the embedding"):
        quantize(tmp_path / "source", tmp_path / "out", "fp8")


def test_clamp_temp_is_baked_in(tmp_path: Path) -> None:
    clamped = geometry(clamp_temp=True)
    write_checkpoint(tmp_path / "source", RAW, clamped)
    result = quantize(tmp_path / "source", tmp_path / "out", "fp8")
    assert any("clamp_temp" in note for note in result.conversion.notes)
    assert check_weights(tmp_path / "out", tmp_path / "source").failures == ()
