from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zaya_tools.calibration.data import Choice, sample
from zaya_tools.data import TINY
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.text import read_tokenizer
from zaya_tools.training.corpus import held_out_text

VOCABULARY = 320
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


def jsonl(file: Path, rows: list[object]) -> str:
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


def with_template(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A folder with the tiny tokenizer and a chat template."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def text(ids: torch.Tensor) -> str:
    return str(read_tokenizer(TINY).decode(ids.flatten().tolist(), skip_special_tokens=False))


def test_windows_are_full_and_as_many_as_asked_for() -> None:
    drawn = sample(Choice(samples=5, context=33), TINY, VOCABULARY)
    assert drawn.ids.shape == (5, 33)
    assert sample(Choice(samples=5, context=33), TINY, VOCABULARY, pool=3).ids.shape == (15, 33)


def test_a_seed_gives_the_same_windows_and_another_one_others() -> None:
    first, again, other = (sample(Choice(samples=4, context=50, seed=seed), TINY, VOCABULARY) for seed in (3, 3, 4))
    assert torch.equal(first.ids, again.ids)
    assert first.digest == again.digest != other.digest
    assert not torch.equal(first.ids, other.ids)


def test_the_order_of_documents_in_a_file_does_not_matter(tmp_path: Path) -> None:
    rows: list[object] = [{"text": f"document {number} " * 9} for number in range(20)]
    one = sample(Choice(jsonl(tmp_path / "a.jsonl", rows), samples=4, context=40), TINY, VOCABULARY)
    two = sample(Choice(jsonl(tmp_path / "b.jsonl", rows[::-1]), samples=4, context=40), TINY, VOCABULARY)
    assert torch.equal(one.ids, two.ids)


def test_equal_documents_are_used_once(tmp_path: Path) -> None:
    rows: list[object] = [{"text": "the same"}, {"text": "the  same\n"}, {"text": "another"}] * 3
    drawn = sample(Choice(jsonl(tmp_path / "a.jsonl", rows), samples=9, context=2), TINY, VOCABULARY)
    assert (drawn.passages, drawn.duplicates) == (9, 7)
    assert text(drawn.ids).count("same") == 1


def test_what_is_evaluated_on_is_not_calibrated_on() -> None:
    drawn = text(sample(Choice(samples=16, context=256), TINY, VOCABULARY).ids)
    held_out = held_out_text()
    lines = [line for line in drawn.splitlines() if len(line) > 60]
    assert len(lines) > 5
    assert not [line for line in lines if line in held_out]


def test_conversations_go_through_the_template(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "you"}]
    data = jsonl(tmp_path / "chat.jsonl", [{"messages": turns}, {"conversations": shared}])
    drawn = sample(Choice(data, samples=20, context=4), folder, VOCABULARY)
    found = text(drawn.ids)
    assert "<user>hello<eos><assistant>good day<eos>" in found or "<user>hi<eos><assistant>you<eos>" in found


def test_a_template_in_the_tokenizers_config_is_used(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "tokenizer", None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    data = jsonl(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "hello there"}]}])
    assert "<user>hello" in text(sample(Choice(data, samples=1, context=12), folder, VOCABULARY).ids)


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([{"messages": [{"role": "user", "content": "x"}]}], None, "no chat template"),
        ([{"messages": [{"content": "x"}]}], TEMPLATE, "without role and content"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "{{ raise_exception('odd') }}", "does not fit"),
        ([{"other": "x"}], TEMPLATE, "no text in 'text'"),
    ],
)
def test_conversations_that_cannot_be_rendered_are_explained(
    tmp_path: Path, rows: list[object], template: str | None, message: str
) -> None:
    folder = with_template(tmp_path / "tokenizer", template)
    with pytest.raises(ZayaError, match=message):
        sample(Choice(jsonl(tmp_path / "a.jsonl", rows), samples=1, context=2), folder, VOCABULARY)


def test_too_little_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match=r"gives \d+ tokens, a window has 512"):
        sample(Choice(jsonl(tmp_path / "a.jsonl", [{"text": "short"}])), TINY, VOCABULARY)


@pytest.mark.parametrize("choice", [Choice(samples=0), Choice(context=1)])
def test_settings_that_make_no_sense(choice: Choice) -> None:
    with pytest.raises(ZayaError, match=r"samples of \d+ tokens"):
        sample(choice, TINY, VOCABULARY)


def test_another_models_tokenizer_is_found_out() -> None:
    with pytest.raises(ZayaError, match="the model has 100"):
        sample(Choice(samples=1, context=64), TINY, 100)
