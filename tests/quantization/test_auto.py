"""`--recipe auto` from its data to the published folder: interrupted anywhere, it goes on and gives the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.calibration.support import scaled
from tests.checkpoint.support import tree
from tests.quantization.support import geometry
from tests.synthetic import write_checkpoint
from zaya_tools import calibrate, quantize
from zaya_tools.calibration.data import Choice
from zaya_tools.calibration.run import Settings
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.run import Converted
from zaya_tools.checkpoint.source import open_source
from zaya_tools.data import TINY
from zaya_tools.errors import DestinationError, NonFiniteError, ZayaError
from zaya_tools.evaluation.likelihood import measure
from zaya_tools.evaluation.structure import check_structure
from zaya_tools.evaluation.text import HELD_OUT, tokenize
from zaya_tools.evaluation.windows import cut
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.layouts.raw import RAW
from zaya_tools.model.weights import Weights
from zaya_tools.quantization.auto import DAMAGES, RECIPE, choose_recipe, choosing
from zaya_tools.quantization.calibrated import Calibration, Stage

pytest.importorskip("llmcompressor")

CHOICE = Choice(str(Path(__file__).parents[1] / "synthetic.py"), samples=6, context=64)
GIVEN = Calibration(choice=CHOICE, tokenizer=str(TINY), every=0.0)
BITS = 12.0


class _StoppedError(Exception):
    pass


def run(
    source: Path, out: Path, calibration: Calibration = GIVEN, *, bits: float = BITS, resume: bool = False,
    force: bool = False, report: Callable[[Stage], None] | None = None,
) -> Converted:  # fmt: skip
    """What the command does."""
    torch.set_num_threads(1)  # as every test has it: sums depend on it
    options: dict[str, Any] = {"resume": resume, "force": force, "report": report}
    with choosing(source, out, calibration, bits=bits, **options) as auto:
        return quantize(source, out, auto.recipe, calibration=calibration, files=auto.files, **options)


def stop_after(name: str, block: int) -> Callable[[Stage], None]:
    def report(stage: Stage) -> None:
        if (stage.name, stage.block) == (name, block):
            raise _StoppedError

    return report


STAGES = [
    *(("weighing", block) for block in range(2)), *(("comparing", unit) for unit in range(4)),
    *(("quantizing", block) for block in range(2)),
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_checkpoint(folder, RAW, geometry(vocab_size=320))
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    seen: list[tuple[str, int]] = []
    run(source, out, report=lambda stage: seen.append((stage.name, stage.block)))
    assert seen == STAGES
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]
    return out


@pytest.fixture(scope="module")
def statistics(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = Settings(CHOICE, tokenizer=str(TINY))
    return calibrate(source, tmp_path_factory.mktemp("statistics") / "stats", settings).file


@pytest.mark.parametrize("place", range(len(STAGES)))
def test_a_stopped_run_resumes_to_the_same_bytes(place: int, source: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(_StoppedError):
        run(source, out, report=stop_after(*STAGES[place]))
    assert not out.exists()
    with pytest.raises(DestinationError, match="unfinished run"):
        run(source, out)
    seen: list[tuple[str, int]] = []
    run(source, out, resume=True, report=lambda stage: seen.append((stage.name, stage.block)))
    assert seen == STAGES[place + 1 :]
    assert tree(out) == tree(whole)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["weighing", "measuring"])
def test_so_does_one_that_rounds_by_statistics(
    name: str, source: Path, statistics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Calibration(statistics=statistics, tokenizer=str(TINY), every=0.0)
    if name == "measuring":  # without llm-compressor statistics are made of the data

        def without() -> None:
            raise ZayaError("not installed")

        monkeypatch.setattr("zaya_tools.quantization.auto.kernel", without)
        given = GIVEN
    run(source, tmp_path / "whole", given)
    with pytest.raises(_StoppedError):
        run(source, tmp_path / "out", given, report=stop_after(name, 0))
    seen: list[tuple[str, int]] = []
    run(source, tmp_path / "out", given, resume=True, report=lambda stage: seen.append((stage.name, stage.block)))
    assert seen[:2] == ([("weighing", 1), ("comparing", 0)] if name == "weighing" else [(name, 1), ("weighing", 0)])
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert "observer: imatrix" in (tmp_path / "out" / RECIPE).read_text()


KILL = """
import os, signal, sys
from pathlib import Path
from tests.quantization.test_auto import run
from zaya_tools.model.streaming import States

save, count = States.save, 0

def save_some(self, file):
    global count
    count += 1
    save(self, file)
    if count == 13:  # amid the second block's states
        os.kill(os.getpid(), signal.SIGKILL)

States.save = save_some
run(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_run_killed_while_it_saves_resumes_to_the_same_bytes(source: Path, whole: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILL, str(source), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(command, env=environment, check=False, capture_output=True).returncode == -signal.SIGKILL
    space = partial_folder(tmp_path / "out.auto")
    blocks = {file.name.split("-")[2] for file in space.glob("states-weighing-*")}
    assert blocks == {"0", "1"}  # the generation that is whole, and a part of the next
    seen: list[tuple[str, int]] = []
    run(source, tmp_path / "out", resume=True, report=lambda stage: seen.append((stage.name, stage.block)))
    assert seen == STAGES[1:]
    assert tree(tmp_path / "out") == tree(whole)


def test_what_is_complete_is_not_weighed_again(source: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Killed when the output had its name and what was kept for it was still there.
    with suppress(_StoppedError), choosing(source, out, GIVEN, bits=BITS) as auto:
        quantize(source, out, auto.recipe, calibration=GIVEN, files=auto.files)
        raise _StoppedError
    assert partial_folder(tmp_path / "out.auto").exists()
    for _ in range(2):
        found = run(source, out, resume=True, report=lambda stage: pytest.fail(f"{stage} once more"))
        assert found.already_complete
        assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert tree(out) == tree(whole)
    before = tree(out)
    with pytest.raises(DestinationError, match="already exists"):
        run(source, out, report=lambda stage: pytest.fail(f"{stage} before it was known"))
    with pytest.raises(DestinationError, match="already exists"):
        run(source, out, resume=True, bits=11.0, report=lambda stage: pytest.fail(f"{stage} before it was known"))
    assert tree(out) == before


def test_other_data_targets_and_statistics_are_refused(source: Path, statistics: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(_StoppedError):
        run(source, out, report=stop_after("weighing", 1))
    for other in (
        {"bits": 11.0},
        {"calibration": replace(GIVEN, choice=replace(CHOICE, samples=5))},
        {"calibration": replace(GIVEN, dtype="bfloat16")},
        {"calibration": Calibration(statistics=statistics, tokenizer=str(TINY), every=0.0)},
    ):
        with pytest.raises(DestinationError, match="other data or other options"):
            run(source, out, resume=True, **other)
    run(source, out, bits=11.0, force=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_the_published_damages_are_those_of_the_choice(source: Path, whole: Path) -> None:
    held = json.loads((whole / DAMAGES).read_text())
    assert held["bytes"] == open_source(whole).nbytes
    chosen = [next(o for o in unit["options"] if o["scheme"] == unit["scheme"]) for unit in held["units"]]
    assert sum(option["damage"] for option in chosen) == pytest.approx(held["expected_damage"])
    assert [finding.message for finding in check_structure(whole, source).failures] == []


def test_statistics_that_cannot_be_used_leave_nothing(source: Path, tmp_path: Path) -> None:
    given = Calibration(statistics=tmp_path / "none", tokenizer=str(TINY))
    with pytest.raises(ZayaError, match="no statistics"), choosing(source, tmp_path / "out", given, bits=8.0):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_met_is_known_at_once(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match="the smallest checkpoint of these schemes has"):
        run(source, tmp_path / "out", bits=3.0, report=lambda stage: pytest.fail(f"{stage} for nothing"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_damage_by_gptq_is_foretold(tmp_path: Path) -> None:
    given = Calibration(choice=Choice(samples=32, context=256))
    run(TINY, tmp_path / "out", given, bits=5.3)
    windows = cut(tokenize(TINY, HELD_OUT, 8192), 256)
    divergence = measure(Weights.open(tmp_path / "out"), windows, Weights.open(TINY)).divergence
    assert divergence is not None
    foretold = json.loads((tmp_path / "out" / DAMAGES).read_text())["expected_damage"]
    assert foretold == pytest.approx(divergence.kl.value, rel=0.3)


def test_bad_numbers_leave_nothing(tmp_path: Path) -> None:
    model = scaled(tmp_path / "wide", "model.layers.3.zaya_block.experts.local_experts.4.linear_fc1.weight", 1e30)
    with pytest.raises(NonFiniteError, match="block 1, input of down_proj, expert 4"):
        run(model, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["wide"]


def test_a_full_temporary_folder_is_said(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ZayaError, match=r"the disk is full: .* bytes of states do not fit into") as caught:
        run(source, tmp_path / "out", replace(GIVEN, budget=0))
    assert "TMPDIR" in str(caught.value.hint)


def test_states_on_disk_change_no_bit(source: Path, whole: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out", replace(GIVEN, budget=0))
    assert tree(tmp_path / "out") == tree(whole)


def test_other_layouts_give_the_same_choice(source: Path, whole: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "native")
    run(tmp_path / "native", tmp_path / "out")
    assert (tmp_path / "out" / RECIPE).read_text() == (whole / RECIPE).read_text()


@pytest.mark.parametrize("layout", [RAW, NATIVE_PER_EXPERT], ids=["raw", "per-expert"])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {"attention": ["int4", "int4-g32", "int8", None], "experts": ["int4", "int4-g32", "int8", None]}),
        ({"attention_bias": True}, {"attention": ["int4", "int4-g32", "int8", None]}),
        ({"expert_width": 96}, {"experts": ["int4-g32", "int8", None]}),
        ({"expert_width": 48}, {"experts": ["int8", None]}),
        ({"expert_width": 40}, {"experts": [None]}),
        ({"hidden_size": 96, "tied": False}, {"attention": ["int4-g32", "int8", None]}),
        ({"sliding": (True, False), "sliding_window": 5}, {}),
    ],
    ids="-".join,
)
def test_every_geometry_and_layout(
    layout: Any, fields: dict[str, Any], options: dict[str, list[str | None]], tmp_path: Path
) -> None:
    a = geometry(vocab_size=320, **fields)
    write_checkpoint(tmp_path / "source", layout, a)
    given = replace(GIVEN, choice=replace(CHOICE, samples=2, context=32))
    auto = choose_recipe(tmp_path / "source", tmp_path / "out", given, bits=BITS)
    for unit in auto.chosen.units:
        assert [o.scheme for o in unit.options] == options.get(unit.role, [o.scheme for o in unit.options])
        assert all(option.damage >= 0 for option in unit.options)
    made = run(tmp_path / "source", tmp_path / "out", given)
    assert open_source(made.destination).nbytes == auto.chosen.nbytes
    assert [finding.message for finding in check_structure(made.destination).failures] == []
