from __future__ import annotations

import json
import os
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


def test_every_mistake_is_one_line_and_a_hint_before_any_work(zaya: Zaya, tmp_path: Path) -> None:
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "foreign.json").write_text('{"name": "pkg"}')
    data = tmp_path / "data"
    data.mkdir()
    (data / "deep.jsonl").write_text("[" * 200_000)
    (data / "long.jsonl").write_text('{"text": ' + "9" * 6000 + "}")
    (data / "odd.jsonl").write_text('{"conversations": [{"from": ["a"], "value": "x"}]}')
    output = ("-o", tmp_path / "stats")
    before = sorted(tmp_path.rglob("*"))
    for arguments, part in (
        (("-o", "/"), "'/' is no name for a file"),
        (("-o", ""), "is no name for a file"),
        (("-o", "."), "'.' is no name for a file"),
        (("-o", tmp_path / "foreign"), "foreign.json exists and is no statistics of zaya's"),
        (("-o", tmp_path / "foreign", "--force"), "foreign.json exists and is no statistics of zaya's"),
        ((*output, "--plot", tmp_path / "folder.svg"), "folder.svg is a folder"),
        ((*output, "--context", "300000"), "a context of 300,000 tokens, where the model has 1,024 positions"),
        ((*output, "--seed", "99999999999999999999"), "a seed of 67 bits"),
        ((*output, "--data", data / "deep.jsonl"), "deep.jsonl, line 1 is not JSON"),
        ((*output, "--data", data / "long.jsonl"), "long.jsonl, line 1 is not JSON"),
        ((*output, "--data", data / "odd.jsonl", "--tokenizer", chatty(tmp_path)), "odd.jsonl, line 1: a turn of the"),
        ((*output, "--data", data), "is a folder"),
        ((*output, "--data", "nosuch"), "there is no file nosuch"),
        ((*output, "--tokenizer", tmp_path / "none"), "has no tokenizer.json"),
    ):
        message, _ = zaya("calibrate", TINY, *arguments).error()
        assert part in message
    assert [entry for entry in sorted(tmp_path.rglob("*")) if "chatty" not in str(entry)] == before


def chatty(folder: Path) -> Path:
    """A tokenizer's folder with a chat template."""
    place = folder / "chatty"
    place.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (place / name).write_bytes((TINY / name).read_bytes())
    (place / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    return place


def test_what_the_data_lack_is_said(zaya: Zaya, tmp_path: Path) -> None:
    rows = [[{"from": "human", "value": f"question {n} " * 9}] for n in range(20)]
    rows[3].append({"from": "tool", "value": "x"})
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(json.dumps({"conversations": turns}) for turns in rows))
    found = zaya("calibrate", TINY, "-o", tmp_path / "stats", *QUICK[2:], "--samples", "999", "--data", data,
                 "--tokenizer", chatty(tmp_path))  # fmt: skip
    assert found.code == 0
    windows = json.loads((tmp_path / "stats.json").read_text())["data"]["windows"]
    assert f"warning: the data give {windows} sequences of the 999 asked for: all are used" in found.err
    assert "warning: 1 conversations gave no text: chats.jsonl, line 4: " in found.err
    assert zaya("calibrate", TINY, "-o", tmp_path / "enough", *QUICK).err == ""


def test_a_run_that_is_done_is_not_done_again(zaya: Zaya, tmp_path: Path) -> None:
    arguments = ("calibrate", TINY, "-o", tmp_path / "stats", *QUICK)
    assert "wrote" in zaya(*arguments).out
    found = zaya(*arguments, "--resume")
    assert found.code == 0
    assert found.out.splitlines()[-1] == f"{tmp_path / 'stats.safetensors'} is already complete"
    assert zaya(*arguments, "--resume", "--json").document()["already_complete"] is True
    message, hint = zaya(*arguments[:-4], "--samples", "3", "--context", "64", "--resume").error()
    assert "of another model, other data, other options" in message
    assert "--force" in hint


def test_a_shells_substitution_is_data(zaya: Zaya, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"words from a pipe " * 200)
    os.close(writing)
    found = zaya("calibrate", TINY, "-o", tmp_path / "stats", *QUICK, "--data", f"/dev/fd/{reading}")
    os.close(reading)
    assert found.code == 0


def test_statistics_that_are_not_there_are_said_to_be(zaya: Zaya, tmp_path: Path) -> None:
    quantize = ("quantize", TINY, tmp_path / "out", "--recipe", "int4-imatrix", "--stats")
    for name in ("stats", "stats.json", "stats.safetensors"):
        message, hint = zaya(*quantize, tmp_path / name).error()
        assert message == f"there are no statistics {tmp_path / 'stats.safetensors'}"
        assert "zaya calibrate" in hint
    zaya("calibrate", TINY, "-o", tmp_path / "stats", *QUICK)
    assert zaya(*quantize, tmp_path / "stats.json").code == 0
