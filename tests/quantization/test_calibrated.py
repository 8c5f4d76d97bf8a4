"""Recipes that learn from inputs, from the command's function to the published folder."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.calibration.support import bent, scaled
from tests.checkpoint.support import tree
from tests.quantization.support import LEARNING
from tests.synthetic import LAYOUTS, same_bits, small, write_checkpoint
from zaya_tools import calibrate, quantize
from zaya_tools.calibration.data import Choice
from zaya_tools.calibration.observing import sites
from zaya_tools.calibration.run import Settings
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.source import open_source, stretches
from zaya_tools.data import TINY
from zaya_tools.errors import DestinationError, NonFiniteError, ZayaError
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.evaluation.text import HELD_OUT, tokenize
from zaya_tools.evaluation.weights import check_weights
from zaya_tools.evaluation.windows import cut
from zaya_tools.layouts.native import NATIVE
from zaya_tools.model.loading import build_block
from zaya_tools.model.streaming import Stream
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import PROTECTED, parameters
from zaya_tools.quantization.auto import choose_recipe
from zaya_tools.quantization.block import BlockWork
from zaya_tools.quantization.calibrated import Calibration, Stage
from zaya_tools.quantization.group import ALONE
from zaya_tools.quantization.resolve import Decision
from zaya_tools.quantization.scheme import (
    AWQ,
    CALIBRATED,
    GPTQ,
    INFORMED,
    OBSERVERS,
    SCHEMES,
    SMOOTH,
    Observer,
    mismatch,
)

CHOICE = Choice(samples=12, context=128)
GIVEN = Calibration(choice=CHOICE, every=0.0)
DATA_FREE_BESIDE = {
    "int4-imatrix": "int4", "int4-gptq": "int4", "int4-awq": "int4", "int8-smooth": "int8", "fp8-static": None,
    "nvfp4": None,
}  # fmt: skip
"""The recipe of the same size that takes nothing from data."""


class _StoppedError(Exception):
    pass


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny checkpoint by every recipe that learns, and by those that they are compared with."""
    pytest.importorskip("llmcompressor")
    folder = tmp_path_factory.mktemp("quantized")
    torch.set_num_threads(1)  # as every test has it: sums depend on it
    assert set(DATA_FREE_BESIDE) == set(LEARNING)
    for name in (*LEARNING, *filter(None, set(DATA_FREE_BESIDE.values()))):
        quantize(TINY, folder / name, name, calibration=GIVEN)
    convert(TINY, folder / "full")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def divergence(outputs: dict[str, Path]) -> dict[str, float]:
    """Mean KL of every output from the source, nats a token."""
    windows = cut(tokenize(TINY, HELD_OUT, 4096), 256)
    found = {}
    for name, folder in outputs.items():
        divergence = measure(Weights.open(folder), windows, Weights.open(TINY)).divergence
        assert divergence is not None
        found[name] = divergence.kl.value
    return found


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", DATA_FREE_BESIDE)
def test_structure_and_weights_pass(name: str, outputs: dict[str, Path]) -> None:
    for result in (check_structure(outputs[name], TINY), check_weights(outputs[name], TINY)):
        assert [finding.message for finding in result.failures] == []


@pytest.mark.parametrize("name", DATA_FREE_BESIDE)
def test_protected_tensors_are_the_sources_bit_for_bit(name: str, outputs: dict[str, Path]) -> None:
    written, full = tensors(outputs[name]), tensors(outputs["full"])
    kept = [p.name for p in parameters(Weights.open(TINY).architecture) if p.role in PROTECTED]
    assert len(kept) > 80
    assert [n for n in kept if not same_bits(written[n], full[n])] == []
    assert same_bits(written["model.embed_tokens.weight"], full["model.embed_tokens.weight"])


@pytest.mark.parametrize(("name", "least"), [("int4", 12.0), ("int4-gptq", 8.0), ("int4-imatrix", 8.0)])
def test_numbers_that_were_moved_for_their_inputs_may_be_further_off(
    name: str, least: float, outputs: dict[str, Path]
) -> None:
    measured = json.loads((outputs[name] / "zaya_manifest.json").read_text())["quantized"]
    assert {facts.get("learned", False) for facts in measured.values()} == {name != "int4"}
    (limit,) = check_weights(outputs[name], TINY).figures["limits"]
    assert limit["sqnr_db_min"] == least


EXPERT = "model.layers.2.mlp.experts"


def scale_a_row(held: dict[str, Tensor]) -> None:
    held[f"{EXPERT}.3.down_proj.weight_scale"][5] *= 4


def empty_rows(held: dict[str, Tensor]) -> None:
    held[f"{EXPERT}.3.up_proj.weight"][8:15] = 0


def negate(held: dict[str, Tensor]) -> None:
    held[f"{EXPERT}.3.down_proj.weight"].neg_()


def swap_experts(held: dict[str, Tensor]) -> None:
    one, other = (f"{EXPERT}.{expert}.down_proj.weight" for expert in (1, 2))
    held[one], held[other] = held[other], held[one]


def permute_rows(held: dict[str, Tensor]) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    held[name] = held[name].roll(1, 0).contiguous()


@pytest.mark.parametrize("damage", [scale_a_row, empty_rows, negate, swap_experts, permute_rows])
def test_damage_to_smoothed_matrices_is_seen_in_the_weights(
    damage: Callable[[dict[str, Tensor]], None], outputs: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(outputs["int8-smooth"], tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    held = load_file(file)
    damage(held)
    save_file(held, file, metadata={"format": "pt"})
    assert check_weights(tmp_path / "out", TINY).failures


def test_learning_pays(divergence: dict[str, float]) -> None:
    # From 192 tokens an expert; more text gives more.
    assert divergence["int4-imatrix"] < 0.9 * divergence["int4"]
    assert divergence["int4-awq"] < 0.9 * divergence["int4"]
    assert divergence["int4-gptq"] < 0.7 * divergence["int4"]
    assert divergence["int8-smooth"] < 0.0006
    assert divergence["fp8-static"] < 0.003
    assert divergence["nvfp4"] < 0.025


@pytest.mark.parametrize("name", ["int4-imatrix", "nvfp4", "int4-gptq"])
def test_statistics_from_a_file_or_made_on_the_way_are_the_same(
    name: str, outputs: dict[str, Path], tmp_path: Path
) -> None:
    calibrate(TINY, tmp_path / "stats", Settings(CHOICE))
    given = Calibration(statistics=tmp_path / "stats", choice=CHOICE if name == "int4-gptq" else None)
    quantize(TINY, tmp_path / "out", name, calibration=given)
    mine, other = tensors(tmp_path / "out"), tensors(outputs[name])
    assert mine.keys() == other.keys()
    assert [n for n in mine if not same_bits(mine[n], other[n])] == []


def stop_after(block: int) -> Any:
    def report(stage: Stage) -> None:
        if (stage.name, stage.block) == ("quantizing", block):
            raise _StoppedError

    return report


@pytest.mark.parametrize("name", ["int4-gptq", "int8-smooth"])
@pytest.mark.parametrize("block", [0, 3])
def test_a_stopped_run_resumes_to_the_same_bytes(
    name: str, block: int, outputs: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(_StoppedError):
        quantize(TINY, tmp_path / name, name, calibration=GIVEN, report=stop_after(block))
    assert not (tmp_path / name).exists()
    with pytest.raises(DestinationError, match="unfinished run"):
        quantize(TINY, tmp_path / name, name, calibration=GIVEN)
    other = replace(GIVEN, choice=replace(CHOICE, seed=5))
    with pytest.raises(DestinationError, match="other data or other options"):
        quantize(TINY, tmp_path / name, name, calibration=other, resume=True)
    again: list[int] = []

    def report(stage: Stage) -> None:
        if stage.name == "quantizing":
            again.append(stage.block)

    quantize(TINY, tmp_path / name, name, calibration=GIVEN, resume=True, report=report)
    assert again == list(range(block + 1, 4))
    assert tree(tmp_path / name) == tree(outputs[name])
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_blocks_that_were_finished_after_the_states_were_saved_are_not_quantized_again(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rarely = replace(GIVEN, every=1e9)
    with pytest.raises(_StoppedError):
        quantize(TINY, tmp_path / "out", "int4-gptq", calibration=rarely, report=stop_after(2))
    assert not list(tmp_path.glob("*/states-quantized*"))
    worked: list[int] = []
    run = BlockWork.run

    def counting(self: BlockWork) -> Any:
        worked.append(self.index)
        return run(self)

    monkeypatch.setattr(BlockWork, "run", counting)
    quantize(TINY, tmp_path / "out", "int4-gptq", calibration=rarely, resume=True)
    assert worked == [3]
    assert tree(tmp_path / "out") == tree(outputs["int4-gptq"])


@pytest.mark.parametrize("name", ["int4-imatrix", "int4-gptq"])
def test_a_source_that_changed_under_its_headers_is_refused(name: str, tmp_path: Path) -> None:
    model = bent(tmp_path / "model", 0, 0, 0.1)
    with pytest.raises(_StoppedError):
        quantize(model, tmp_path / "out", name, calibration=GIVEN, report=stop_after(1))
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(DestinationError, match="another model"):
        quantize(model, tmp_path / "out", name, calibration=GIVEN, resume=True)


KILL = """
import os, signal, sys
from tests.quantization.test_calibrated import GIVEN
from zaya_tools import quantize
from zaya_tools.data import TINY

def report(stage):
    if stage.name == "quantizing" and stage.block == 1:
        os.kill(os.getpid(), signal.SIGKILL)

quantize(TINY, sys.argv[1], "int4-gptq", calibration=GIVEN, report=report)
"""


def test_a_killed_run_resumes_to_the_same_bytes(outputs: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL, str(tmp_path / "int4-gptq")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == -signal.SIGKILL
    quantize(TINY, tmp_path / "int4-gptq", "int4-gptq", calibration=GIVEN, resume=True)
    assert tree(tmp_path / "int4-gptq") == tree(outputs["int4-gptq"])
    done = quantize(TINY, tmp_path / "int4-gptq", "int4-gptq", calibration=GIVEN, resume=True)
    assert done.already_complete


def test_a_run_killed_after_it_had_published_leaves_nothing_behind(
    outputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("zaya_tools.calibration.workspace._discard", lambda _: None)
        quantize(TINY, tmp_path / "out", "int4-imatrix", calibration=GIVEN)
    assert len(list(tmp_path.iterdir())) == 2
    assert quantize(TINY, tmp_path / "out", "int4-imatrix", calibration=GIVEN, resume=True).already_complete
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert tree(tmp_path / "out") == tree(outputs["int4-imatrix"])


def test_the_manifest_says_what_was_learnt_from(outputs: dict[str, Path]) -> None:
    manifest = json.loads((outputs["int4-awq"] / "zaya_manifest.json").read_text())
    data = manifest["options"]["calibration"]["data"]
    assert (data["data"], data["samples"], data["context"]) == ("library", 12, 128)
    assert len(manifest["quantized"]) == 4 * (5 + 24)
    smoothed = {name.split(".")[-2] for name, facts in manifest["quantized"].items() if facts.get("smoothed")}
    assert smoothed == {"up_proj", "down_proj", "v_proj_current", "v_proj_delayed", "o_proj"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_manifest_has_the_digest_of_every_byte_of_the_source(layout: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    a = small(blocks=2, hidden_size=128, head_dim=64, expert_width=128, vocab_size=320)
    write_checkpoint(source, LAYOUTS[layout], a, seed=1)
    given = replace(GIVEN, tokenizer=str(TINY), choice=Choice(samples=4, context=32))
    quantize(source, tmp_path / "out", "int4-imatrix", calibration=given, max_shard_size="100KB")
    tensors_ = json.loads((tmp_path / "out" / "zaya_manifest.json").read_text())["source"]["tensors"]
    seen = 0
    for tensor in open_source(source).tensors.values():
        data = b"".join(bytes(chunk) for _, chunk in stretches(tensor))
        held = tensors_[tensor.name]
        for part in held:
            seen += part["bytes"]
            digest = blake3(data[part["offset"] : part["offset"] + part["bytes"]]).hexdigest()
            assert part["blake3"] == digest, tensor.name
        assert sum(part["bytes"] for part in held) == tensor.nbytes, tensor.name
    assert seen == open_source(source).nbytes


@pytest.mark.parametrize("name", ["fp8-static", "nvfp4", "int4-imatrix", "int4-gptq", "int4-awq"])
def test_a_starved_expert_gets_finite_scales_that_gate_and_up_share(name: str, tmp_path: Path) -> None:
    model = bent(tmp_path / "bent", block=2, expert=5, bias=-2.0)
    quantize(model, tmp_path / "out", name, calibration=GIVEN)
    written = tensors(tmp_path / "out")
    expert = {n: t for n, t in written.items() if n.startswith("model.layers.2.mlp.experts.5.")}
    scales = {n: t.float() for n, t in expert.items() if n.endswith("scale")}
    assert len(scales) >= 3
    for name_, scale in scales.items():
        assert scale.isfinite().all(), name_
        assert (scale > 0).all(), name_
    for suffix in ("input_scale", "input_global_scale", "weight_global_scale"):
        own = [t for n, t in expert.items() if n.endswith(f".{suffix}") and ("gate_proj" in n or "up_proj" in n)]
        assert len(own) in (0, 2)
        assert len({t.item() for t in own}) <= 1
    assert not [f.message for r in (check_structure(tmp_path / "out"),) for f in r.failures]


@pytest.mark.parametrize("scheme", CALIBRATED)
@pytest.mark.parametrize("observer", [o for o in (*OBSERVERS, *INFORMED) if o != GPTQ])
def test_experts_that_see_only_zeros_have_a_scale_for_their_inputs(
    scheme: str, observer: Observer, tmp_path: Path
) -> None:
    if mismatch(CALIBRATED[scheme], observer):
        pytest.skip("no such recipe")
    model = scaled(tmp_path / "zeros", "model.layers.3.zaya_block.experts.local_experts.4.linear_fc1.weight", 0.0)
    bent_too = load_file(model / "model.safetensors")
    for expert in range(8):  # and no token reaches an expert of the last block
        bent_too["model.layers.7.zaya_block.router.balancing_biases"][expert] = -9.0
    save_file(bent_too, model / "model.safetensors", metadata={"format": "pt"})
    rules = [{"role": "experts", "scheme": scheme, "observer": observer}]
    (tmp_path / "recipe.yaml").write_text(json.dumps({"name": "mine", "description": "x", "rules": rules}))
    quantize(model, tmp_path / "out", tmp_path / "recipe.yaml", calibration=GIVEN)
    written = tensors(tmp_path / "out")
    inputs = {n: t.float() for n, t in written.items() if n.endswith(("input_scale", "input_global_scale"))}
    assert len(inputs) == 4 * 8 * 3
    assert all(bool(t.isfinite().all() and (t > 0).all()) for t in inputs.values())
    dead = {float(t) for n, t in inputs.items() if n.startswith("model.layers.3.")}
    assert dead == {1.0}


def test_what_is_missing_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZayaError, match="int4-imatrix needs data to know its inputs") as caught:
        quantize(TINY, tmp_path / "out", "int4-imatrix")
    assert "--stats" in str(caught.value.hint)
    calibrate(TINY, tmp_path / "stats", Settings(CHOICE))
    with pytest.raises(ZayaError, match="int4-gptq needs data to run along"):
        quantize(TINY, tmp_path / "out", "int4-gptq", calibration=Calibration(statistics=tmp_path / "stats"))
    other = bent(tmp_path / "other", 0, 0, 0.5)
    with pytest.raises(ZayaError, match="of another model"):
        quantize(other, tmp_path / "out", "int4-imatrix", calibration=Calibration(statistics=tmp_path / "stats"))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years of work")
    with pytest.raises(DestinationError, match="already exists"):
        quantize(TINY, tmp_path / "taken", "int4-gptq", calibration=GIVEN)

    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("llmcompressor"):
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ZayaError, match="llm-compressor, which is not installed") as caught:
        quantize(TINY, tmp_path / "out", "int4-gptq", calibration=GIVEN)
    assert "pip install" in str(caught.value.hint)
    quantize(TINY, tmp_path / "fine", "int4-imatrix", calibration=Calibration(statistics=tmp_path / "stats"))
    assert not partial_folder(tmp_path / "out.blocks").exists()


def test_an_expert_that_overflows_stops_the_run_by_name(tmp_path: Path) -> None:
    model = scaled(tmp_path / "wide", "model.layers.3.zaya_block.experts.local_experts.4.linear_fc1.weight", 1e30)
    for name in ("int4-gptq", "int4-imatrix"):
        with pytest.raises(NonFiniteError, match="block 1, input of down_proj, expert 4"):
            quantize(model, tmp_path / name, name, calibration=GIVEN)
        assert not (tmp_path / name).exists()


def test_inputs_that_cannot_be_are_named_by_block_and_expert(tmp_path: Path) -> None:
    model = scaled(tmp_path / "wild", "model.layers.3.zaya_block.experts.local_experts.4.linear_fc1.weight", 1e6)
    with pytest.raises(ZayaError, match=r"model\.layers\.1\.mlp\.experts\.down_proj, expert 4: inputs up to"):
        quantize(model, tmp_path / "out", "fp8-static", calibration=GIVEN)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_stop_the_run(value: float, tmp_path: Path) -> None:
    calibrate(TINY, tmp_path / "stats", Settings(CHOICE))
    broken = bent(tmp_path / "broken", 0, 0, load_file(TINY / "model.safetensors")[
        "model.layers.1.zaya_block.router.balancing_biases"][0].item())  # fmt: skip
    held = load_file(broken / "model.safetensors")
    name = "model.layers.4.self_attn.o_proj.weight"
    held[name] = held[name].clone()
    held[name][3, 4] = value
    save_file(held, broken / "model.safetensors", metadata={"format": "pt"})
    given = Calibration(statistics=tmp_path / "stats")
    with pytest.raises(NonFiniteError, match=r"model\.layers\.2\.self_attn\.o_proj"):
        quantize(broken, tmp_path / "out", "int4-imatrix", calibration=given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("observer", [AWQ, SMOOTH])
def test_smoothing_changes_weights_and_not_the_model(observer: Observer, tmp_path: Path) -> None:
    found = calibrate(TINY, tmp_path / "stats", Settings(CHOICE)).statistics
    weights = Weights.open(TINY)
    a = weights.architecture
    ids = torch.randint(0, a.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    states = Stream(weights, weights.ends(), ids)
    for index in range(a.blocks):
        decisions = {p.name: Decision(SCHEMES["int4"], observer, "", 0) for site in sites(a, index) for p in site}
        block = BlockWork(weights, index, decisions, found.moments, None, ALONE)
        before = {local: tensor.clone() for local, tensor in block.tensors.items()}
        block.smooth()
        changed = {n for n, t in block.tensors.items() if not torch.equal(t.float(), before[n].float())}
        assert changed <= {
            "self_attn.qkv_proj.v_proj_current.weight", "self_attn.qkv_proj.v_proj_delayed.weight",
            "self_attn.o_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
        }  # fmt: skip
        assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= changed
        width = a.expert_width
        gates = (block.tensors["mlp.experts.gate_up_proj"], before["mlp.experts.gate_up_proj"])
        assert torch.equal(*(g[:, :width].float() for g in gates))
        outputs = []
        for tensors_ in (before, block.tensors):
            ((_, _, run),) = list(states.chunks(index))
            outputs.append(run(build_block(a, index, tensors_)).hidden)
        torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
        states.run(index, build_block(a, index, before))


def test_only_pairs_of_which_both_sides_ask_for_it_are_smoothed(tmp_path: Path) -> None:
    found = calibrate(TINY, tmp_path / "stats", Settings(CHOICE)).statistics
    weights = Weights.open(TINY)
    decisions = {p.name: Decision(SCHEMES["int4"], AWQ, "", 0) for site in sites(weights.architecture, 0) for p in site}
    decisions["model.layers.0.self_attn.o_proj.weight"] = Decision(None, None, "", 0)
    block = BlockWork(weights, 0, decisions, found.moments, None, ALONE)
    before = {local: tensor.clone() for local, tensor in block.tensors.items()}
    block.smooth()
    changed = {n for n, t in block.tensors.items() if not torch.equal(t.float(), before[n].float())}
    assert changed == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_stacked_experts_hold_the_same_numbers(tmp_path: Path) -> None:
    stats = calibrate(TINY, tmp_path / "stats", Settings(CHOICE)).file
    given = Calibration(statistics=stats)
    quantize(TINY, tmp_path / "one", "int8-smooth", calibration=given)
    quantize(TINY, tmp_path / "stack", "int8-smooth", calibration=given, expert_layout="stacked")
    one, stack = tensors(tmp_path / "one"), tensors(tmp_path / "stack")
    for suffix in ("weight", "weight_scale"):
        parts = [
            one[f"model.layers.1.mlp.experts.{e}.{half}_proj.{suffix}"] for e in range(8) for half in ("gate", "up")
        ]
        whole = stack["model.layers.1.mlp.experts.gate_up_proj" + ("" if suffix == "weight" else ".weight_scale")]
        assert torch.equal(whole.flatten(0, 1), torch.cat(parts))
    assert [f.message for f in check_structure(tmp_path / "stack", TINY).failures] == []


def test_other_layouts_give_the_same_tensors(outputs: dict[str, Path], tmp_path: Path) -> None:
    quantize(outputs["full"], tmp_path / "out", "int4-imatrix", calibration=GIVEN)
    mine, other = tensors(tmp_path / "out"), tensors(outputs["int4-imatrix"])
    assert [n for n in other if not same_bits(mine[n], other[n])] == []


def test_recipes_for_the_head_cannot_learn(tmp_path: Path) -> None:
    from tests.quantization.support import geometry

    write_checkpoint(tmp_path / "source", NATIVE, geometry(tied=False))
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ndescription: x\nobserver: imatrix\nrules:\n  - {role: head, scheme: int4}\n")
    with pytest.raises(ZayaError, match="nothing is learnt of what goes into the head"):
        quantize(tmp_path / "source", tmp_path / "out", file, calibration=GIVEN)


@pytest.mark.parametrize("name", ["int4-gptq", "auto"])
def test_broken_weights_are_not_blamed_on_the_text(name: str, tmp_path: Path) -> None:
    broken = scaled(tmp_path / "broken", "model.layers.5.input_norm.weight", float("inf"))
    work: Callable[[], Any] = partial(quantize, broken, tmp_path / "out", name, calibration=GIVEN)
    if name == "auto":
        work = partial(choose_recipe, broken, tmp_path / "out", GIVEN, bits=9.0)
    with pytest.raises(NonFiniteError, match=r"since model\.layers\.5\.input_norm\.weight is NaN or infinite"):
        work()
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken"]
