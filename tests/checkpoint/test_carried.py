"""Checkpoints that were quantized under raw names: carried across with their scales, or refused in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.synthetic import LAYOUTS, config_of, logical, read_tensors, same_bits, small, split, write_tensors
from zaya_tools import convert, inspect
from zaya_tools.architecture import Architecture
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.base import Layout
from zaya_tools.layouts.native import NATIVE, NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW, SMOE
from zaya_tools.parameters import Role, parameters

A = small(experts=11)
SCHEME: dict[str, Any] = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    "output_activations": None,
}
STATED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {"group_0": {**SCHEME, "targets": ["re:.*local_experts.*linear_fc.*"]}},
    "ignore": ["lm_head", "model.layers.0.self_attn.qkv.linear_q"],
}
Quantizer = Callable[[Tensor], dict[str, Tensor]]


def per_row(weight: Tensor) -> dict[str, Tensor]:
    """FP8 with a float32 scale a row."""
    scale = weight.float().abs().amax(dim=-1, keepdim=True) / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def blocks_of(size: int) -> Quantizer:
    """FP8 with a scale for each `size` x `size` square, the last ones cut off by the matrix's edge."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        rows, columns = (-(-length // size) for length in weight.shape)
        scale = torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
        spread = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[: weight.shape[0], : weight.shape[1]]
        return {"weight": (weight.float() / spread).to(torch.float8_e4m3fn), "weight_scale": scale}

    return quantize


def of_role(layout: Layout, architecture: Architecture, *roles: Role) -> list[str]:
    """Stored names of the matrices of some roles."""
    return [
        part.name
        for parameter in parameters(architecture)
        if parameter.role in roles and len(parameter.shape) > 1
        for part in layout.parts(parameter, architecture)
    ]


def quantized(
    layout: Layout, architecture: Architecture, names: list[str], quantizer: Quantizer = per_row
) -> dict[str, Tensor]:
    """A checkpoint of which some tensors are quantized."""
    tensors = split(layout, architecture, logical(architecture))
    for name in names:
        base = name.removesuffix(".weight")
        for suffix, tensor in quantizer(tensors.pop(name)).items():
            stored = name if suffix == "weight" else f"{base}.{suffix}"
            tensors[stored] = tensor
    return tensors


def write(
    folder: Path, layout: Layout, architecture: Architecture, tensors: Mapping[str, Tensor], **config: Any
) -> Path:
    write_tensors(folder, tensors, {**config_of(layout, architecture), "quantization_config": STATED, **config})
    return folder


def refusal(source: Path, to: Any = "native") -> str:
    destination = source.parent / "refused"
    with pytest.raises(LayoutError) as caught:
        convert(source, destination, to=to)
    assert caught.value.hint
    assert not destination.exists()
    return caught.value.message


@pytest.mark.parametrize("layout", [RAW, SMOE], ids=["raw", "smoe"])
def test_experts_arrive_with_their_rows_and_scales(tmp_path: Path, layout: Layout) -> None:
    tensors = quantized(layout, A, of_role(layout, A, Role.EXPERT))
    source = write(tmp_path / "source", layout, A, tensors)
    convert(source, tmp_path / "native")
    found = read_tensors(tmp_path / "native")
    width = A.expert_width
    block_name = "zaya_block" if layout is RAW else "smoe_block"
    for block in range(A.blocks):
        for expert in range(A.experts):
            before = f"model.layers.{2 * block + 1}.{block_name}.experts.local_experts.{expert}."
            after = f"model.layers.{block}.mlp.experts.{expert}."
            for kind in ("weight", "weight_scale"):
                fused = tensors[f"{before}linear_fc1.{kind}"]
                assert same_bits(found.pop(f"{after}gate_proj.{kind}"), fused[:width])
                assert same_bits(found.pop(f"{after}up_proj.{kind}"), fused[width:])
                assert same_bits(found.pop(f"{after}down_proj.{kind}"), tensors[f"{before}linear_fc2.{kind}"])
    assert not [name for name in found if "experts" in name]
    unquantized = split(NATIVE, A, logical(A))
    for name, tensor in found.items():
        expected = unquantized[name]
        assert same_bits(tensor, expected.float() if name.endswith("balancing_biases") else expected)


def test_the_values_are_those_of_the_source(tmp_path: Path) -> None:
    tensors = quantized(RAW, A, of_role(RAW, A, Role.EXPERT))
    convert(write(tmp_path / "source", RAW, A, tensors), tmp_path / "native")
    found = read_tensors(tmp_path / "native")

    def value(stored: Mapping[str, Tensor], name: str) -> Tensor:
        return stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]

    for block in range(A.blocks):
        for expert in range(A.experts):
            before = f"model.layers.{2 * block + 1}.zaya_block.experts.local_experts.{expert}"
            after = f"model.layers.{block}.mlp.experts.{expert}"
            fused = torch.cat([value(found, f"{after}.gate_proj"), value(found, f"{after}.up_proj")])
            assert torch.equal(fused, value(tensors, f"{before}.linear_fc1"))
            assert torch.equal(value(found, f"{after}.down_proj"), value(tensors, f"{before}.linear_fc2"))


def test_what_was_carried_is_complete_and_recognised(tmp_path: Path) -> None:
    source = write(tmp_path / "source", RAW, A, quantized(RAW, A, of_role(RAW, A, Role.EXPERT)))
    before = inspect(source)
    assert before.convertible
    convert(source, tmp_path / "native")
    report = inspect(tmp_path / "native")
    assert report.complete
    assert report.layout == "native (one tensor an expert)"
    (experts,) = report.as_dict()["quantization"]
    assert experts == {"role": "expert", "quantized": 66, "of": 66, "format": "float-quantized"}
    assert report.parameters == before.parameters


def linear_modules(architecture: Architecture) -> dict[str, Role]:
    """Runtime names of every module that a runtime builds as a linear layer."""
    linear = {Role.ATTENTION, Role.ROUTER, Role.EXPERT}
    return {
        part.name.removesuffix(".weight"): parameter.role
        for parameter in parameters(architecture)
        if parameter.role in linear and len(parameter.shape) > 1
        for part in NATIVE_PER_EXPERT.parts(parameter, architecture)
    } | {"lm_head": Role.HEAD}


def is_ignored(module: str, entries: list[str]) -> bool:
    patterns = [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]
    return module in entries or any(re.match(pattern, module) for pattern in patterns)


@pytest.mark.parametrize(
    "roles", [{Role.EXPERT}, {Role.ATTENTION}, {Role.EXPERT, Role.ATTENTION}], ids=lambda roles: "+".join(sorted(roles))
)
def test_the_config_ignores_exactly_what_is_not_quantized(tmp_path: Path, roles: set[Role]) -> None:
    tensors = quantized(RAW, A, of_role(RAW, A, *roles))
    convert(write(tmp_path / "source", RAW, A, tensors), tmp_path / "native")
    config = json.loads((tmp_path / "native" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"] == {"group_0": {**SCHEME, "targets": ["Linear"]}}
    modules = linear_modules(A)
    for module, role in modules.items():
        assert is_ignored(module, config["ignore"]) is (role not in roles), module
    # Each entry names something that the runtime has.
    for entry in config["ignore"]:
        assert any(is_ignored(module, [entry]) for module in modules), entry
    assert None not in config.values()
    assert config["quant_method"] == "compressed-tensors"
    assert config["format"] == "float-quantized"
    found = read_tensors(tmp_path / "native")
    scaled = {name.removesuffix(".weight_scale") for name in found if name.endswith(".weight_scale")}
    assert scaled == {module for module, role in modules.items() if role in roles}


def test_compressed_tensors_reads_the_config(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    source = write(tmp_path / "source", RAW, A, quantized(RAW, A, of_role(RAW, A, Role.EXPERT)))
    convert(source, tmp_path / "native")
    config = json.loads((tmp_path / "native" / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.config_groups["group_0"].weights.num_bits == 8


@pytest.mark.parametrize("dtype", ["keep", "float32"])
def test_carried_tensors_are_never_cast(tmp_path: Path, dtype: str) -> None:
    tensors = quantized(RAW, A, of_role(RAW, A, Role.EXPERT))
    convert(write(tmp_path / "source", RAW, A, tensors), tmp_path / "native", dtype=dtype)
    found = read_tensors(tmp_path / "native")
    kinds = {name.rsplit(".", 1)[1]: tensor.dtype for name, tensor in found.items() if ".experts." in name}
    assert kinds == {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32}


def test_square_scales_are_cut_where_the_matrix_is_cut(tmp_path: Path) -> None:
    architecture = small(expert_width=256, hidden_size=128, experts=2, blocks=1)
    tensors = quantized(RAW, architecture, of_role(RAW, architecture, Role.EXPERT), blocks_of(128))
    convert(write(tmp_path / "source", RAW, architecture, tensors), tmp_path / "native")
    found = read_tensors(tmp_path / "native")
    scale = tensors["model.layers.1.zaya_block.experts.local_experts.1.linear_fc1.weight_scale"]
    assert scale.shape == (4, 1)
    assert torch.equal(found["model.layers.0.mlp.experts.1.gate_proj.weight_scale"], scale[:2])
    assert torch.equal(found["model.layers.0.mlp.experts.1.up_proj.weight_scale"], scale[2:])


@pytest.mark.parametrize("width", [64, 96, 192, 224, 250])
def test_a_square_that_spans_gate_and_up_cannot_be_carried(tmp_path: Path, width: int) -> None:
    architecture = small(expert_width=width, experts=2, blocks=1)
    tensors = quantized(RAW, architecture, of_role(RAW, architecture, Role.EXPERT), blocks_of(128))
    message = refusal(write(tmp_path / "source", RAW, architecture, tensors))
    assert "linear_fc1.weight_scale" in message
    assert "shared by an expert's gate and up halves" in message


@pytest.mark.parametrize("suffix", ["input_scale", "weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_scale_shared_by_gate_and_up_cannot_be_carried(tmp_path: Path, suffix: str, shape: tuple[int, ...]) -> None:
    def quantize(weight: Tensor) -> dict[str, Tensor]:
        return {**per_row(weight), suffix: torch.ones(shape)}

    tensors = quantized(RAW, A, of_role(RAW, A, Role.EXPERT), quantize)
    message = refusal(write(tmp_path / "source", RAW, A, tensors))
    assert f"linear_fc1.{suffix} of shape {list(shape)} is shared" in message


def test_packed_weights_that_store_their_shape_cannot_be_carried(tmp_path: Path) -> None:
    def pack(weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        return {
            "weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
            "weight_scale": torch.ones(rows, columns // 16),
            "weight_shape": torch.tensor([rows, columns]),
        }

    tensors = quantized(RAW, A, of_role(RAW, A, Role.EXPERT), pack)
    tensors = {name.replace("weight.weight", "weight"): tensor for name, tensor in tensors.items()}
    assert "linear_fc1.weight_shape" in refusal(write(tmp_path / "source", RAW, A, tensors))


@pytest.mark.parametrize("stated", [None, {}, {"quant_method": "fp8"}, {"config_groups": {}}, "fp8"], ids=str)
def test_scales_without_a_scheme_mean_nothing(tmp_path: Path, stated: Any) -> None:
    tensors = quantized(RAW, A, of_role(RAW, A, Role.EXPERT))
    source = write(tmp_path / "source", RAW, A, tensors, quantization_config=stated)
    assert "no compressed-tensors quantization_config" in refusal(source)
    report = inspect(source)
    assert not report.convertible
    assert "quantization_config" in report.verdict


def test_two_schemes_cannot_be_carried(tmp_path: Path) -> None:
    other = {**SCHEME, "weights": {**SCHEME["weights"], "strategy": "tensor"}}
    stated = {**STATED, "config_groups": {"a": {**SCHEME, "targets": ["x"]}, "b": {**other, "targets": ["y"]}}}
    tensors = quantized(RAW, A, of_role(RAW, A, Role.EXPERT))
    assert "2 different quantization schemes" in refusal(
        write(tmp_path / "source", RAW, A, tensors, quantization_config=stated)
    )


@pytest.mark.parametrize("index", [0, 7, -1])
def test_one_expert_left_in_full_precision_is_refused(tmp_path: Path, index: int) -> None:
    names = of_role(RAW, A, Role.EXPERT)
    odd = names[index]
    message = refusal(write(tmp_path / "source", RAW, A, quantized(RAW, A, [n for n in names if n != odd])))
    assert f"{odd} is not quantized as the other experts of its block are" in message


def test_one_block_left_in_full_precision_is_refused(tmp_path: Path) -> None:
    names = [name for name in of_role(RAW, A, Role.EXPERT) if name.startswith("model.layers.1.")]
    message = refusal(write(tmp_path / "source", RAW, A, quantized(RAW, A, names)))
    assert "only some tensors of the role 'expert' are quantized" in message


@pytest.mark.parametrize("layout", [SMOE, NATIVE, NATIVE_PER_EXPERT], ids=["smoe", "native", "native per expert"])
def test_the_raw_layout_has_no_quantized_form(tmp_path: Path, layout: Layout) -> None:
    source = write(tmp_path / "source", layout, A, quantized(layout, A, of_role(layout, A, Role.EXPERT)))
    assert "the raw layout has no quantized form" in refusal(source, to="raw")


def mx(weight: Tensor) -> dict[str, Tensor]:
    """Two 4-bit values a byte, a power of two for each 32."""
    *others, columns = weight.shape
    return {
        "weight": torch.zeros((*others, columns // 2), dtype=torch.uint8),
        "weight_scale": torch.zeros((*others, columns // 32), dtype=torch.uint8),
    }


@pytest.mark.parametrize("quantizer", [per_row, mx], ids=["fp8", "mxfp4"])
@pytest.mark.parametrize("layout", [NATIVE, NATIVE_PER_EXPERT], ids=["stacked", "per expert"])
def test_native_quantized_checkpoints_are_recognised(tmp_path: Path, layout: Layout, quantizer: Quantizer) -> None:
    names = of_role(layout, A, Role.EXPERT)
    tensors = quantized(layout, A, names, quantizer)
    if layout is NATIVE:
        assert "model.layers.0.mlp.experts.gate_up_proj.weight_scale" in tensors
    else:
        assert "model.layers.0.mlp.experts.10.gate_proj.weight_scale" in tensors
    report = inspect(write(tmp_path / "it", layout, A, tensors))
    assert report.complete
    assert not report.convertible
    assert "already native" in report.verdict
    (experts,) = report.quantization
    assert (experts.role, experts.quantized, experts.total) == ("expert", len(names), len(names))
    held = {(row.role, row.dtype): row.tensors for row in report.held}
    stored_as = "F8_E4M3" if quantizer is per_row else "U8"
    assert held["expert", stored_as] == len(names) * (1 if quantizer is per_row else 2)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nothing_is_said_about_quantization_where_there_is_none(tmp_path: Path, layout: Layout) -> None:
    write_tensors(tmp_path / "it", split(layout, A, logical(A)), config_of(layout, A))
    report = inspect(tmp_path / "it")
    assert report.quantization == ()
    if report.convertible:
        convert(tmp_path / "it", tmp_path / "native")
        assert "quantization_config" not in json.loads((tmp_path / "native" / "config.json").read_text())
