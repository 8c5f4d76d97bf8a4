"""Continuations out of the document, cut to what is read."""

from __future__ import annotations

from dataclasses import dataclass

from zaya_tools.evaluation.report.document import Document, figures, items, mapping, real

_PROMPT = 400


@dataclass(frozen=True)
class Sample:
    """One prompt (its end, where it is long), its continuation, and the reference's."""

    prompt: str
    text: str
    reference: str | None
    agreement: float | None


def prompts(document: Document) -> list[Sample]:
    """The continuations of the generation check."""
    given = figures(document, "generation")
    found = []
    for entry in map(mapping, items(given.get("texts")) or items(given.get("prompts"))):
        prompt, reference = str(entry.get("prompt") or ""), entry.get("reference_text")
        cut = f"…{prompt[-_PROMPT:]}" if len(prompt) > _PROMPT else prompt
        text = str(entry.get("text") or "")
        found.append(Sample(cut, text, None if reference is None else str(reference), real(entry.get("agreement"))))
    return found


def shared(one: str, other: str) -> int:
    """Number of leading characters that both have."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
