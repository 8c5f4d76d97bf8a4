from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.calibration.support import SMALL, bent, scaled
from tests.evaluation.oracles import tiny_in_transformers
from tests.evaluation.support import write_quantized
from zaya_tools.calibration.data import Choice, sample
from zaya_tools.calibration.identity import identity
from zaya_tools.calibration.plot import write_plot
from zaya_tools.calibration.run import Calibrated, Progress, calibrate
from zaya_tools.calibration.statistics import load
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.data import TINY
from zaya_tools.errors import DestinationError, LayoutError, NonFiniteError, ZayaError
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import parameters


class _StoppedError(Exception):
    pass


def stop_after(stage: str, block: int) -> Any:
    def report(done: Progress) -> None:
        if (done.stage, done.block) == (stage, block):
            raise _StoppedError

    return report


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return calibrate(TINY, tmp_path_factory.mktemp("statistics") / "stats", SMALL)


@pytest.fixture(scope="module")
def inputs() -> dict[str, list[Tensor]]:
    """What goes into each linear layer in transformers' own model, experts as separate layers, on the same tokens."""
    pytest.importorskip("llmcompressor")
    from llmcompressor.modeling.moe.linearize import linearize_moe

    model = linearize_moe(copy.deepcopy(tiny_in_transformers()))
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        def see(_: Any, args: tuple[Tensor, ...]) -> None:
            seen.setdefault(name, []).append(args[0].detach().flatten(0, -2).clone())

        return see

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(name))
    with torch.inference_mode():
        model(sample(SMALL.choice, TINY, 320).ids)
    return seen


def test_moments_are_those_of_the_inputs_in_transformers(
    calibrated: Calibrated, inputs: dict[str, list[Tensor]]
) -> None:
    document = calibrated.document["modules"]
    assert len(document) == 4 * (5 + 3 * 8)
    checked = 0
    for name, figures in document.items():
        rows = torch.cat(inputs[name])
        rows = rows[rows.any(1)]  # transformers shows the delayed projection the zero vector before each sequence
        assert figures["tokens"] == len(rows), name
        assert figures["amax"] == pytest.approx(float(rows.abs().max()), rel=1e-4)
        assert figures["percentiles"]["99"] == pytest.approx(
            float(rows.abs().quantile(0.99)), rel=0.15
        )  # of some tokens, in bins
        block = name.split(".")[2]
        if "experts" in name:
            expert = int(name.split(".")[5])
            stacked = "down_proj" if name.endswith("down_proj") else "gate_up_proj"
            held = calibrated.statistics.moments[f"model.layers.{block}.mlp.experts.{stacked}"]
        else:
            expert, held = 0, calibrated.statistics.moments[f"{name}.weight"]
        torch.testing.assert_close(held.second_moment[expert], rows.square().mean(0), rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(held.channel_amax[expert], rows.abs().amax(0), rtol=1e-4, atol=1e-5)
        checked += 1
    assert checked == len(document)


def test_coverage_counts_every_token_once(calibrated: Calibrated) -> None:
    tokens = SMALL.choice.samples * SMALL.choice.context
    assert [block.block for block in calibrated.statistics.blocks] == [0, 1, 2, 3]
    for block in calibrated.statistics.blocks:
        assert sum(block.expert_tokens) + block.skipped == tokens
        assert 0 < block.router_entropy < torch.tensor(9.0).log()


def test_a_saved_file_is_read_back(calibrated: Calibrated) -> None:
    weights = Weights.open(TINY)
    found = load(calibrated.file, weights.architecture, identity(weights.found))
    assert found.blocks == calibrated.statistics.blocks
    stored = json.loads(calibrated.file.with_suffix(".json").read_text())
    assert stored == calibrated.document == {**found.document(weights.architecture), "tensors": stored["tensors"]}
    for name, held in calibrated.statistics.moments.items():
        assert torch.equal(found.moments[name].second_moment, held.second_moment)


def test_statistics_of_another_model_are_refused(calibrated: Calibrated) -> None:
    architecture = Weights.open(TINY).architecture
    with pytest.raises(ZayaError, match="of another model"):
        load(calibrated.file, architecture, "another")
    with pytest.raises(ZayaError, match="another shape"):
        load(calibrated.file, replace(architecture, blocks=3, sliding=(False,) * 3), None)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("stage", "block"), [("routing", 1), ("routing", 3), ("measuring", 0), ("measuring", 2)])
def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path: Path, balance: bool, stage: str, block: int) -> None:
    if stage == "routing" and not balance:
        pytest.skip("without balancing nothing is routed beforehand")
    settings = replace(SMALL, balance=balance)
    whole = calibrate(TINY, tmp_path / "whole", settings)
    with pytest.raises(_StoppedError):
        calibrate(TINY, tmp_path / "stopped", settings, report=stop_after(stage, block))
    assert not (tmp_path / "stopped.safetensors").exists()
    with pytest.raises(DestinationError, match="unfinished run"):
        calibrate(TINY, tmp_path / "stopped", settings)
    again: list[tuple[str, int]] = []
    found = calibrate(
        TINY, tmp_path / "stopped", settings, resume=True, report=lambda done: again.append((done.stage, done.block))
    )
    stages = (["routing"] if balance else []) + ["measuring"]
    everything = [(s, b) for s in stages for b in range(4)]
    # The last block of the routing is done again where only its choice is missing.
    assert again == everything[everything.index((stage, block)) + 1 :]
    assert found.file.read_bytes() == whole.file.read_bytes()
    assert found.file.with_suffix(".json").read_bytes() == whole.file.with_suffix(".json").read_bytes()
    assert not partial_folder(found.file).exists()


KILL = """
import os, signal, sys
from tests.calibration.support import SMALL
from zaya_tools.calibration.run import calibrate
from zaya_tools.data import TINY

def report(done):
    if done.block == 1:
        os.kill(os.getpid(), signal.SIGKILL)

calibrate(TINY, sys.argv[1], SMALL, report=report)
"""


def test_a_killed_run_resumes_to_the_same_bytes(calibrated: Calibrated, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL, str(tmp_path / "stats")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    found = calibrate(TINY, tmp_path / "stats", SMALL, resume=True)
    assert found.file.read_bytes() == calibrated.file.read_bytes()


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(_StoppedError):
        calibrate(TINY, tmp_path / "stats", SMALL, report=stop_after("measuring", 1))
    other = replace(SMALL, choice=replace(SMALL.choice, seed=7))
    with pytest.raises(DestinationError, match="other data or other options"):
        calibrate(TINY, tmp_path / "stats", other, resume=True)
    assert calibrate(TINY, tmp_path / "stats", other, force=True).file.exists()


def test_states_on_disk_change_no_bit(calibrated: Calibrated, tmp_path: Path) -> None:
    found = calibrate(TINY, tmp_path / "stats", replace(SMALL, budget=0))
    assert found.file.read_bytes() == calibrated.file.read_bytes()


def test_an_expert_without_tokens_is_listed_with_zero_moments(tmp_path: Path) -> None:
    model = bent(tmp_path / "bent", block=2, expert=5, bias=-2.0)
    found = calibrate(model, tmp_path / "stats", replace(SMALL, min_expert_tokens=1))
    assert found.starved == ((2, 5, 0),)
    assert found.document["starved"] == [{"block": 2, "expert": 5, "tokens": 0}]
    held = found.statistics.moments["model.layers.2.mlp.experts.down_proj"]
    assert held.tokens[5] == 0
    assert not held.second_moment[5].any()
    load(found.file, Weights.open(model).architecture)


def test_balancing_feeds_the_starved_expert_at_least_four_times(tmp_path: Path) -> None:
    model = bent(tmp_path / "bent", block=2, expert=3, bias=-0.0925)
    settings = replace(SMALL, choice=Choice(samples=48, context=64))
    plain = calibrate(model, tmp_path / "plain", settings)
    fed = calibrate(model, tmp_path / "fed", replace(settings, balance=True))

    def least(found: Calibrated) -> int:
        return min(min(block.expert_tokens) for block in found.statistics.blocks)

    assert plain.document["data"]["tokens"] == fed.document["data"]["tokens"]
    assert least(plain) > 0
    assert least(fed) >= 4 * least(plain)


def test_an_expert_that_overflows_stops_the_run_by_name(tmp_path: Path) -> None:
    name = "model.layers.3.zaya_block.experts.local_experts.4.linear_fc{}.weight"
    model = scaled(tmp_path / "wide", name.format(1), 1e30)
    with pytest.raises(
        NonFiniteError, match=r"block 1, input of down_proj, expert 4: activations are NaN or infinite$"
    ):
        calibrate(model, tmp_path / "stats", SMALL)
    model = scaled(tmp_path / "deep", name.format(2), 3e38)
    with pytest.raises(NonFiniteError, match="block 1, expert 4: its output is NaN or infinite"):
        calibrate(model, tmp_path / "stats", replace(SMALL, dtype="bfloat16"), force=True)
    model = scaled(tmp_path / "large", name.format(1), 1e11)
    with pytest.raises(NonFiniteError, match=r"block 1, input of down_proj, expert 4: activations reach \d.*e\+\d+$"):
        calibrate(model, tmp_path / "stats", SMALL, force=True)
    assert not (tmp_path / "stats.safetensors").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_helps_against_an_overflow_is_what_is_said(dtype: str, tmp_path: Path) -> None:
    name = "model.layers.3.zaya_block.experts.local_experts.4.linear_fc1.weight"
    model = scaled(tmp_path / "wide", name, 1e30)
    with pytest.raises(NonFiniteError) as caught:
        calibrate(model, tmp_path / "stats", replace(SMALL, dtype=dtype))
    assert "zaya validate" in str(caught.value.hint)
    assert ("float32" in str(caught.value.hint)) == (dtype != "float32")


PARAMETERS = parameters(Weights.open(TINY).architecture)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("local", sorted({p.local for p in PARAMETERS if p.block == 1} | {"model.embed_tokens.weight"}))
def test_a_broken_weight_is_named(local: str, balance: bool, tmp_path: Path) -> None:
    """Of every kind that there is: by its name on disk and where in it, with a hint that fits."""
    found = Weights.open(TINY).found
    name = next(p.name for p in PARAMETERS if p.local == local and p.block in (None, 1))
    tensors = [bound.tensor for bound in found.bound[name] if bound.tensor is not None]
    model = Path(shutil.copytree(TINY, tmp_path / "broken"))
    stored = load_file(model / "model.safetensors")
    for tensor in tensors:  # each expert, since tokens may reach any
        stored[tensor.name] = stored[tensor.name].clone()
        stored[tensor.name].view(-1)[: tensor.numel if local == "model.embed_tokens.weight" else 7] = float("nan")
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"block \d.* since model\..* is NaN or infinite at element 0$") as caught:
        calibrate(model, tmp_path / "stats", replace(SMALL, balance=balance))
    assert any(tensor.name in caught.value.message for tensor in tensors)
    assert "the weights themselves are broken" in str(caught.value.hint)
    assert not (tmp_path / "stats.safetensors").exists()


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="quantized already"):
        calibrate(write_quantized(tmp_path / "fp8", "FP8_DYNAMIC"), tmp_path / "stats", SMALL)


@pytest.mark.parametrize("ending", [".svg", ".html"])
def test_the_picture_shows_who_starved(tmp_path: Path, ending: str) -> None:
    found = calibrate(bent(tmp_path / "bent", 0, 1, -2.0), tmp_path / "stats", SMALL)
    file = tmp_path / f"coverage{ending}"
    write_plot(found.statistics, file)
    text = file.read_text()
    assert text.count("never chosen") == 2  # the expert, and the legend
    if ending == ".svg":
        import xml.etree.ElementTree as ET

        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_picture_needs_a_known_ending(calibrated: Calibrated, tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match="ending"):
        write_plot(calibrated.statistics, tmp_path / "coverage.png")
