from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_tools.calibration.chat import ChatRenderer
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
        ([{"messages": [{"content": "x"}]}], TEMPLATE, r"a\.jsonl, line 1: .* no role and content"),
        (
            [{"messages": [{"role": "user", "content": "x"}]}],
            "{{ raise_exception('odd') }}",
            "line 1: .* not fit .*: odd",
        ),
        ([{"messages": [{"role": "user", "content": "x"}]}] * 2, "{% if %}", "line 1: .* does not fit"),
        ([{"conversations": [{"from": "bot", "value": "x"}]}], TEMPLATE, "line 1: a turn is from none of human, "),
        ([{"other": "x"}], TEMPLATE, "no text in 'text'"),
        ([{"text": ["a", "b"]}], TEMPLATE, "line 1 has no text in 'text': it holds a list"),
        ([{"text": []}], TEMPLATE, "line 1 has no text in 'text': it holds a list"),
        ([{"text": {"a": 1}}], TEMPLATE, "line 1 has no text in 'text': it holds an object"),
    ],
)
def test_conversations_that_cannot_be_rendered_are_explained(
    tmp_path: Path, rows: list[object], template: str | None, message: str
) -> None:
    folder = with_template(tmp_path / "tokenizer", template)
    with pytest.raises(ZayaError, match=message):
        sample(Choice(jsonl(tmp_path / "a.jsonl", rows), samples=1, context=2), folder, VOCABULARY)


GOOD = [{"from": "human", "value": "good question"}, {"from": "gpt", "value": "good answer"}]
FAULTS: list[object] = [None, 5, "text", [], ["a"], {}, {"a": 1}]


@pytest.mark.parametrize("key", ["from", "value", "role", "content"])
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_turn_holds_file_and_line_are_named(tmp_path: Path, key: str, fault: object) -> None:
    """A faulty turn stops the run with its place, or does no harm; it never ends in a traceback."""
    names = ("from", "value") if key in ("from", "value") else ("role", "content")
    turn = {**dict(zip(names, ("user", "hello"), strict=True)), key: fault}
    data = jsonl(tmp_path / "a.jsonl", [{"conversations": GOOD}, {"conversations": [GOOD[0], turn]}])
    folder = with_template(tmp_path / "tokenizer")
    if key == "content" or fault == "text":  # templates say what they make of contents and roles
        assert sample(Choice(data, samples=1, context=4), folder, VOCABULARY).unusable == (key == "from")
        return
    with pytest.raises(ZayaError, match=r"^a\.jsonl, line 2: a turn of the conversation has no role") as caught:
        sample(Choice(data, samples=1, context=4), folder, VOCABULARY)
    assert caught.value.hint


@pytest.mark.parametrize("turn", FAULTS)
def test_whatever_stands_for_a_turn_file_and_line_are_named(tmp_path: Path, turn: object) -> None:
    data = jsonl(tmp_path / "a.jsonl", [{"conversations": GOOD}, {"conversations": [GOOD[0], turn]}])
    with pytest.raises(ZayaError, match=r"^a\.jsonl, line 2: a turn of the conversation has no role and content"):
        sample(Choice(data, samples=1, context=4), with_template(tmp_path / "tokenizer"), VOCABULARY)


@pytest.mark.parametrize(
    ("word", "role"),
    [("function_call", "assistant"), ("tool_call", "assistant"), ("observation", "tool"), ("tool", "tool"),
     ("function_response", "tool"), ("system", "system")],
)  # fmt: skip
def test_tools_of_sharegpt_have_the_roles_that_templates_know(tmp_path: Path, word: str, role: str) -> None:
    data = jsonl(tmp_path / "a.jsonl", [{"conversations": [*GOOD, {"from": word, "value": "weather"}]}])
    drawn = sample(Choice(data, samples=99, context=2), with_template(tmp_path / "tokenizer"), VOCABULARY)
    assert f"<{role}>weather" in text(drawn.ids)
    assert drawn.unusable == 0


def test_conversations_that_the_template_refuses_are_counted(tmp_path: Path) -> None:
    picky = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    folder = with_template(tmp_path / "tokenizer", picky + "{{ m.content }}{% endfor %}")
    bad = [*GOOD, {"from": "observation", "value": "bad weather"}]
    data = jsonl(tmp_path / "a.jsonl", [{"conversations": turns} for turns in (GOOD, bad, GOOD[:1], bad)])
    drawn = sample(Choice(data, samples=9, context=4), folder, VOCABULARY)
    assert drawn.unusable == 2
    assert drawn.reason == "a.jsonl, line 2: the conversation does not fit the chat template: no tools"
    assert "bad weather" not in text(drawn.ids)


def test_a_template_that_refuses_everything_ends_an_endless_data_set(tmp_path: Path) -> None:
    folder = with_template(tmp_path / "tokenizer", "{{ raise_exception('never') }}")
    render = ChatRenderer(folder)
    endless = (render(GOOD, f"row {number}") for number in itertools.count())
    with pytest.raises(ZayaError, match=r"row 0: .*never"):
        any(endless)


def test_conversations_in_parquet_are_named_by_row(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    turns = [[{"role": "user", "content": "hello"}], [{"role": None, "content": "x"}]]
    pq.write_table(pa.table({"messages": turns}), tmp_path / "a.parquet")
    folder = with_template(tmp_path / "tokenizer")
    with pytest.raises(ZayaError, match=r"^a\.parquet, row 2: "):
        sample(Choice(str(tmp_path / "a.parquet"), samples=1, context=4), folder, VOCABULARY)
    pq.write_table(pa.table({"text": [["a", "b"]]}), tmp_path / "b.parquet")
    with pytest.raises(ZayaError, match=r"b\.parquet: column 'text' is list<.*string>, not text"):
        sample(Choice(str(tmp_path / "b.parquet"), samples=1, context=4), folder, VOCABULARY)


@settings(max_examples=10)
@given(st.integers())
def test_any_seed_is_taken_or_refused_in_one_line(seed: int) -> None:
    check_seed(seed)


@pytest.mark.parametrize(
    "seed", [-(2**63), 2**63 - 1, 2**63, -(2**63) - 1, 99999999999999999999, 10**5000], ids=int.bit_length
)
def test_seeds_at_the_edges_and_past_them(seed: int) -> None:
    check_seed(seed)


def check_seed(seed: int) -> None:
    choice = Choice("held-out", samples=1, context=2, seed=seed)
    if -(2**63) < seed < 2**63:
        assert sample(choice, TINY, VOCABULARY).ids.shape == (1, 2)
        return
    with pytest.raises(ZayaError, match=r"a seed of [\d,]+ bits"):
        sample(choice, TINY, VOCABULARY)


def test_windows_are_no_longer_than_the_model_can_see() -> None:
    assert sample(Choice(samples=1, context=1024), TINY, VOCABULARY, positions=1024).ids.shape == (1, 1024)
    with pytest.raises(ZayaError, match=r"context of 300,000 tokens, where the model has 1,024 positions") as caught:
        sample(Choice(context=300_000), TINY, VOCABULARY, positions=1024)
    assert caught.value.hint


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


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": "Let me see."}])
@pytest.mark.parametrize("stated", ['{"city": "Paris"}', {"city": "Paris"}])
def test_calls_of_tools_are_what_templates_go_through(tmp_path: Path, content: dict[str, Any], stated: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
    )
    renderer = ChatRenderer(with_template(tmp_path / "tokenizer", template))
    calls: list[dict[str, Any]] = [{"type": "function", "function": {"name": "weather", "arguments": stated}}]
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls, **content}]
    said = content.get("content") or ""
    assert renderer(turns, "line 1") == f"?|{said}|weather city=Paris"
    calls[0]["function"]["arguments"] = "no JSON"
    assert renderer(turns, "line 2") == ""
    assert renderer.unusable == 1
