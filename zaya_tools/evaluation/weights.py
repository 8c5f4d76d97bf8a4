"""The weight check of `zaya validate`: does this checkpoint hold the reference's numbers? Any two layouts, any size.

Both are read block by block, unit by unit: memory is a few blocks a worker, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.comparison import Bad, Outcome, Side, compare
from zaya_tools.evaluation.findings import CheckResult, Finding, Severity, about, plain
from zaya_tools.evaluation.misplaced import CHECK, describe, locate
from zaya_tools.evaluation.modules import declared
from zaya_tools.evaluation.opened import Opened, differences, open_model, open_reference
from zaya_tools.evaluation.units import Unit, all_units
from zaya_tools.parameters import parameters

Advance = Callable[[int], None]


def check_weights(
    folder: Path, reference: Path | None, *, workers: int | None = None, advance: Advance | None = None
) -> CheckResult:
    """Compare every tensor of a checkpoint with a reference's; without one, look for numbers that are not finite.

    What was not quantized has to have the same bits, in the same or an exactly wider dtype; what was is decoded as
    compressed-tensors decodes it and has to reach its scheme's SQNR, gate and up of every expert apart. `workers`
    are threads (default: the cores), `advance` is called with bytes of the model that are done, from any thread.
    Raises SourceError when there is no such folder, and a ZayaError for a reference that cannot be read whole.
    """
    other = open_reference(reference) if reference is not None else None
    opened = open_model(folder, CHECK)
    if isinstance(opened, Finding):
        return CheckResult(CHECK, (opened,), {})
    findings = list(_preconditions(opened, other))
    if any(finding.severity == "fail" for finding in findings):
        return CheckResult(CHECK, tuple(findings), _figures(opened, other, []))
    bake = other is not None and other.found.architecture.clamp_temp and not opened.found.architecture.clamp_temp
    model = Side(opened)
    against = Side(other, bake=bake) if other is not None else None
    report = advance or (lambda _: None)

    def run(unit: Unit) -> Outcome:
        outcome = compare(unit, model, against)
        report(model.nbytes(unit))
        return outcome

    # A worker a core, each on its own: torch's own threads would only wait for each other.
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            workers or os.cpu_count() or 1, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            outcomes = list(pool.map(run, all_units(opened.found.architecture)))
    finally:
        torch.set_num_threads(before)
    findings += _whole(outcomes)
    findings += _numbers(outcomes)
    if against is not None:
        findings += _wrong(outcomes, model, against)
        findings += _converted(outcomes)
        findings += _apart([outcome for outcome in outcomes if _smoothed(outcome, opened)])
    findings += [*_zeros(outcomes), *_rows(outcomes)]
    return CheckResult(CHECK, tuple(findings), _figures(opened, other, outcomes))


def _preconditions(opened: Opened, other: Opened | None) -> Iterator[Finding]:
    for side in (opened, other) if other is not None else (opened,):
        try:
            declared(side.source.config)
        except LayoutError as error:
            yield Finding(CHECK, "fail", error.message)
    if other is None:
        return
    wrong = [text for severity, text in differences(opened.found.architecture, other.found.architecture)
             if severity == "fail"]  # fmt: skip
    same_table = [(p.name, p.shape) for p in parameters(opened.found.architecture)] == [
        (p.name, p.shape) for p in parameters(other.found.architecture)
    ]
    if not same_table:
        yield Finding(CHECK, "fail", f"nothing was compared, the reference is another model: {'; '.join(wrong)}")


def _whole(outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    absent = [(outcome.unit.name, outcome.reason) for outcome in outcomes if outcome.status == "absent"]
    if absent:
        total = f"of {len(outcomes):,} tensors could not be compared"
        yield about(CHECK, "fail", total, total, absent)


def _numbers(outcomes: Iterable[Outcome]) -> Iterator[Finding]:
    mine, theirs = [], []
    for outcome in outcomes:
        if outcome.bad is not None:
            mine.append((outcome.unit.name, _where(outcome.bad)))
        elif outcome.reference_bad is not None:
            theirs.append((outcome.unit.name, _where(outcome.reference_bad)))
    if mine:
        yield about(CHECK, "fail", "tensor holds NaN or infinity", "tensors hold NaN or infinity", mine)
    if theirs:
        hidden = "NaN or infinity in the reference and finite numbers here"
        yield about(CHECK, "fail", f"tensor holds {hidden}", f"tensors hold {hidden}", theirs)


def _where(bad: Bad) -> str:
    return f"{bad.count:,}, the first at [{bad.row}, {bad.column}]"


def _smoothed(outcome: Outcome, opened: Opened) -> bool:
    return outcome.status == "quantized" and bool(outcome.unit.names & opened.smoothed)


def _apart(outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    if outcomes:
        names = [outcome.unit.name for outcome in outcomes]
        text = "scaled against a neighbour by smoothing, says the manifest: compared up to a factor a channel"
        yield about(CHECK, "note", f"tensor was {text}", f"tensors were {text}", plain(names), names)


def _zeros(outcomes: Iterable[Outcome]) -> Iterator[Finding]:
    zeros = [outcome.unit for outcome in outcomes if outcome.zeros]
    if zeros:
        one, more = "matrix was never filled, it holds only zeros", "matrices were never filled, they hold only zeros"
        yield about(CHECK, "fail", one, more, plain(u.label for u in zeros), [unit.name for unit in zeros])


def _rows(outcomes: Iterable[Outcome]) -> Iterator[Finding]:
    """Rows that are wrong in matrices that are right as a whole: a scale of its own can be."""
    found = [(o.unit, o.rows_off) for o in outcomes if o.rows_off is not None and not o.suspect]
    if found:
        items = [(unit.label, f"{off.count:,} of {unit.rows:,}, the first is {off.row:,}") for unit, off in found]
        rows = "rows that are not the reference's"
        yield about(
            CHECK, "fail", f"tensor has {rows}", f"tensors have {rows}", items, [unit.name for unit, _ in found]
        )


def _wrong(outcomes: Sequence[Outcome], model: Side, reference: Side) -> Iterator[Finding]:
    """Units that are not the reference's: named for what they hold where that can be told, else for how far off."""
    suspects = [o for o in outcomes if o.suspect and not o.zeros]
    moves = locate(suspects, model, reference)
    yield from describe(moves)
    groups: dict[tuple[str, bool], list[Outcome]] = defaultdict(list)
    for outcome in suspects:
        if outcome.unit not in moves and outcome.bad is None and outcome.reference_bad is None:
            groups[outcome.unit.parameter.local, outcome.status == "quantized"].append(outcome)
    for (_, quantized), group in groups.items():
        names = tuple(outcome.unit.name for outcome in group)
        if quantized:
            details = [(o.unit.label, f"{o.sqnr_db:.1f} dB, at least {o.limit.fail:.0f} is expected") for o in group]
            far = "too far from the reference"
            yield about(CHECK, "fail", f"quantized tensor is {far}", f"quantized tensors are {far}", details, names)
        else:
            details = [(o.unit.label, f"relative error {o.relative_error:.3g}") for o in group]
            one, more = "unquantized tensor differs", "unquantized tensors differ"
            yield about(CHECK, "fail", f"{one} from the reference", f"{more} from the reference", details, names)


def _converted(outcomes: Iterable[Outcome]) -> Iterator[Finding]:
    by_status: dict[str, list[Unit]] = defaultdict(list)
    for outcome in outcomes:
        by_status[outcome.status].append(outcome.unit)
    lost = [unit for unit in by_status["rounded"] if unit.parameter.protected]
    rounded = [unit for unit in by_status["rounded"] if not unit.parameter.protected]
    told: tuple[tuple[Severity, str, list[Unit]], ...] = (
        ("fail", "of a role that never loses precision, rounded to a narrower dtype", lost),
        ("warn", "as in the reference, rounded to a narrower dtype", rounded),
        ("note", "as in the reference, in an exactly wider dtype", by_status["widened"]),
        ("note", "with the reference's clamp_temp baked in", by_status["baked"]),
    )
    for severity, text, own in told:
        if own:
            yield about(CHECK, severity, f"tensor {text}", f"tensors {text}", plain(unit.name for unit in own))


def _figures(opened: Opened, other: Opened | None, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts by status, and the errors of everything that was quantized: by role, by block, tensor by tensor."""
    counts = Counter(outcome.status for outcome in outcomes)
    measured = [o for o in outcomes if o.sqnr_db is not None and o.bad is None]
    return {
        "layout": opened.found.layout.name,
        "reference_layout": other.found.layout.name if other is not None else None,
        "tensors": len(all_units(opened.found.architecture)),
        "compared": sum(o.status not in ("absent", "scanned") for o in outcomes),
        "scanned": counts["scanned"],
        "not_compared": counts["absent"],
        "values": sum(o.unit.numel for o in outcomes if o.status != "absent"),
        "equal": counts["equal"],
        "widened": counts["widened"],
        "rounded": counts["rounded"],
        "baked": counts["baked"],
        "quantized": counts["quantized"],
        "different": counts["different"],
        "limits": _limits(outcomes),
        "nonfinite_values": sum(o.bad.count for o in outcomes if o.bad is not None),
        "by_role": _grouped(measured, lambda unit: {"role": unit.parameter.role.value, "part": _part(unit)}),
        "by_block": _grouped(
            measured, lambda unit: {"block": unit.parameter.block, "role": unit.parameter.role.value,
                                    "part": unit.half}
        ),
        "by_tensor": [
            {
                "name": o.unit.name,
                "role": o.unit.parameter.role.value,
                "block": o.unit.parameter.block,
                "expert": o.unit.expert,
                "part": _part(o.unit),
                "sqnr_db": _round(o.sqnr_db),
                "relative_error": _error(o),
            }
            for o in measured
        ],
    }  # fmt: skip


def _limits(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """What quantized tensors have to reach, and what is usual, by scheme."""
    rows = {o.scheme: o.limit for o in outcomes if o.scheme}
    return [{"scheme": name, "sqnr_db_min": _round(row.fail), "sqnr_db_usual": _round(row.usual)}
            for name, row in sorted(rows.items())]  # fmt: skip


def _part(unit: Unit) -> str:
    return unit.half or unit.parameter.local


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _error(outcome: Outcome) -> float:
    return float(f"{min(outcome.relative_error, 1e300):.6g}")


def _grouped(measured: Iterable[Outcome], key: Callable[[Unit], dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[Outcome]]] = {}
    for outcome in measured:
        label = key(outcome.unit)
        groups.setdefault(tuple(label.values()), (label, []))[1].append(outcome)
    return [
        {
            **label,
            "tensors": len(own),
            "sqnr_db_min": _round(min(o.sqnr_db for o in own if o.sqnr_db is not None)),
            "sqnr_db_median": _round(median(o.sqnr_db for o in own if o.sqnr_db is not None)),
            "relative_error_max": max(_error(o) for o in own),
        }
        for label, own in groups.values()
    ]
