from __future__ import annotations

from pathlib import Path

from tests.calibration.support import bent
from tests.cli.conftest import Zaya
from zaya_tools.data import TINY

QUICK = ("--samples", "4", "--context", "64")


def test_statistics_and_one_document(zaya: Zaya, tmp_path: Path) -> None:
    found = zaya("calibrate", TINY, "-o", tmp_path / "stats", *QUICK, "--plot", tmp_path / "plot.svg", "--json")
    assert found.code == 0
    document = found.document()
    assert document["statistics"] == str(tmp_path / "stats.safetensors")
    assert (document["data"]["windows"], document["data"]["tokens"]) == (4, 256)
    assert [sum(b["expert_tokens"]) + b["skipped_tokens"] for b in document["blocks"]] == [256] * 4
    assert {entry.name for entry in tmp_path.iterdir()} == {"stats.safetensors", "stats.json", "plot.svg"}


def test_too_few_tokens_for_an_expert_fail_after_everything_is_written(zaya: Zaya, tmp_path: Path) -> None:
    model = bent(tmp_path / "bent", block=0, expert=6, bias=-2.0)
    found = zaya("calibrate", model, "-o", tmp_path / "stats", *QUICK, "--min-expert-tokens", "1")
    assert found.code == 1
    assert "never reached: block 0, expert 6" in found.out
    assert "1 experts saw fewer than 1 tokens" in found.err
    assert (tmp_path / "stats.safetensors").exists()


def test_a_picture_of_no_known_kind_is_wrong_use_before_any_work(zaya: Zaya, tmp_path: Path) -> None:
    found = zaya("calibrate", TINY, "-o", tmp_path / "stats", *QUICK, "--plot", tmp_path / "plot.gif")
    assert found.error() == ("plot.gif has no ending of a picture", "choose .svg or .html")
    assert not list(tmp_path.iterdir())
