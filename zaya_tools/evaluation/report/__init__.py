"""Reports of a validation: one HTML page, Markdown or JSON, all from the same document."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_tools.errors import DestinationError, ZayaError

SUFFIXES = (".html", ".md", ".json")


def write_report(validation: Mapping[str, Any], path: Path) -> None:
    """Write a validation document to `path`; its suffix (.html, .md or .json) says how.

    Every key of the document may be absent: what was not run is said to be so. Equal documents give equal bytes.
    Raises ZayaError for another suffix and DestinationError where nothing can be written.
    """
    check_suffix(path)
    written = render(validation, path.suffix.lower())
    try:
        path.write_text(written, encoding="utf-8", newline="\n")
    except OSError as error:
        raise DestinationError(
            f"{path}: {error.strerror or error}", "give a file in a folder that exists and may be written to"
        ) from error


def check_suffix(path: Path) -> None:
    """Raise ZayaError where `write_report` would not know what to write, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise ZayaError(f"{path}: no report ends in {path.suffix or 'nothing'}", f"end it in {', '.join(SUFFIXES)}")


def render(validation: Mapping[str, Any], suffix: str) -> str:
    """The report's text for a suffix out of SUFFIXES."""
    check_suffix(Path(f"report{suffix}"))
    if suffix == ".json":
        return json.dumps(_strict(validation), indent=2, ensure_ascii=True, allow_nan=False) + "\n"
    # Imported here, so that a JSON report costs no more than it needs.
    if suffix == ".md":
        from zaya_tools.evaluation.report.markdown import text

        return text(validation)
    from zaya_tools.evaluation.report.html import page

    return page(validation)


def _strict(value: Any) -> Any:
    """The value with NaN and infinities as null: JSON has none."""
    if isinstance(value, Mapping):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
