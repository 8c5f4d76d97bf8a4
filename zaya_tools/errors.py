"""Errors that carry their own advice: one line saying what and where, then a hint saying what to do."""

from __future__ import annotations


class ZayaError(Exception):
    """Wrong use or bad input. `exit_code` is what the command line returns for it."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class SourceError(ZayaError):
    """A checkpoint on disk cannot be read as it stands: truncated, overlapping, missing, unsafe."""


class LayoutError(ZayaError):
    """The tensors or the config are not those of a ZAYA1 model in a layout that is known."""


class DestinationError(ZayaError):
    """The output cannot be written where it was asked for."""


class NonFiniteError(ZayaError):
    """NaN or infinity where a number is needed."""


def listing(names: list[str] | tuple[str, ...], limit: int = 5) -> str:
    """Names joined for a one-line message, the first `limit` of them and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"
