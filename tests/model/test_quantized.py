"""Checkpoints that llm-compressor writes, against its own model in memory and compressed-tensors' own arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from torch import Tensor

from tests.synthetic import logical, read_tensors, small, split, write_checkpoint, write_tensors
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.native import NATIVE
from zaya_tools.layouts.raw import RAW
from zaya_tools.layouts.raw_config import raw_config
from zaya_tools.model.block import Block
from zaya_tools.model.model import ZayaModel
from zaya_tools.model.quantized import QuantizedExperts, QuantizedLinear, Schemes, int8_tokens, read_schemes
from zaya_tools.model.weights import Weights

A = small(
    hidden_size=128, expert_width=128, head_dim=64, query_heads=2, kv_heads=1, experts=3, attention_bias=True,
    tied=False, dtype="float32", sliding=(True, False), sliding_window=5, sliding_rope_theta=2e4,
)  # fmt: skip
IGNORE = ["re:.*mlp\\.gate\\..*", "re:.*conv_qk_.*"]
HEAD = [*IGNORE, "lm_head"]
EXPERTS = "model.layers.{}.mlp.experts.{}.{}_proj"


def _scheme(weights: dict[str, Any], inputs: dict[str, Any] | None = None, targets: str = "Linear") -> Any:
    return QuantizationScheme(
        targets=[targets],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )


INT4_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
STATIC_INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
RECIPES: dict[str, dict[str, Any]] = {
    "FP8 dynamic": {"scheme": "FP8_DYNAMIC"},
    "FP8 static": {"scheme": "FP8"},
    "FP8 block": {"scheme": "FP8_BLOCK"},
    "INT8": {"scheme": "W8A8"},
    "INT8 static, asymmetric": {"config_groups": {"a": _scheme(INT8, STATIC_INT8)}},
    "INT4 g128": {"scheme": "W4A16"},
    "INT4 g128, asymmetric": {"scheme": "W4A16_ASYM"},
    "INT4 g32": {"config_groups": {"a": _scheme(INT4_32)}},
    "INT4 g32, asymmetric": {"config_groups": {"a": _scheme({**INT4_32, "symmetric": False})}},
    "INT4 with INT8 activations": {"scheme": "W4A8"},
    "NVFP4, weights only": {"scheme": "NVFP4A16"},
    "NVFP4": {"scheme": "NVFP4"},
    "MXFP4, weights only": {"scheme": "MXFP4A16"},
    "MXFP4": {"scheme": "MXFP4"},
    "MXFP8": {"scheme": "MXFP8"},
    "two schemes": {
        "config_groups": {
            "experts": _scheme(INT4_32, targets=r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"),
            "attention": _scheme(
                {"num_bits": 8, "type": "float", "strategy": "channel"},
                {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                targets=r"re:.*self_attn\.(qkv_proj\.[qkv]_proj.*|o_proj)$",
            ),
        }
    },
    "FP8 dynamic, head too": {"scheme": "FP8_DYNAMIC", "ignore": IGNORE},
    "INT4 g128, head too": {"scheme": "W4A16", "ignore": IGNORE},
}  # fmt: skip
STATIC = ("FP8 static", "NVFP4", "INT8 static, asymmetric")
PROBED = ("self_attn.o_proj", "self_attn.qkv_proj.k_proj", "mlp.experts.1.gate_proj", "mlp.experts.2.down_proj")
NOISE = 1e-5


@dataclass(frozen=True)
class Made:
    """A checkpoint, and what the library's own model said before it was saved."""

    folder: Path
    logits: Tensor
    weights: dict[str, Tensor]
    outputs: dict[str, Tensor]
    activations: bool


def _ids() -> Tensor:
    return torch.randint(0, A.vocab_size, (2, 48), generator=torch.Generator().manual_seed(5))


def _rows(width: int = 128) -> Tensor:
    """Tokens of very different size, a zero one among them."""
    noise = torch.randn(1, 7, width, generator=torch.Generator().manual_seed(6))
    return noise * torch.tensor([1e-3, 0.1, 1, 3, 20, 300, 0])[:, None]


def _served(original: Callable[..., Any]) -> Callable[..., Any]:
    """The library's dynamic scales, as vLLM has them.

    A scale for each of the rows [tokens, width], where the library gives all tokens one; for INT8 tokens with 127 steps
    a side instead of 127.5.
    """

    def scales(value: Tensor, args: Any, module: Any, global_scale: Tensor | None = None) -> Any:
        if args.strategy != "token":
            return original(value, args, module, global_scale=global_scale)
        rows = value if value.ndim > 2 else value[None]
        scale, zero = (
            found if value.ndim > 2 else found[0] for found in original(rows, args, module, global_scale=global_scale)
        )
        if (args.type, args.num_bits, args.symmetric) == ("int", 8, True):
            scale = value.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / 127
        return scale, zero

    return scales


def _make(folder: Path, recipe: Mapping[str, Any], source: Path, calibrated: bool) -> Made:
    import datasets
    from compressed_tensors.quantization.lifecycle import forward
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import ZayaForCausalLM

    model = ZayaForCausalLM.from_pretrained(source, dtype=torch.float32)
    targets: dict[str, Any] = {"targets": "Linear"} if "scheme" in recipe else {}
    modifier = QuantizationModifier(**{"ignore": HEAD, **targets, **recipe})
    how: dict[str, Any] = {"pipeline": "datafree"}
    if calibrated:
        text = torch.randint(0, A.vocab_size, (4, 64), generator=torch.Generator().manual_seed(7)).tolist()
        rows = {"input_ids": text, "attention_mask": [[1] * 64] * 4}
        how = {"dataset": datasets.Dataset.from_dict(rows), "num_calibration_samples": 4, "max_seq_length": 64}
    oneshot(model=model, recipe=modifier, **how)
    probed = {f"model.layers.1.{name}": model.get_submodule(f"model.layers.1.{name}") for name in PROBED}
    before = forward.compute_dynamic_scales_and_zp
    forward.compute_dynamic_scales_and_zp = _served(before)
    try:
        with torch.no_grad():
            logits = model(_ids(), use_cache=False).logits
            outputs = {name: module(_rows()) for name, module in probed.items()}
            weights = {
                name: forward.forward_quantize(module, module.weight, "weight", module.quantization_scheme.weights)
                for name, module in probed.items()
            }
    finally:
        forward.compute_dynamic_scales_and_zp = before
    activations = any(m.quantization_scheme.input_activations is not None for m in probed.values())
    model.save_pretrained(folder, save_compressed=True)
    return Made(folder, logits, weights, outputs, activations)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    pytest.importorskip("llmcompressor")
    source = tmp_path_factory.mktemp("source")
    write_checkpoint(source, NATIVE, A, dtype="F32")
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            folder = tmp_path_factory.mktemp("quantized")
            made[name] = _make(folder, RECIPES[name], source, name in STATIC)
        return made[name]

    return get


def model_of(folder: Path, dtype: torch.dtype = torch.float32) -> ZayaModel:
    weights = Weights.open(folder, dtype=dtype)
    return ZayaModel(weights.architecture, weights.ends(), weights.resident())


def probe(block: Block) -> dict[str, QuantizedLinear]:
    experts = block.experts
    assert isinstance(experts, QuantizedExperts)
    output = block.attention.output
    assert isinstance(output, QuantizedLinear)
    joined = getattr(block.attention.projections, "parts")  # noqa: B009
    linears = [output, *joined, *experts.down, *(part for parts in experts.gate_up for part in parts)]
    assert all(isinstance(linear, QuantizedLinear) for linear in linears)
    return {linear.module: linear for linear in linears}


def median(difference: Tensor) -> float:
    return difference.abs().amax(dim=-1).median().item()


@pytest.mark.parametrize("name", RECIPES)
def test_linear_layers_are_those_of_the_library(make: Callable[[str], Made], name: str) -> None:
    made = make(name)
    linears = probe(Weights.open(made.folder).resident()[1])
    for module, expected in made.weights.items():
        weight = linears[module].weight()
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)
        if "NVFP4" not in name:  # whose three factors the library multiplies in another order
            assert torch.equal(weight, expected)
        size = made.outputs[module].abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
        torch.testing.assert_close(linears[module](_rows()) / size, made.outputs[module] / size, rtol=0, atol=NOISE)


@pytest.mark.parametrize("name", RECIPES)
def test_logits_are_those_of_fake_quantization_in_memory(make: Callable[[str], Made], name: str) -> None:
    made = make(name)
    ours = model_of(made.folder).logits(_ids())
    difference = ours - made.logits
    # Rounding of activations turns float32 noise into a step here and there, which later tokens see a little of.
    assert median(difference) < (1e-4 if made.activations else NOISE)
    assert difference.abs().max() < (1 if made.activations else 1e-4)
    unquantized = ZayaModel.of(A, logical(A, dtype="F32")).logits(_ids())
    assert median(ours - unquantized) > 100 * median(difference)


@pytest.mark.parametrize("name", ["FP8 dynamic", "INT8", "INT4 with INT8 activations", "NVFP4", "MXFP4", "MXFP8"])
def test_what_a_token_gives_does_not_depend_on_its_neighbours(make: Callable[[str], Made], name: str) -> None:
    linears = probe(Weights.open(make(name).folder).resident()[0])
    rows = _rows()[0]
    for linear in linears.values():
        together, alone = linear(rows), torch.cat([linear(row[None]) for row in rows])
        size = together.abs().amax(dim=-1, keepdim=True).clamp_min(1e-3)
        torch.testing.assert_close(together / size, alone / size, rtol=0, atol=NOISE)
        assert torch.equal(linear.quantize_input(rows), torch.cat([linear.quantize_input(r[None]) for r in rows]))
        assert torch.equal(linear.quantize_input(rows[0]), linear.quantize_input(rows)[0])  # a lone token


@pytest.mark.parametrize("name", ["FP8 dynamic", "FP8 static", "INT8", "INT4 g128", "NVFP4, weights only", "MXFP8"])
def test_bfloat16_compute_is_near_float32(make: Callable[[str], Made], name: str) -> None:
    exact = model_of(make(name).folder).logits(_ids())
    rounded = model_of(make(name).folder, torch.bfloat16).logits(_ids())
    assert rounded.dtype == torch.bfloat16
    assert median(rounded - exact) < 0.1 * exact.std()


def test_static_scales_of_16_bits_do_not_round_the_inputs(make: Callable[[str], Made]) -> None:
    for linear in probe(Weights.open(make("FP8 static").folder).resident()[1]).values():
        scale = linear.state["input_scale"].bfloat16()
        short, wide = (replace(linear, state={**linear.state, "input_scale": s}) for s in (scale, scale.float()))
        assert torch.equal(short.quantize_input(_rows()), wide.quantize_input(_rows()))


def test_scales_of_16_bits_do_not_round_the_weights(make: Callable[[str], Made], tmp_path: Path) -> None:
    for name in ("FP8 dynamic", "INT4 g32, asymmetric", "INT8"):
        tensors = read_tensors(make(name).folder)
        tensors = {n: t.bfloat16() if n.endswith("weight_scale") else t for n, t in tensors.items()}
        config = json.loads((make(name).folder / "config.json").read_text())
        write_tensors(tmp_path / name, tensors, config)
        for module, linear in probe(Weights.open(tmp_path / name).resident()[1]).items():
            own = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
            own["weight_scale"] = own["weight_scale"].float()
            scheme, form = linear.scheme
            expected = BaseCompressor.get_value_from_registry(form).decompress(own, scheme)["weight"]
            assert torch.equal(linear.weight(), expected)
            assert len(set(linear.weight().flatten().tolist())) > 256  # more than bfloat16 would leave of a row


def stack(tensors: Mapping[str, Tensor], block: int, matrices: tuple[str, ...], suffix: str) -> Tensor | None:
    """One tensor of all experts, [experts, ...], each with the rows of its matrices one after the other."""
    names = [[f"{EXPERTS.format(block, expert, m)}.{suffix}" for m in matrices] for expert in range(A.experts)]
    if names[0][0] not in tensors:
        return None
    if suffix == "weight_shape":
        return torch.tensor([A.experts, len(matrices) * A.expert_width, A.hidden_size])
    if suffix.endswith("global_scale") or suffix == "input_scale":
        # Gate and up share one, or could not be one matrix.
        assert all(torch.equal(tensors[own[0]], tensors[name]) for own in names for name in own)
        return torch.stack([tensors[own[0]] for own in names])
    return torch.stack([torch.cat([tensors[name] for name in own]) for own in names])


SUFFIXES = (
    "weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale",
    "input_scale", "input_global_scale",
)  # fmt: skip


def restacked(tensors: Mapping[str, Tensor], plain: tuple[str, ...] = ("weight",)) -> dict[str, Tensor]:
    """Experts of a checkpoint in stacks; `plain` suffixes are stored under the name of the stack itself."""
    result = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for block in range(A.blocks):
        for name, matrices in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            for suffix in SUFFIXES:
                whole = stack(tensors, block, matrices, suffix)
                if whole is not None:
                    module = f"model.layers.{block}.mlp.experts.{name}"
                    result[module if suffix in plain else f"{module}.{suffix}"] = whole
    return result


STACKED = [
    ("FP8 dynamic", ("weight",)), ("INT8", ("weight",)), ("INT4 g32, asymmetric", ()), ("INT4 g128", ()),
    ("NVFP4, weights only", ()), ("NVFP4", ("weight_packed",)), ("MXFP4", ("weight_packed",)),
    ("two schemes", ()),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plain"), STACKED)
def test_stacked_experts_compute_as_experts_one_by_one(
    make: Callable[[str], Made], name: str, plain: tuple[str, ...], tmp_path: Path
) -> None:
    folder = make(name).folder
    config = json.loads((folder / "config.json").read_text())
    write_tensors(tmp_path, restacked(read_tensors(folder), plain), config)
    torch.testing.assert_close(
        model_of(tmp_path).logits(_ids()), model_of(folder).logits(_ids()), atol=NOISE, rtol=NOISE
    )


@pytest.mark.parametrize("targets", [None, [r"re:.*local_experts\.\d+\.linear_fc.*"], [r"re:.*experts\..*_proj"]])
def test_quantized_experts_under_raw_names(
    make: Callable[[str], Made], tmp_path: Path, targets: list[str] | None
) -> None:
    """Whatever its one group targets: raw names, names of the runtime, or the class."""
    folder = make("FP8 dynamic").folder
    tensors = read_tensors(folder)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    if targets:
        config["config_groups"]["group_0"]["targets"] = targets
    dense = logical(A, dtype="F32")
    raw = split(RAW, A, dense)
    for block in range(A.blocks):
        for expert in range(A.experts):
            for fc, matrices in (("linear_fc1", ("gate", "up")), ("linear_fc2", ("down",))):
                names = [EXPERTS.format(block, expert, matrix) for matrix in matrices]
                (module,) = (
                    n.removesuffix(".weight") for n in raw
                    if n.endswith(f".{expert}.{fc}.weight") and f".layers.{2 * block + 1}." in n
                )  # fmt: skip
                for suffix in ("weight", "weight_scale"):
                    raw[f"{module}.{suffix}"] = torch.cat([tensors[f"{name}.{suffix}"] for name in names])
    write_tensors(tmp_path / "raw", raw, {**raw_config(A), "quantization_config": config})
    # Attention is in full precision here: what is compared with has the weights as they were dequantized.
    expected = {n: t for n, t in tensors.items() if ".self_attn." not in n}
    expected |= {n: t for n, t in dense.items() if ".self_attn." in n}
    native = json.loads((folder / "config.json").read_text())
    write_tensors(tmp_path / "native", expected, native)
    torch.testing.assert_close(
        model_of(tmp_path / "raw").logits(_ids()), model_of(tmp_path / "native").logits(_ids()), atol=NOISE, rtol=NOISE
    )


def edited(folder: Path, target: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> Path:
    tensors, config = read_tensors(folder), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    write_tensors(target, tensors, config)
    return target


def test_what_cannot_be_decoded_is_named(make: Callable[[str], Made], tmp_path: Path) -> None:
    def group(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64

    def halve(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name][: len(tensors[name]) // 2]

    def form(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["format"] = "nvfp4-pack-quantized"

    def cut(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for expert in range(A.experts):  # which of them is used does not matter then
            name = EXPERTS.format(1, expert, "up") + ".weight_packed"
            tensors[name] = tensors[name][:, :-1]

    faults = (
        (group, "has 1 scales a row"),
        (halve, "cannot be decoded as"),
        (form, "decoded as nvfp4"),
        (cut, "words"),
    )
    for number, (change, message) in enumerate(faults):
        folder = edited(make("INT4 g128").folder, tmp_path / str(number), change)
        with pytest.raises(LayoutError, match=rf"model\.layers\.\d\..*proj .*{message}"):
            model_of(folder).logits(_ids())


def test_missing_input_scales_are_named(make: Callable[[str], Made], tmp_path: Path) -> None:
    for name, suffix in (("FP8 static", "input_scale"), ("NVFP4", "input_global_scale")):
        module = EXPERTS.format(1, 0, "down")

        def change(tensors: dict[str, Tensor], config: dict[str, Any], gone: str = f"{module}.{suffix}") -> None:
            del tensors[gone]
            for expert in range(A.experts):
                tensors.pop(f"{EXPERTS.format(1, expert, 'down')}.{gone.rpartition('.')[2]}", None)

        folder = edited(make(name).folder, tmp_path / suffix, change)
        with pytest.raises(LayoutError, match=rf"model\.layers\.1\.mlp\.experts\.\d\.down_proj .*no {suffix}"):
            model_of(folder).logits(_ids())


def test_experts_half_quantized_are_refused(make: Callable[[str], Made], tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for expert in range(A.experts):
            module = EXPERTS.format(0, expert, "down")
            del tensors[f"{module}.weight_scale"]
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"].float()

    folder = edited(make("FP8 dynamic").folder, tmp_path, change)
    with pytest.raises(LayoutError, match="block 0: only some"):
        Weights.open(folder).resident()


# Schemes, without a checkpoint.

FP8, FP4 = (preset_name_to_scheme(name, ["Linear"]).model_dump() for name in ("FP8_DYNAMIC", "NVFP4A16"))


def schemes(*targets: list[str], form: str = "float-quantized") -> Schemes:
    groups = {f"group_{i}": {**(FP8, FP4)[i % 2], "targets": own} for i, own in enumerate(targets)}
    return read_schemes({"quantization_config": {"format": form, "config_groups": groups}})


def test_a_name_wins_over_a_pattern_over_a_class() -> None:
    module = "model.layers.0.self_attn.o_proj"
    bits = {4: 1, 8: 0}

    def chosen(*targets: list[str]) -> int:
        return bits[schemes(*targets).of(module)[0].weights.num_bits]

    assert chosen(["Linear"], ["re:.*o_proj"]) == 1
    assert chosen(["re:.*o_proj"], ["Linear"]) == 0
    assert chosen(["re:.*o_proj"], [module]) == 1
    assert chosen([module], ["re:.*o_proj"]) == 0
    assert chosen(["re:.*self_attn.*"], ["re:.*o_proj"]) == 0
    assert chosen(["Linear"], ["re:.*down_proj"]) == 0
    assert chosen(["re:.*down_proj", "Linear"]) == 0


def test_a_module_goes_by_any_of_its_names() -> None:
    stacked, first = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.0.down_proj"
    found = schemes(["re:.*self_attn.*"], [r"re:.*experts\.\d+\.down_proj$"])
    assert found.of(stacked, first)[0].weights.num_bits == 4
    with pytest.raises(LayoutError, match=r"experts\.down_proj is quantized but no group"):
        found.of(stacked)
    # One group can only mean the one module that has scales; of two, it cannot be told which.
    assert schemes(["re:.*nothing"]).of(stacked, single=True)[0].weights.num_bits == 8
    with pytest.raises(LayoutError, match="no group"):
        found.of(stacked, single=True)


def test_an_embedding_is_no_linear_layer() -> None:
    found = schemes(["Linear"], ["Embedding"])
    assert found.of("model.embed_tokens", kind="Embedding")[0].weights.num_bits == 4
    assert found.of("lm_head")[0].weights.num_bits == 8


@pytest.mark.parametrize("form", ["mixed-precision", "dense", "fakequant"])
def test_a_scheme_without_a_format_of_its_own_gets_the_one_it_is_written_in(form: str) -> None:
    found = schemes(["re:.*self_attn.*"], ["re:.*experts.*"], form=form)
    assert found.of("x.self_attn.o_proj")[1] == "float-quantized"
    assert found.of("x.experts.0.up_proj")[1] == "nvfp4-pack-quantized"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no quantization_config"),
        ({"quantization_config": None}, "no quantization_config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"quantization_config": {"config_groups": 3}}, "compressed-tensors reads"),
        ({"quantization_config": {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": "x"}}}}},
         "compressed-tensors reads"),
    ],
)  # fmt: skip
def test_configs_that_say_nothing_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        read_schemes(config)


def test_int8_tokens_have_127_steps_a_side() -> None:
    rows = torch.tensor([[254.0, -254, 3, 1, 5, 0], [0, 0, 0, 0, 0, 0], [1e-38, -1e-38, 0, 0, 0, 0]])
    # Steps of 2: 3 and 5 lie between two of them, and go to the even one.
    expected = torch.tensor([254.0, -254, 4, 0, 4, 0])
    found = int8_tokens(rows)
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], torch.zeros(6))
    assert torch.isfinite(found).all()
    assert torch.equal(int8_tokens(rows.bfloat16()), int8_tokens(rows.bfloat16().float()).bfloat16())
    assert int8_tokens(torch.tensor([[1.0, float("nan")], [1.0, float("inf")]])).isnan().any(dim=-1).all()
    one = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(int8_tokens(one).view(12, 5), int8_tokens(one.view(12, 5)))
    assert (int8_tokens(one) - one).abs().max() <= one.abs().max() / 127 / 2 * (1 + 1e-6)
