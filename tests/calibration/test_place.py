from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.calibration.support import SMALL, scaled
from zaya_tools.calibration.run import Calibrated, Progress, calibrate
from zaya_tools.calibration.statistics import load
from zaya_tools.calibration.workspace import open_workspace
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.data import TINY
from zaya_tools.errors import DestinationError
from zaya_tools.model.weights import Weights

OTHER = replace(SMALL, choice=replace(SMALL.choice, seed=7))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return calibrate(TINY, tmp_path_factory.mktemp("statistics") / "stats", SMALL)


def copied(held: Calibrated, folder: Path) -> Path:
    for ending in (".safetensors", ".json"):
        (folder / f"stats{ending}").write_bytes(held.file.with_suffix(ending).read_bytes())
    return folder / "stats.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


def weights(file: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2), "model.layers.0.tokens": torch.zeros(1)}, file)


def link(file: Path) -> None:
    target = file.with_name("elsewhere")
    target.write_text("{}")
    file.symlink_to(target)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "a model": weights,
    "text": lambda file: file.write_text("years of work"),
    "an empty file": lambda file: file.touch(),
    "a JSON object": lambda file: file.write_text('{"name": "pkg", "format": 1}'),
    "a JSON list": lambda file: file.write_text("[1, 2]"),
    "deep JSON": lambda file: file.write_text("[" * 200_000),
    "a length and no more": lambda file: file.write_bytes((1 << 62).to_bytes(8, "little")),
    "a header of nothing": lambda file: file.write_bytes((2).to_bytes(8, "little") + b"{}"),
    "a header of a list": lambda file: file.write_bytes((2).to_bytes(8, "little") + b"[]"),
    "a link": link,
    "a dangling link": lambda file: file.symlink_to("nowhere"),
    "a folder": lambda file: file.mkdir(),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize(("resume", "force"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("ending", [".safetensors", ".json"])
@pytest.mark.parametrize("what", FOREIGN)
def test_what_zaya_did_not_write_stays(what: str, ending: str, resume: bool, force: bool, tmp_path: Path) -> None:
    """Whichever of the two files it stands in the place of, and whatever is asked for."""
    FOREIGN[what](tmp_path / f"stats{ending}")
    before = contents(tmp_path)
    with pytest.raises(DestinationError) as caught:
        calibrate(TINY, tmp_path / "stats", SMALL, resume=resume, force=force)
    assert str(tmp_path / f"stats{ending}") in caught.value.message
    assert caught.value.hint
    assert contents(tmp_path) == before
    assert not partial_folder(tmp_path / "stats.safetensors").exists()


def test_what_comes_there_during_a_run_stays_too(tmp_path: Path) -> None:
    def report(done: Progress) -> None:
        (tmp_path / "stats.json").write_text("mine")

    with pytest.raises(DestinationError, match=r"stats\.json exists and is no statistics"):
        calibrate(TINY, tmp_path / "stats", SMALL, report=report)
    assert contents(tmp_path) == {"stats.json": b"mine"}


@pytest.mark.parametrize("missing", ["", ".safetensors", ".json"])
def test_statistics_give_way_to_force_alone(missing: str, calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    if missing:
        file.with_suffix(missing).unlink()
    before = contents(tmp_path)
    with pytest.raises(DestinationError, match="already exists"):
        calibrate(TINY, tmp_path / "stats", OTHER)
    assert contents(tmp_path) == before
    calibrate(TINY, tmp_path / "stats", OTHER, force=True)
    after = contents(tmp_path)
    assert after.keys() == {"stats.safetensors", "stats.json"}
    assert not set(before.values()) & set(after.values())
    load(file, Weights.open(TINY).architecture)


def test_statistics_that_are_cut_off_can_be_replaced(calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    calibrate(TINY, file, SMALL, force=True)
    assert file.read_bytes() == calibrated.file.read_bytes()


@pytest.mark.parametrize("kept", [200, 2000])
def test_a_document_that_is_cut_off_can_be_replaced(kept: int, calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    document = file.with_suffix(".json")
    document.write_bytes(document.read_bytes()[:kept])
    with pytest.raises(DestinationError, match="already exists"):
        calibrate(TINY, file, SMALL)
    calibrate(TINY, file, SMALL, force=True)
    assert document.read_bytes() == calibrated.file.with_suffix(".json").read_bytes()


def test_a_model_that_was_only_copied_is_the_same(calibrated: Calibrated, tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY, tmp_path / "copy", copy_function=shutil.copyfile))
    copied(calibrated, tmp_path)
    assert calibrate(model, tmp_path / "stats", SMALL, resume=True).already_complete
    convert(TINY, tmp_path / "native")
    assert calibrate(tmp_path / "native", tmp_path / "stats", SMALL, resume=True).already_complete


def test_a_finished_run_is_not_done_again(calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    times = [entry.stat().st_mtime_ns for entry in sorted(tmp_path.iterdir())]

    def report(done: Progress) -> None:
        raise AssertionError("nothing is left to do")

    found = calibrate(TINY, tmp_path / "stats", SMALL, resume=True, report=report)
    assert found.already_complete
    assert not calibrated.already_complete
    assert (found.file, found.document, found.starved) == (file, calibrated.document, calibrated.starved)
    assert [entry.stat().st_mtime_ns for entry in sorted(tmp_path.iterdir())] == times


@pytest.mark.parametrize("what", ["settings", "model", "geometry", "data", "an older version's"])
def test_resuming_replaces_no_finished_run_of_another_kind(what: str, calibrated: Calibrated, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    file = copied(calibrated, place)
    model, settings = TINY, SMALL
    if what == "model":
        name = "model.layers.3.zaya_block.experts.local_experts.4.linear_fc2.weight"
        model = scaled(tmp_path / "tuned", name, 1.05)
    elif what == "geometry":
        model = Path(shutil.copytree(TINY, tmp_path / "other"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "norm_epsilon": 10 * config["norm_epsilon"]}))
    elif what == "settings":
        settings = replace(SMALL, dtype="bfloat16")
    elif what == "data":
        settings = OTHER
    else:
        text = file.with_suffix(".json").read_text()
        file.with_suffix(".json").write_text(text.replace('"format": 2', '"format": 1'))
    before = contents(place)
    with pytest.raises(DestinationError, match="of another model, other data, other options or another version"):
        calibrate(model, place / "stats", settings, resume=True)
    assert contents(place) == before
    assert {entry.name for entry in place.iterdir()} == {"stats.safetensors", "stats.json"}


class _KilledError(Exception):
    pass


@pytest.mark.parametrize("after", ["nothing", "the tensors", "both"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_kill_while_the_files_appear_is_made_good(
    after: str, replaced: bool, calibrated: Calibrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stats.safetensors"
    if replaced:
        calibrate(TINY, file, OTHER)
    last = {"nothing": 0, "the tensors": 1, "both": 2}[after]
    rename = Path.rename
    done: list[Path] = []

    def stop(self: Path, target: Path) -> Path:
        if Path(target).parent == tmp_path:
            if len(done) == last:
                raise _KilledError
            done.append(target)
        return rename(self, target)

    def remove(*_: Any, **__: Any) -> None:
        raise _KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", stop)
        patched.setattr("shutil.rmtree", remove)
        with pytest.raises(_KilledError):
            calibrate(TINY, file, SMALL, force=replaced)
    assert partial_folder(file).exists()
    # Where other statistics were to be replaced, that has to be said again.
    again: list[int] = []
    found = calibrate(
        TINY, file, SMALL, resume=True, force=replaced and after != "both", report=lambda p: again.append(p.block)
    )
    assert again == []
    assert found.already_complete == (after == "both")
    assert file.read_bytes() == calibrated.file.read_bytes()
    assert file.with_suffix(".json").read_bytes() == calibrated.file.with_suffix(".json").read_bytes()
    assert {entry.name for entry in tmp_path.iterdir()} == {"stats.safetensors", "stats.json"}


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_both_files_have_the_mode_that_the_umask_leaves(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        found = calibrate(TINY, tmp_path / "stats", replace(SMALL, choice=replace(SMALL.choice, samples=1)))
    finally:
        os.umask(before)
    for ending in (".safetensors", ".json"):
        assert found.file.with_suffix(ending).stat().st_mode & 0o777 == 0o666 & ~mask


def test_where_statistics_may_not_go(tmp_path: Path) -> None:
    with pytest.raises(DestinationError, match="does not exist"):
        calibrate(TINY, tmp_path / "none" / "stats", SMALL)
    with pytest.raises(DestinationError, match="into the checkpoint"):
        calibrate(TINY, TINY / "stats", SMALL)
    strange = partial_folder(tmp_path / "other.safetensors")
    strange.mkdir()
    (strange / "thesis.tex").write_text("years of work")
    with pytest.raises(DestinationError, match="not of an unfinished run"):
        calibrate(TINY, tmp_path / "other", SMALL, force=True)
    assert (strange / "thesis.tex").exists()


@pytest.mark.parametrize("beside", ["", ".blocks", ".auto"])
def test_unfinished_work_is_said_to_be_for_what_the_user_named(beside: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work = tmp_path / f"out{beside}"
    with (
        open_workspace(work, "stamp", resume=False, force=False),
        pytest.raises(DestinationError, match=f"^another zaya process is writing {out}$"),
        open_workspace(work, "stamp", resume=False, force=False),
    ):
        raise AssertionError("two at once")
    with pytest.raises(_KilledError), open_workspace(work, "stamp", resume=False, force=False):
        raise _KilledError
    for stamp, resume, message in (("stamp", False, f"^an unfinished run for {out} is in "),
                                   ("other", True, f"^the unfinished run for {out} was of another model")):  # fmt: skip
        with pytest.raises(DestinationError, match=message), open_workspace(work, stamp, resume=resume, force=False):
            raise AssertionError("opened")
