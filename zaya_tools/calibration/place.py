"""Where statistics may go: a new name, or with --force a pair of files that zaya wrote."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from zaya_tools.calibration.statistics import KINDS, json_file, read_document
from zaya_tools.checkpoint.header import MAX_HEADER
from zaya_tools.checkpoint.source import read_json
from zaya_tools.errors import DestinationError, SourceError

_DOCUMENT = {"format", "identity", "blocks", "starved", "modules"}


def check_destination(file: Path, model: Path, replace: bool) -> None:
    """DestinationError where the settled `file`, or the document beside it, may not be written.

    With `replace` what stands there gives way, if it is statistics: nothing else is ever replaced.
    """
    if not file.parent.is_dir():
        raise DestinationError(f"the folder {file.parent} does not exist", "create it first")
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise DestinationError(f"{file.parent} is not writable", "choose another place")
    if file.resolve().parent.is_relative_to(model.resolve()):
        raise DestinationError(f"{file} would be written into the checkpoint {model}", "choose another place")
    for entry, ours in ((file, _is_tensors), (json_file(file), _is_document)):
        if entry.is_symlink():
            raise DestinationError(f"{entry} is a link, not statistics", "name another file, or remove the link")
        if entry.is_dir():
            raise DestinationError(f"{entry} is a folder", "name a file for the statistics")
        if not entry.exists():
            continue
        if not ours(entry):
            raise DestinationError(
                f"{entry} exists and is no statistics of zaya's",
                "choose another name: nothing that zaya did not write is replaced",
            )
        if not replace:
            raise DestinationError(f"{entry} already exists", "choose another name, or --force to replace it")


def finished(file: Path) -> bool:
    """Whether anything of finished statistics stands at `file`."""
    return file.exists() or json_file(file).exists()


def stamp_of(file: Path) -> str | None:
    """The stamp of the run that the statistics at `file` are of; None where they are not complete or cannot be read."""
    try:
        stamp: Any = read_document(file).get("stamp")
    except SourceError:
        return None
    return stamp if isinstance(stamp, str) else None


_BEGINNING = re.compile(rb'\{\s*"format": \d+,\s*"identity": "[0-9a-f]{32}",\s*"tool": \{\s*"zaya_tools":')


def _is_document(file: Path) -> bool:
    """Whether a file is what is written beside statistics. It may be cut off, too."""
    if not file.is_file():
        return False
    try:
        return read_json(file).keys() >= _DOCUMENT
    except SourceError:
        with file.open("rb") as stream:
            return _BEGINNING.match(stream.read(4096)) is not None


def _is_tensors(file: Path) -> bool:
    """Whether a file names the tensors of statistics and no others. It may be cut off: that is no reason to keep it."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER:
            return False
        raw = stream.read(length)
    try:
        names = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    if not isinstance(names, dict):
        return False
    names.pop("__metadata__", None)
    return bool(names) and all(name.rpartition(".")[2] in KINDS for name in names)
