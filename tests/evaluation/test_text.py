from __future__ import annotations

import io
import json
import os
import shutil
import sys
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from zaya_tools.data import TINY
from zaya_tools.errors import ZayaError
from zaya_tools.evaluation.text import HELD_OUT, documents, tokenize
from zaya_tools.training.corpus import held_out_text

TEXT = "Grüße, 世界\n\nsecond line\n"
END = 1


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, encoding: str = "utf-8") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding=encoding))


def jsonl(file: Path, rows: Iterable[Any]) -> str:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), "utf-8")
    return str(file)


def parquet(file: Path, columns: dict[str, Any]) -> str:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), file)
    return str(file)


def test_held_out_source() -> None:
    assert list(documents(HELD_OUT)) == [held_out_text()]


@pytest.mark.parametrize("name", ["a.txt", "a", "a.md"])
def test_a_file_is_one_document(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(TEXT.encode())
    assert list(documents(str(tmp_path / name))) == [TEXT]


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_standard_input_is_utf8_whatever_the_locale(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    stdin(monkeypatch, TEXT.encode(), encoding)
    assert list(documents("-")) == [TEXT]


@pytest.mark.parametrize("source", ["-", "file"])
def test_line_ends_are_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    data = TEXT.replace("\n", "\r\n").encode()
    (tmp_path / "file").write_bytes(data)
    stdin(monkeypatch, data)
    assert list(documents("-" if source == "-" else str(tmp_path / "file"))) == [TEXT]


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson"])
def test_jsonl_has_a_document_a_line(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.{suffix}"
    rows = [{"text": TEXT, "body": "other"}, "", {"text": "", "body": "b"}, {"text": "last", "body": "c"}, "  "]
    data = jsonl(file, rows)
    assert list(documents(data)) == [TEXT, "last"]
    assert list(documents(data, "body")) == ["other", "b", "c"]


def test_parquet_has_a_document_a_row(tmp_path: Path) -> None:
    data = parquet(tmp_path / "a.parquet", {"text": [TEXT, None, "", "last"], "body": ["a", "b", "c", "d"]})
    assert list(documents(data)) == [TEXT, "last"]
    assert list(documents(data, "body")) == ["a", "b", "c", "d"]


def test_large_strings_of_parquet_are_text(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    assert list(documents(parquet(tmp_path / "a.parquet", {"text": pa.array(["a"], pa.large_string())}))) == ["a"]


def test_what_is_missing_in_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match=r"a\.jsonl, line 2 has no text in 'text': its fields are body, id") as caught:
        list(documents(jsonl(tmp_path / "a.jsonl", [{"text": "x"}, {"id": 1, "body": "x"}])))
    assert caught.value.hint == "name the field with --field"
    with pytest.raises(ZayaError, match="line 1 has no text in 'text'"):
        list(documents(jsonl(tmp_path / "b.jsonl", [{"text": 5}])))
    with pytest.raises(ZayaError, match=r"line 1 .*: it is not an object"):
        list(documents(jsonl(tmp_path / "c.jsonl", [[1, 2]])))
    with pytest.raises(ZayaError, match="line 1 has no text in 'text': it holds a number"):
        list(documents(jsonl(tmp_path / "d.jsonl", [{"text": 5}])))


@pytest.mark.parametrize(
    "line",
    ["{'text': 1}", "[" * 200_000, '{"a":' * 200_000, '{"text": ' + "9" * 6000 + "}", '{"text": "x"', '{"text": "\t"}'],
)
@pytest.mark.parametrize("before", [0, 3])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, line: str, before: int) -> None:
    data = jsonl(tmp_path / "a.jsonl", [*[{"text": "x"}] * before, line])
    with pytest.raises(ZayaError, match=rf"^a\.jsonl, line {before + 1} is not JSON that can be read \(") as caught:
        list(documents(data))
    assert caught.value.hint
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a", "-"])
def test_the_mark_of_utf8_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content = '{"text": "first"}\r\n\r\n{"text": "second"}\r\n' if name == "a.jsonl" else "first"
    stdin(monkeypatch, b"\xef\xbb\xbf" + content.encode())
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + content.encode())
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    found = list(documents("-" if name == "-" else str(tmp_path / name)))
    assert found == (["first", "second"] if name == "a.jsonl" else ["first"])


@pytest.mark.parametrize("name", ["pipe", "pipe.jsonl"])
def test_a_pipe_is_read_as_a_file_is(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)
    content = '{"text": "from a pipe"}' if name.endswith("jsonl") else "from a pipe"
    writer = threading.Thread(target=pipe.write_text, args=(content,))
    writer.start()
    assert list(documents(str(pipe))) == ["from a pipe"]
    writer.join()


def test_the_descriptor_of_a_shells_substitution_is_read() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"from a shell")
        os.close(writing)
        assert list(documents(f"/dev/fd/{reading}")) == ["from a shell"]
    finally:
        os.close(reading)


def test_what_can_be_read_as_no_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match="is a folder") as caught:
        list(documents(str(tmp_path)))
    assert caught.value.hint
    pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "a.parquet")
    with pytest.raises(ZayaError, match=r"a\.parquet is a pipe"):
        list(documents(str(tmp_path / "a.parquet")))


def test_what_is_wrong_in_a_parquet_file_is_named(tmp_path: Path) -> None:
    data = parquet(tmp_path / "a.parquet", {"body": ["x"], "count": [3]})
    with pytest.raises(ZayaError, match="no column 'text': it has body, count"):
        list(documents(data))
    with pytest.raises(ZayaError, match="column 'count' is int64, not text"):
        list(documents(data, "count"))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(ZayaError, match=r"b\.parquet is not a parquet file"):
        list(documents(str(tmp_path / "b.parquet")))


@pytest.mark.parametrize("source", ["-", "a.txt", "a.jsonl"])
def test_what_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    data = b'{"text": "caf\xe9"}'
    (tmp_path / source).write_bytes(data)
    stdin(monkeypatch, data)
    name = {"-": "standard input", "a.jsonl": "a.jsonl, line 1"}.get(source, source)
    with pytest.raises(ZayaError, match=rf"{name} is not UTF-8 text \(.* at byte 13\)"):
        list(documents("-" if source == "-" else str(tmp_path / source)))


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ZayaError, match="need the pyarrow package") as caught:
        list(documents(str(tmp_path / "a.parquet")))
    assert "pip install pyarrow" in (caught.value.hint or "")


@pytest.mark.parametrize("data", ["no/such/file", "missing.txt", "name:config@split"])
def test_without_datasets_a_name_is_a_missing_file(monkeypatch: pytest.MonkeyPatch, data: str) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ZayaError, match=f"there is no file {data}") as caught:
        list(documents(data))
    assert caught.value.hint


@pytest.mark.parametrize("data", ["/no/such/file.txt", "a b c", "x/y/z", "~/none.txt"])
def test_what_cannot_be_a_dataset_is_a_missing_file(data: str) -> None:
    with pytest.raises(ZayaError, match=f"there is no file {data}$"):
        list(documents(data))


def hub(monkeypatch: pytest.MonkeyPatch, rows: Iterable[Any] | Exception) -> list[tuple[Any, ...]]:
    """A `datasets` package that has these rows; gives the calls made to it."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(repo: str, config: str | None, *, split: str, streaming: bool) -> Iterable[Any]:
        calls.append((repo, config, split, streaming))
        if isinstance(rows, Exception):
            raise rows
        return rows

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


@pytest.mark.parametrize(
    ("data", "call"),
    [
        ("org/wiki", ("org/wiki", None, "test", True)),
        ("org/wiki:raw-v1", ("org/wiki", "raw-v1", "test", True)),
        ("org/wiki:raw-v1@train", ("org/wiki", "raw-v1", "train", True)),
        ("org/wiki@validation", ("org/wiki", None, "validation", True)),
    ],
)
def test_a_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch, data: str, call: tuple[Any, ...]) -> None:
    calls = hub(monkeypatch, [{"text": "a", "body": "b"}, {"text": "", "body": "c"}, {"text": "d", "body": "e"}])
    assert list(documents(data)) == ["a", "d"]
    assert list(documents(data, "body")) == ["b", "c", "e"]
    assert calls == [call] * 2


def test_faults_of_a_dataset_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, [{"body": "b"}])
    with pytest.raises(ZayaError, match="org/wiki, row 1 has no text in 'text': its fields are body"):
        list(documents("org/wiki"))
    for error in (ConnectionError("offline\nmore"), ValueError("no split"), FileNotFoundError("gone"), OSError()):
        hub(monkeypatch, error)
        with pytest.raises(ZayaError, match="there is no file org/wiki, and no such dataset could be read: ") as caught:
            list(documents("org/wiki"))
        assert "\n" not in caught.value.message


def test_tokens_are_those_of_the_text_up_to_the_limit(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    file = tmp_path / "a.txt"
    file.write_text(TEXT, "utf-8")
    tokens = tokenize(TINY, str(file), 10**6)
    assert tokens[-1] == END
    assert Tokenizer.from_file(str(TINY / "tokenizer.json")).decode(tokens[:-1]) == TEXT
    for limit in (0, 1, 5, len(tokens) - 1, len(tokens)):
        assert tokenize(TINY, str(file), limit) == tokens[:limit]


def test_every_document_ends(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "c"}, {"text": "ab"}])
    tokens = tokenize(TINY, data, 100)
    assert [place for place, token in enumerate(tokens) if token == END] == [2, 4, 7]
    assert tokens[:3] == tokens[5:]


def test_no_more_of_a_text_is_read_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless() -> Iterable[Any]:
        while True:
            yield {"text": "some text"}

    hub(monkeypatch, endless())
    assert len(tokenize(TINY, "org/wiki", 100)) == 100


def test_a_long_document_is_tokenized_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("é" * 600_000 + "x" * 600_000)  # the cut falls among the second
    tokens = tokenize(TINY, str(file), 10**7)
    assert len(tokens) == 2 * 600_000 + 600_000 + 1


def test_half_a_surrogate_pair_is_not_a_crash(tmp_path: Path) -> None:
    good = tokenize(TINY, jsonl(tmp_path / "a.jsonl", [{"text": "a?b"}]), 10)
    assert tokenize(TINY, jsonl(tmp_path / "b.jsonl", ['{"text": "a\\ud800b"}']), 10) == good


def test_empty_texts_have_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    stdin(monkeypatch, b"")
    assert tokenize(TINY, str(tmp_path / "a.txt"), 10) == []
    assert tokenize(TINY, "-", 10) == []


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ZayaError, match=r"has no tokenizer\.json") as caught:
        tokenize(tmp_path, HELD_OUT, 10)
    assert "--tokenizer" in (caught.value.hint or "")


@pytest.mark.parametrize(("config", "end"), [(None, None), ({}, None), ({"eos_token_id": 7}, 7),
                                             ({"eos_token_id": [9, 7]}, 9), ({"eos_token_id": []}, None)])  # fmt: skip
def test_the_end_of_a_text_is_what_the_config_says(tmp_path: Path, config: Any, end: int | None) -> None:
    """A folder with a tokenizer alone will do."""
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "a.txt").write_text("ab")
    tokens = tokenize(tmp_path, str(tmp_path / "a.txt"), 10)
    assert tokens[2:] == ([] if end is None else [end])


@pytest.mark.parametrize(
    "name",
    [
        "nosuch.txt", "nosuch.jsonl", "nosuch.parquet", "nosuch", "name:config@split", "./org/name", "./name",
        "../name",
        "/org/name", "~/name", "org/name/more", "folder/nosuch.txt", "folder/nosuch.jsonl", "folder/nosuch.csv",
        "folder/nosuch.json.gz", "org/", "/", "", "x" * 5000, "nul\0", "\ud800",
    ],
)  # fmt: skip
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What no hub dataset is called fails at once: the network would be asked, and be slow."""
    calls = hub(monkeypatch, [{"text": "x"}])
    with pytest.raises(ZayaError) as caught:
        list(documents(name))
    assert caught.value.message.startswith(("there is no file", "/ is a folder", ". is a folder"))
    assert caught.value.hint
    assert not calls
