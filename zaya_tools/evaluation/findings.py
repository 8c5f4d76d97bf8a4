"""What a check of `zaya validate` returns: findings in words, and the figures that they rest on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["fail", "warn", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that a check has to say. `names` are the tensors, modules or entries that it is about, all of them."""

    check: str
    severity: Severity
    message: str
    names: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, stable in names and order."""
        return {
            "check": self.check,
            "severity": self.severity,
            "message": self.message,
            "names": list(self.names),
        }


@dataclass(frozen=True)
class CheckResult:
    """A check's findings and its figures, which are plain JSON values with stable names."""

    check: str
    findings: tuple[Finding, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that make the verdict FAIL."""
        return tuple(finding for finding in self.findings if finding.severity == "fail")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, stable in names and order."""
        return {
            "check": self.check,
            "findings": [finding.as_dict() for finding in self.findings],
            "figures": self.figures,
        }


def about(
    check: str,
    severity: Severity,
    one: str,
    more: str,
    items: Sequence[tuple[str, str]],
    names: Sequence[str] | None = None,
) -> Finding:
    """A finding about some (name, detail) pairs: their number with `one` or `more`, then the first few of them.

    `names` are the finding's own where the pairs hold labels rather than names.
    """
    message = f"{len(items):,} {one if len(items) == 1 else more}: {named(items)}"
    return Finding(check, severity, message, tuple(names if names is not None else (name for name, _ in items)))


def plain(names: Iterable[str]) -> list[tuple[str, str]]:
    """Names without details, as `about` takes them."""
    return [(name, "") for name in names]


def named(items: Sequence[tuple[str, str]], limit: int = 4) -> str:
    """(name, detail) pairs for a message: the first `limit`, and how many more there are."""
    shown = ", ".join(f"{name} ({detail})" if detail else name for name, detail in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit:,} more"
