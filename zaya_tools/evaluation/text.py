"""Text to work on: a file, standard input, a hub dataset, or the standard library's own sources; and its tokens."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zaya_tools.checkpoint.hub import expand
from zaya_tools.errors import ZayaError
from zaya_tools.training.corpus import held_out_text, training_documents

HELD_OUT = "held-out"
LIBRARY = "library"
STDIN = "-"
FIELD = "text"
CHATS = ("messages", "conversations")
"""Fields in which data sets keep a conversation's turns."""

Chat = Callable[[Sequence[Any], str], str]
"""A conversation's turns, as a data set has them, and where they stand, to the text that a model sees."""
_LINES = (".jsonl", ".ndjson")
_TABLE = ".parquet"
_ENDINGS = (*_LINES, _TABLE, ".txt", ".text", ".md", ".json", ".csv", ".tsv", ".gz", ".zst", ".xz", ".zip", ".arrow")
"""What ends the name of a file rather than of a hub dataset."""
_DATASET = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_CHECK = "check the data"


def documents(data: str, field: str = FIELD, *, chat: Chat | None = None, split: str = "test") -> Iterator[str]:
    """Documents of `data`, one after the other, none empty.

    `data` is "held-out" (sources of the standard library that the bundled model was not trained on), "library" (the
    other ones, a document each), "-" (standard input, one document), a file or pipe (.jsonl with `field` a line,
    .parquet with a column of that name, anything else one document), or a hub dataset `ORG/NAME:CONFIG@SPLIT` where
    the `datasets` package is installed; `split` stands where none is named. With `chat`, rows may hold a conversation
    instead, as a list of turns in `field`, `messages` or `conversations`. Raises ZayaError when there is no such thing,
    or no such field.
    """
    if data == HELD_OUT:
        yield held_out_text()
        return
    if data == LIBRARY:
        yield from training_documents()
        return
    if data == STDIN:
        yield from filter(None, [_decoded(sys.stdin.buffer.read(), "standard input")])
        return
    file = expand(data)
    try:
        there = file.exists()
    except (OSError, ValueError):  # no name that a file could have
        there = False
    if there:
        yield from (text for text in _file(file, field, chat) if text)
        return
    # A name is looked for on the hub only where it cannot be a misspelt path: the network is slow to say no.
    if not _DATASET.fullmatch(data) or file.suffix in _ENDINGS:
        raise ZayaError(
            f"there is no file {data}", "check the path; a hub dataset is ORG/NAME, with :CONFIG and @SPLIT"
        )
    yield from (text for text in _dataset(data, field, chat, split) if text)


def _file(file: Path, field: str, chat: Chat | None) -> Iterator[str]:
    if file.is_dir():
        raise ZayaError(f"{file} is a folder", "name a file in it")
    try:
        if file.suffix == _TABLE:
            yield from _parquet(file, field, chat)
        elif file.suffix in _LINES:
            yield from _lines(file, field, chat)
        else:
            yield _decoded(file.read_bytes(), file.name)
    except OSError as error:
        raise ZayaError(f"{file.name} cannot be read: {error.strerror or error}", "check the path") from error


def _lines(file: Path, field: str, chat: Chat | None) -> Iterator[str]:
    number = 0
    with file.open("rb") as stream:
        for data in stream:
            for line in data.splitlines():
                number += 1
                where = f"{file.name}, line {number}"
                text = _decoded(line, where)
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except (ValueError, RecursionError) as error:  # numbers may have too many digits, lists be too deep
                    reason = str(error).partition(";")[0]
                    raise ZayaError(
                        f"{where} is not JSON that can be read ({reason})", "jsonl has one JSON object a line"
                    ) from error
                yield _field(row, field, where, chat)


def _decoded(data: bytes, name: str) -> str:
    """UTF-8 text, with line ends as LF and without the mark that some editors put first."""
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ZayaError(
            f"{name} is not UTF-8 text ({error.reason} at byte {error.start})", "give text, jsonl or parquet"
        ) from error


def _field(row: Any, field: str, where: str, chat: Chat | None = None) -> str:
    if not isinstance(row, dict):
        raise ZayaError(f"{where} has no text in {field!r}: it is not an object", "name the field with --field")
    if isinstance(row.get(field), str):
        text: str = row[field]
        return text
    if chat is not None:
        turns = next((row[name] for name in (field, *CHATS) if _conversation(row.get(name))), None)
        if turns is not None:
            return chat(turns, where)
    if row.get(field) is None:
        known = f"its fields are {', '.join(sorted(row))}"
    else:
        known = f"it holds {_KINDS.get(type(row[field]), 'something else')}"
    raise ZayaError(f"{where} has no text in {field!r}: {known}", "name the field with --field")


_KINDS = {list: "a list", dict: "an object", int: "a number", float: "a number", bool: "true or false"}


def _conversation(value: Any) -> bool:
    """Whether a field holds turns: a list of objects, of which some may be faulty."""
    return isinstance(value, list) and any(isinstance(turn, dict) for turn in value)


def _parquet(file: Path, field: str, chat: Chat | None) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ZayaError(
            "parquet files need the pyarrow package", "pip install pyarrow, or give text or jsonl"
        ) from error
    if not file.is_file():
        raise ZayaError(f"{file.name} is a pipe, and parquet is not read from its beginning to its end", "give a file")
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ZayaError(f"{file.name} is not a parquet file: {str(error).splitlines()[0]}", _CHECK) from error
    names, types = table.schema_arrow.names, pyarrow.types
    if chat is not None:
        field = next((name for name in (field, *CHATS) if name in names), field)
    if field not in names:
        raise ZayaError(f"{file.name} has no column {field!r}: it has {', '.join(names)}", "name it with --field")
    kind = table.schema_arrow.field(field).type
    listed = chat is not None and (types.is_list(kind) or types.is_large_list(kind))
    turns = listed and types.is_struct(kind.value_type)
    if not turns and not any(f(kind) for f in (types.is_string, types.is_large_string, types.is_string_view)):
        raise ZayaError(f"{file.name}: column {field!r} is {kind}, not text", "name the column with --field")
    row = 0
    try:
        for batch in table.iter_batches(columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                if value:
                    yield chat(value, f"{file.name}, row {row}") if chat is not None and turns else value
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ZayaError(f"{file.name} cannot be read after row {row}: {reason}", _CHECK) from error


def _dataset(data: str, field: str, chat: Chat | None, split: str) -> Iterator[str]:
    found = _DATASET.fullmatch(data)
    assert found
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ZayaError(
            f"there is no file {data}, and hub datasets need the datasets package", "pip install datasets"
        ) from error
    try:
        rows = load_dataset(found["repo"], found["config"], split=found["split"] or split, streaming=True)
        for number, row in enumerate(rows, 1):
            yield _field(row, field, f"{data}, row {number}", chat)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ZayaError(
            f"there is no file {data}, and no such dataset could be read: {reason}",
            "check the spelling and the network; a hub dataset is ORG/NAME, with :CONFIG and @SPLIT",
        ) from error


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer (of the tokenizers library) in a folder; ZayaError when there is none or it cannot be read."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ZayaError(f"{folder} has no tokenizer.json", "give a folder that has one with --tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ZayaError(f"{file} cannot be read: {error}", "copy it again from the source") from error


def tokenize(folder: Path, data: str, limit: int, field: str = FIELD) -> list[int]:
    """At most `limit` token ids of `data` by the tokenizer in `folder`, its end-of-text token after each document."""
    tokenizer = read_tokenizer(folder)
    end = end_token(folder)
    tokens: list[int] = []
    for document in documents(data, field):
        # Half a surrogate pair, which JSON can spell, is no text.
        text = document.encode("utf-8", "replace").decode("utf-8")
        # Characters beyond what could be needed are not tokenized: a token is at least a byte, mostly several.
        for start in range(0, len(text), 1 << 20):
            tokens += tokenizer.encode(text[start : start + (1 << 20)], add_special_tokens=False).ids
            if len(tokens) >= limit:
                return tokens[:limit]
        if end is not None:
            tokens.append(end)
    return tokens[:limit]


def end_token(folder: Path) -> int | None:
    """The first end-of-text token that the config in a folder names."""
    from zaya_tools.checkpoint.source import CONFIG, read_json

    file = folder / CONFIG
    end = read_json(file).get("eos_token_id") if file.exists() else None
    first = end[0] if isinstance(end, list) and end else end
    return first if isinstance(first, int) else None
