"""Text that every machine already has: the Python sources of the running interpreter's standard library.

A file is held out, or trained on, by a hash of its path relative to the library, so a file keeps its side in
every Python version. Nothing heavy is imported here.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from zaya_tools.errors import SourceError

HELD_OUT_SHARE = 0.05
PASSAGE_CHARACTERS = 2048

# Folders that are not the library itself, and folders that are mostly generated tables.
_EXCLUDED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "lib2to3",
        "idlelib",
        "turtledemo",
    }
)
_EXCLUDED_FILES = frozenset({"html/entities.py", "stringprep.py"})
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-")


def library_folder() -> Path:
    """The standard library folder of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(relative: str) -> bool:
    """Whether the file with this relative POSIX path is held out (about 5 % of the paths are)."""
    return _hash(relative) < HELD_OUT_SHARE * 2**64


def training_documents(library: Path | None = None) -> list[str]:
    """The training files' text, one string a file, in the order of their paths.

    `library` defaults to the running interpreter's standard library. Raises SourceError without sources.
    """
    return [text for relative, text in _files(library) if not is_held_out(relative)]


def training_text(library: Path | None = None) -> str:
    """All training files joined. Raises SourceError when no sources are installed."""
    return "".join(training_documents(library))


def held_out_text(max_bytes: int | None = None, library: Path | None = None) -> str:
    """Held-out text of at most `max_bytes` UTF-8 bytes (default: all of it), from files not trained on.

    Files are cut at line ends into passages of about 2,048 characters, and passages come in the order of a
    hash, so any length is spread over many files and a shorter text is the beginning of a longer one.
    Raises SourceError when no sources are installed, ValueError for a negative `max_bytes`.
    """
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes must not be negative, found {max_bytes}")
    passages = [
        (_hash(f"{relative}#{index}"), passage)
        for relative, text in _files(library)
        if is_held_out(relative)
        for index, passage in enumerate(_passages(text))
    ]
    joined = "".join(passage for _, passage in sorted(passages))
    if max_bytes is None:
        return joined
    return joined.encode()[:max_bytes].decode(errors="ignore")


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def _passages(text: str) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= PASSAGE_CHARACTERS:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


def _wanted(relative: Path) -> bool:
    if relative.as_posix() in _EXCLUDED_FILES:
        return False
    parts = relative.parts
    return not any(part in _EXCLUDED_FOLDERS or part.startswith(_EXCLUDED_PREFIXES) for part in parts)


def _files(library: Path | None) -> list[tuple[str, str]]:
    """(relative POSIX path, text with newlines as LF) of every non-empty UTF-8 source, sorted by path."""
    folder = library_folder() if library is None else library
    found: list[tuple[str, str]] = []
    for path in folder.rglob("*.py"):
        relative = path.relative_to(folder)
        if not _wanted(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            found.append((relative.as_posix(), text))
    if not found:
        raise SourceError(
            f"no Python sources of the standard library in {folder}",
            "use an interpreter installed with its sources, or give your own text",
        )
    return sorted(found)
