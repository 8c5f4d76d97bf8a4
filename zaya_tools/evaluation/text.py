"""Text to work on: a file, standard input, a hub dataset, or the standard library's own sources; and its tokens."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zaya_tools.errors import ZayaError
from zaya_tools.training.corpus import held_out_text, training_documents

HELD_OUT = "held-out"
LIBRARY = "library"
FIELD = "text"
CHATS = ("messages", "conversations")
"""Fields in which data sets keep a conversation's turns."""

Chat = Callable[[Sequence[Any]], str]
"""A conversation's turns, as a data set has them, to the text that a model sees."""
_FILES = (".txt", ".jsonl", ".ndjson", ".parquet")
_DATASET = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")


def documents(data: str, field: str = FIELD, *, chat: Chat | None = None, split: str = "test") -> Iterator[str]:
    """Documents of `data`, one after the other, none empty.

    `data` is "held-out" (sources of the standard library that the bundled model was not trained on), "library" (the
    other ones, a document each), "-" (standard input, one document), a file (.jsonl with `field` a line, .parquet with
    a column of that name, anything else one document), or a hub dataset `name:config@split` where the `datasets`
    package is installed; `split` stands where none is named. With `chat`, rows may hold a conversation instead, as a
    list of turns in `field`, `messages` or `conversations`. Raises ZayaError when there is no such thing, or no such
    field.
    """
    if data == HELD_OUT:
        yield held_out_text()
        return
    if data == LIBRARY:
        yield from training_documents()
        return
    if data == "-":
        yield from filter(None, [_decoded(sys.stdin.buffer.read(), "standard input")])
        return
    file = Path(data).expanduser()
    if file.is_file():
        yield from (text for text in _file(file, field, chat) if text)
        return
    if file.suffix in _FILES:
        raise ZayaError(f"there is no file {data}", "check the path")
    yield from (text for text in _dataset(data, field, chat, split) if text)


def _file(file: Path, field: str, chat: Chat | None) -> Iterator[str]:
    try:
        if file.suffix == ".parquet":
            yield from _parquet(file, field, chat)
        elif file.suffix in (".jsonl", ".ndjson"):
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _field(json.loads(line), field, f"{file.name}, line {number}", chat)
        else:
            yield _decoded(file.read_bytes(), file.name)
    except UnicodeDecodeError as error:
        raise _not_text(file.name, error) from error
    except json.JSONDecodeError as error:
        raise ZayaError(f"{file.name} is not JSON line by line ({error})") from error


def _decoded(data: bytes, name: str) -> str:
    """UTF-8 text, with line ends as LF."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise _not_text(name, error) from error


def _not_text(name: str, error: UnicodeDecodeError) -> ZayaError:
    return ZayaError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start})", "give text, jsonl or parquet")


def _field(row: Any, field: str, where: str, chat: Chat | None = None) -> str:
    if chat is not None and isinstance(row, dict) and not isinstance(row.get(field), str):
        turns = next((row[name] for name in (field, *CHATS) if isinstance(row.get(name), list)), None)
        if turns is not None:
            return chat(turns)
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        known = f"its fields are {', '.join(sorted(row))}" if isinstance(row, dict) else "it is not an object"
        raise ZayaError(f"{where} has no text in {field!r}: {known}", "name the field with --field")
    text: str = row[field]
    return text


def _parquet(file: Path, field: str, chat: Chat | None) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ZayaError(
            "parquet files need the pyarrow package", "pip install pyarrow, or give text or jsonl"
        ) from error
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ZayaError(f"{file.name} is not a parquet file: {str(error).splitlines()[0]}") from error
    names = table.schema_arrow.names
    if chat is not None:
        field = next((name for name in (field, *CHATS) if name in names), field)
    if field not in names:
        raise ZayaError(f"{file.name} has no column {field!r}: it has {', '.join(names)}", "name it with --field")
    kind = table.schema_arrow.field(field).type
    if chat is not None and (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        for batch in table.iter_batches(columns=[field]):
            yield from (chat(turns) for turns in batch.column(0).to_pylist() if turns)
        return
    if not any(f(kind) for f in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)):
        raise ZayaError(f"{file.name}: column {field!r} is {kind}, not text", "name the column with --field")
    for batch in table.iter_batches(columns=[field]):
        yield from filter(None, batch.column(0).to_pylist())


def _dataset(data: str, field: str, chat: Chat | None, split: str) -> Iterator[str]:
    found = _DATASET.fullmatch(data)
    if not found:
        raise ZayaError(
            f"there is no file {data}", "give a file, - for standard input, or a hub dataset name:config@split"
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ZayaError(
            f"there is no file {data}, and hub datasets need the datasets package", "pip install datasets"
        ) from error
    try:
        rows = load_dataset(found["repo"], found["config"], split=found["split"] or split, streaming=True)
        for row in rows:
            yield _field(row, field, f"{data}", chat)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ZayaError(f"there is no file {data}, and no such dataset could be read: {reason}") from error


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
