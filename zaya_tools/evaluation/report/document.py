"""The validation document as the reports read it: every key may be absent, and an absent one is not an error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zaya_tools.evaluation.report.numbers import count, number, size

CHECKS = ("structure", "weights", "likelihood", "generation")
Document = Mapping[str, Any]
_LISTED = 8
_ROWS = 16


@dataclass(frozen=True)
class BlockRow:
    """One block of the model: tokens an expert, tokens skipped, and with a reference agreement and error."""

    block: int
    experts: tuple[int, ...]
    skipped: int
    agreement: float | None
    error: float | None

    @property
    def tokens(self) -> int:
        """Tokens that went through the block's router."""
        return sum(self.experts) + self.skipped

    @property
    def starved(self) -> tuple[int, ...]:
        """Experts that no token chose."""
        return tuple(index for index, tokens in enumerate(self.experts) if tokens == 0)


@dataclass(frozen=True)
class TensorRow:
    """One compared tensor, or one half of one expert of it; `exact` where every bit is the reference's.

    `part` is what it is within its role: gate, up and down of an expert, else a name.
    """

    name: str
    role: str
    block: int | None
    expert: int | None
    part: str
    error: float | None
    sqnr: float | None
    exact: bool

    @property
    def kind(self) -> str:
        """What the tensor is: its role, and which part of it."""
        short = self.part.removesuffix(".weight").rpartition(".")[2]
        return f"{self.role}, {short}" if short and short != self.role else self.role

    @property
    def label(self) -> str:
        """Its name, with the expert and the half where it does not say which."""
        if self.expert is None or f".{self.expert}." in self.name:
            return self.name
        return f"{self.name} [expert {self.expert}{', ' if self.part else ''}{self.part}]"


def mapping(value: Any, *keys: str) -> Document:
    """The mapping under `keys`, empty where anything on the way is absent."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def items(value: Any) -> Sequence[Any]:
    """A list as it is, anything else as an empty one."""
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def real(value: Any) -> float | None:
    """A number, or None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def whole(value: Any) -> int | None:
    """A finite number as an integer, or None."""
    number = real(value)
    return int(number) if number is not None and math.isfinite(number) else None


def figures(document: Document, check: str) -> Document:
    """The figures of a check, empty where it did not run."""
    return mapping(document, "checks", check, "figures")


def passed(document: Document, check: str) -> bool | None:
    """Whether a check passed; None where it did not run."""
    value = mapping(document, "checks", check).get("passed")
    return value if isinstance(value, bool) else None


def estimate(value: Any) -> tuple[float | None, float | None]:
    """(value, standard error) of a plain number or of {"value", "error"}."""
    if isinstance(value, Mapping):
        return real(value.get("value")), real(value.get("error"))
    return real(value), None


def lines(document: Document, key: str) -> list[str]:
    """A list of sentences."""
    return [str(line) for line in items(document.get(key))]


def subject(model: Document) -> list[str]:
    """What a model is, in a few phrases: parameters, bytes, scheme, geometry, layout."""
    parameters, nbytes = whole(model.get("parameters")), whole(model.get("bytes"))
    depth, experts = whole(model.get("blocks")), whole(model.get("experts"))
    phrases = [f"{count(parameters)} parameters"] if parameters is not None else []
    phrases += [size(nbytes)] if nbytes is not None else []
    scheme, kind = model.get("scheme"), model.get("scheme_class")
    phrases += [f"{scheme} ({kind})" if scheme and kind else str(scheme or kind)] if scheme or kind else []
    phrases += [f"{depth:,} blocks of {experts:,} experts"] if depth is not None and experts is not None else []
    phrases += [f"{model['layout']} layout"] if model.get("layout") else []
    return phrases


def blocks(document: Document) -> list[BlockRow]:
    """The blocks that the likelihood check went through, in order."""
    rows = [mapping(row) for row in items(figures(document, "likelihood").get("blocks"))]
    return [
        BlockRow(
            whole(row.get("block")) or 0,
            tuple(whole(n) or 0 for n in items(row.get("expert_tokens"))),
            whole(row.get("skipped_tokens")) or 0,
            real(row.get("router_agreement")),
            real(row.get("hidden_error")),
        )
        for row in rows
    ]


def tensors(document: Document) -> list[TensorRow]:
    """The tensors that the weights check measured one by one."""
    found = figures(document, "weights")
    roles = {str(row.get("part")): row.get("role") for row in map(mapping, items(found.get("by_role")))}
    rows = items(found.get("by_tensor")) or items(found.get("tensors"))
    return [_tensor(mapping(row), roles) for row in rows]


def _tensor(row: Document, roles: Document) -> TensorRow:
    part = str(row.get("part") or row.get("half") or "")
    return TensorRow(
        name=str(row.get("name", "")),
        role=str(row.get("role") or roles.get(part) or "tensor"),
        block=whole(row.get("block")),
        expert=whole(row.get("expert")),
        part=part,
        error=real(row.get("relative_error")),
        sqnr=real(row.get("sqnr_db")),
        exact=bool(row.get("exact")),
    )


def equal(document: Document) -> tuple[int, int]:
    """(tensors equal bit for bit, tensors compared)."""
    found, rows = figures(document, "weights"), tensors(document)
    same, compared = whole(found.get("equal")), whole(found.get("compared"))
    if same is None or compared is None:
        return sum(row.exact for row in rows), len(rows)
    return same, compared


def least_sqnr(document: Document) -> float | None:
    """The decibels that every quantized tensor has to reach, where all schemes in the checkpoint agree on them."""
    limits = [real(mapping(row).get("sqnr_db_min")) for row in items(figures(document, "weights").get("limits"))]
    least = limits[0] if len(set(limits)) == 1 else None
    return least if least is not None and math.isfinite(least) else None


def worst(rows: Sequence[TensorRow], most: int) -> list[TensorRow]:
    """The tensors furthest from the reference; one without a finite error comes first."""
    changed = [row for row in rows if not row.exact]

    def badness(row: TensorRow) -> tuple[bool, float]:
        measured = row.error is not None and row.error == row.error
        return measured, -(row.error or 0.0) if measured else 0.0

    return sorted(changed, key=badness)[:most]


def facts(value: Any, label: str = "") -> Iterator[tuple[str, str]]:
    """(label, text) of everything in a free mapping; nested keys are joined, long lists are counted.

    Of a short table every row is one, labelled by its first column.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from facts(inner, f"{label}, {spoken(key)}" if label else spoken(key))
    elif isinstance(value, list | tuple) and 0 < len(value) <= _ROWS and all(map(_flat, value)):
        for row in value:
            (_, first), *rest = row.items()
            # A column that repeats the table's name says nothing: quantized, expert: 96 of 96.
            said = ", ".join(text if key == label else f"{key} {text}" for key, text in facts(dict(rest)))
            yield f"{label}, {first}", said.replace(", of ", " of ")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield label, _listed(value)
    elif isinstance(value, bool) or value is None:
        yield label, {True: "yes", False: "no", None: "none"}[value]
    elif isinstance(value, int | float):
        yield label, number(value, 6)
    else:
        yield label, str(value)


def _flat(row: Any) -> bool:
    """Whether this is a row of a table: a name and values."""
    return isinstance(row, Mapping) and len(row) > 1 and not any(isinstance(v, Mapping | list) for v in row.values())


def spoken(key: Any) -> str:
    """A key in words."""
    return str(key).replace("_", " ")


def _listed(values: Sequence[Any]) -> str:
    if not values:
        return "none"
    if any(isinstance(value, Mapping | list | tuple) for value in values):
        return f"{len(values):,} entries"
    shown = ", ".join(number(v) if real(v) is not None else str(v) for v in values[:_LISTED])
    return shown + (f" and {len(values) - _LISTED:,} more" if len(values) > _LISTED else "")
