from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.calibration.support import SMALL
from zaya_tools.calibration.identity import identity
from zaya_tools.calibration.run import Calibrated, calibrate, statistics_file
from zaya_tools.calibration.statistics import KINDS, load
from zaya_tools.checkpoint.destination import digest_of
from zaya_tools.data import TINY
from zaya_tools.errors import ZayaError
from zaya_tools.model.weights import Weights

WEIGHTS = Weights.open(TINY)
SITES = ("self_attn.qkv_proj.q_proj", "self_attn.o_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return calibrate(TINY, tmp_path_factory.mktemp("statistics") / "stats", SMALL)


def read(file: Path) -> ZayaError:
    """The error that reading the statistics ends with: one line and a hint."""
    with pytest.raises(ZayaError) as caught:
        load(file, WEIGHTS.architecture, identity(WEIGHTS.found))
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def copied(held: Calibrated, folder: Path, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """The statistics in a folder, changed; the document agrees with the bytes."""
    file = folder / "stats.safetensors"
    tensors = load_file(held.file)
    if change is not None:
        change(tensors)
    save_file(tensors, file, {"format": "pt"})
    describe(held, file)
    return file


def describe(held: Calibrated, file: Path, **replaced: Any) -> None:
    written = {"bytes": file.stat().st_size, "blake3": digest_of(file)}
    file.with_suffix(".json").write_text(json.dumps({**held.document, "tensors": written, **replaced}))


def test_an_unchanged_copy_is_read(calibrated: Calibrated, tmp_path: Path) -> None:
    found = load(copied(calibrated, tmp_path), WEIGHTS.architecture, identity(WEIGHTS.found))
    assert found.blocks == calibrated.statistics.blocks


FAULTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "missing": lambda t: None,
    "shorter": lambda t: t[..., :-1].contiguous(),
    "of more parts": lambda t: torch.cat([t, t[:1]]),
    "without a dimension": lambda t: t.flatten() if t.dim() > 1 else t[None],
    "a scalar": lambda t: t.flatten()[0].clone(),
    "empty": lambda t: t[:0].clone(),
    "of a wider type": lambda t: t.double(),
    "of a narrower type": lambda t: t.half() if t.is_floating_point() else t.int(),
    "of another kind": lambda t: t.bool(),
    "negative": lambda t: -t - 1,
    "no numbers": lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else t - 10**9,
    "endless": lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else t - 10**9,
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_any_tensor_is_let_through(
    fault: str, kind: str, site: str, calibrated: Calibrated, tmp_path: Path
) -> None:
    if (fault, kind) == ("negative", "sketch"):
        pytest.skip("a sketch has negative numbers")
    name = f"model.layers.2.{site}.{kind}"

    def change(tensors: dict[str, Tensor]) -> None:
        changed = FAULTS[fault](tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    read(copied(calibrated, tmp_path, change))


@pytest.mark.parametrize("name", ["safetensors", "json"])
@pytest.mark.parametrize("place", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("fault", ["cut off", "other bytes", "empty"])
def test_damaged_files_are_found_out(
    name: str, place: float, fault: str, calibrated: Calibrated, tmp_path: Path
) -> None:
    file = copied(calibrated, tmp_path)
    damaged = file.with_suffix(f".{name}")
    data = damaged.read_bytes()
    at = int(place * len(data))
    damaged.write_bytes({"cut off": data[:at], "other bytes": data[:at] + b"\xff" * 8 + data[at + 8 :]}.get(fault, b""))
    read(file)


def test_tensors_and_document_of_two_runs_do_not_go_together(calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    save_file({**load_file(file), "more": torch.zeros(1)}, file)
    assert "is not the file that stats.json describes" in read(file).message


DOCUMENTS: dict[str, dict[str, Any]] = {
    "blocks are none": {"blocks": None},
    "blocks are an object": {"blocks": {"a": 1}},
    "too few blocks": {"blocks": []},
    "blocks of nothing": {"blocks": [{}] * 4},
    "identity of another model": {"identity": "0" * 32},
    "tensors are none": {"tensors": None},
    "tensors are text": {"tensors": "text"},
    "the first version": {"format": 1},
    "a later version": {"format": 99},
    "no version": {"format": None},
}
ENTRIES: dict[str, dict[str, Any]] = {
    "number": {"block": 7},
    "text": {"block": "x"},
    "tokens too many": {"expert_tokens": [48] * 9},
    "tokens of others": {"expert_tokens": [48] * 8},
    "tokens are text": {"expert_tokens": ["x"] * 8},
    "tokens without end": {"expert_tokens": [float("inf")] * 8},
    "fewer than none skipped": {"skipped_tokens": -1},
    "entropy is no number": {"router_entropy": float("nan")},
    "entropy without end": {"router_entropy": float("inf")},
    "entropy is a list": {"router_entropy": []},
}


@pytest.mark.parametrize("fault", DOCUMENTS)
def test_no_fault_of_the_document_is_let_through(fault: str, calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    describe(calibrated, file, **DOCUMENTS[fault])
    read(file)


@pytest.mark.parametrize("fault", ENTRIES)
def test_no_fault_of_a_blocks_coverage_is_let_through(fault: str, calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    first, *rest = calibrated.document["blocks"]
    describe(calibrated, file, blocks=[{**first, **ENTRIES[fault]}, *rest])
    read(file)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format": ' + "9" * 6000 + "}", "[]", "", "null"])
def test_what_is_no_document_is_said(text: str, calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    file.with_suffix(".json").write_text(text)
    read(file)


def test_an_older_version_is_said_to_be_one(calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    describe(calibrated, file, format=1)
    assert read(file).message == "stats.json is not a calibration of this version"


def test_statistics_that_are_not_there(calibrated: Calibrated, tmp_path: Path) -> None:
    file = copied(calibrated, tmp_path)
    assert read(tmp_path / "other.safetensors").message == f"there are no statistics {tmp_path / 'other.safetensors'}"
    file.with_suffix(".json").unlink()
    assert "has no stats.json beside it" in read(file).message
    describe(calibrated, file)
    file.unlink()
    assert "has no stats.safetensors beside it" in read(file).message


@pytest.mark.parametrize("name", ["stats", "stats.safetensors", "stats.json"])
def test_any_name_of_the_pair_will_do(name: str, tmp_path: Path) -> None:
    assert statistics_file(tmp_path / name) == tmp_path / "stats.safetensors"


@pytest.mark.parametrize("name", ["", ".", "..", "/", "../..", "a/..", "nul\0"])
def test_what_is_no_name_for_a_file(name: str) -> None:
    with pytest.raises(ZayaError, match="is no name for a file"):
        statistics_file(name)
