"""One unit of two checkpoints compared: bit by bit where nothing was quantized, in dB where it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log10, sqrt
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from zaya_tools.dtypes import SIZES, from_float32, holds, nonfinite
from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.modules import declared
from zaya_tools.evaluation.opened import Opened
from zaya_tools.evaluation.quantized import decoders
from zaya_tools.evaluation.stored import Decoder, Slab, Stretch, as_tensor, slabs
from zaya_tools.evaluation.units import Unit
from zaya_tools.parameters import Role, parameters

BLOCK = 2**20
"""Elements that are compared at a time."""

Status = Literal["equal", "widened", "rounded", "baked", "quantized", "different", "scanned", "absent"]


@dataclass(frozen=True)
class Limit:
    """SQNR in dB below which a quantized matrix cannot be the reference's, and the usual one for normal weights."""

    fail: float
    usual: float


def limit(decoder: Decoder, learned: bool = False) -> Limit:
    """The SQNR to expect of a scheme, and of numbers that were `learned`, that is, rounded for their inputs.

    Rounding to floats costs the same whatever the scale: 3 bits of mantissa give 31.5 dB, and a tensor that reaches
    below the normal numbers somewhat less. Rounding to integers costs 6 dB a bit; how much of that a row's outliers
    eat grows with the bits. Usual values are of normal weights in groups of 128 or rows of 2,048. Inputs that use few
    directions let weights move along the others, which cost up to 6 dB of 4-bit matrices in trials.
    """
    weights = decoder.scheme.weights
    moved = 4.0 if learned else 0.0
    if weights.type == "float":
        return Limit(25.0 - moved, 31.5) if weights.num_bits == 8 else Limit(12.0 - moved, 18.5)
    return Limit(4.5 * weights.num_bits - 6 - moved, 6.02 * weights.num_bits - 5)


EXACT = Limit(45.0, 56.0)
"""Rounding to bfloat16, whose mantissa has 7 bits. Only tells whose values an unquantized unit holds."""


@dataclass(frozen=True)
class Bad:
    """Numbers that are NaN or infinite: how many, and the first one's index [row, column] in its unit."""

    count: int
    row: int
    column: int


@dataclass(frozen=True)
class Outcome:
    """What comparing one unit gave. Without rounding `sqnr_db` is None; errors are over the whole unit.

    `reason` says why a unit is absent, `scheme` how it is quantized. `zeros` says that the model holds only zeros
    where the reference does not (any matrix of only zeros, without a reference); `rows_off` counts quantized rows
    that are wrong by themselves, whatever the error of the whole.
    """

    unit: Unit
    status: Status
    relative_error: float = 0.0
    sqnr_db: float | None = None
    limit: Limit = EXACT
    scheme: str = ""
    zeros: bool = False
    rows_off: Bad | None = None
    bad: Bad | None = None
    reference_bad: Bad | None = None
    reason: str = ""

    @property
    def suspect(self) -> bool:
        """Whether the unit cannot be the reference's, numbers that are not finite aside."""
        too_far = self.sqnr_db is not None and self.sqnr_db < self.limit.fail
        return self.status == "different" or (self.status == "quantized" and too_far)


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints: any unit of it, in numbers."""

    opened: Opened
    bake: bool = False
    slabs_of: Mapping[str, tuple[Slab, ...]] = field(init=False)

    def __post_init__(self) -> None:
        found = self.opened.found
        table = {p.name: tuple(slabs(p, found.bound[p.name])) for p in parameters(found.architecture)}
        object.__setattr__(self, "slabs_of", table)

    @cached_property
    def _decoders(self) -> dict[str, Decoder]:
        stated = declared(self.opened.source.config)
        return {} if stated is None else decoders(self.opened, stated)

    def slab(self, unit: Unit) -> Slab:
        """The matrix that holds a unit."""
        own = self.slabs_of[unit.parameter.name]
        return next(slab for slab in reversed(own) if slab.start <= unit.start)

    def decoder(self, unit: Unit) -> Decoder | None:
        """How a unit is quantized, None where it is not."""
        return self._decoders.get(unit.name) if self.slab(unit).bound.quantized else None

    def absent(self, unit: Unit) -> str:
        """Why a unit cannot be read; empty when it can."""
        slab = self.slab(unit)
        if not slab.present:
            return "missing"
        if slab.bound.quantized:
            return "" if unit.name in self._decoders else "quantized, and quantization_config does not say how"
        return "" if slab.full is not None else "of the wrong shape"

    def nbytes(self, unit: Unit) -> int:
        """About how many bytes hold a unit: its share of the stored tensors."""
        slab = self.slab(unit)
        held = [slab.bound.tensor, *slab.bound.companions.values()]
        total = sum(tensor.nbytes for tensor in held if tensor is not None)
        return total * unit.numel // max(1, slab.rows * slab.columns * slab.copies)

    def full(self, unit: Unit) -> Stretch | None:
        """The bytes of a unit that is stored in full precision."""
        slab = self.slab(unit)
        whole = slab.full
        if whole is None:
            return None
        skipped = (unit.start - slab.start) * SIZES[whole.tensor.dtype]
        return Stretch(whole.tensor, whole.offset + skipped, (unit.rows, unit.columns))

    def values(self, unit: Unit, first: int, last: int) -> Tensor:
        """Rows [first, last) of a unit, float32, decoded where they are quantized."""
        decoder = self.decoder(unit)
        if decoder is not None:
            slab = self.slab(unit)
            skipped = (unit.start - slab.start) // slab.columns
            return decoder.values(slab, skipped + first, skipped + last)
        stretch = self.full(unit)
        if stretch is None:
            raise LayoutError(f"{unit.name} is {self.absent(unit)}")
        values = stretch.read(first, last).float()
        if self.bake and unit.parameter.role is Role.TEMPERATURE:
            return torch.from_numpy(np.exp(np.clip(values.numpy(), np.float32(1e-7), np.float32(2)), dtype=np.float32))
        return values


def spans(unit: Unit) -> Iterator[tuple[int, int]]:
    """Row ranges of a unit of about BLOCK elements."""
    step = max(1, BLOCK // unit.columns)
    for first in range(0, unit.rows, step):
        yield first, min(first + step, unit.rows)


def compare(unit: Unit, model: Side, reference: Side | None) -> Outcome:
    """Compare one unit, or scan it for numbers that are not finite where there is no reference."""
    try:
        if reason := model.absent(unit):
            return Outcome(unit, "absent", reason=reason)
        if reference is None:
            return _scan(unit, model)
        if reason := reference.absent(unit):
            return Outcome(unit, "absent", reason=f"{reason} in the reference")
        return _same(unit, model, reference) or _measure(unit, model, reference)
    except LayoutError as error:
        return Outcome(unit, "absent", reason=error.message)


def _same(unit: Unit, model: Side, reference: Side) -> Outcome | None:
    """The outcome where both hold the same bytes in the same dtype, else None."""
    mine, other = model.full(unit), reference.full(unit)
    baked = reference.bake and unit.parameter.role is Role.TEMPERATURE
    if mine is None or other is None or mine.tensor.dtype != other.tensor.dtype or baked:
        return None
    bad = _Bad(unit.columns)
    for first, last in spans(unit):
        data = mine.read(first, last).view(torch.uint8).numpy()
        if not np.array_equal(data, other.read(first, last).view(torch.uint8).numpy()):
            return None
        bad.mask(nonfinite(data.reshape(-1), mine.tensor.dtype), first)
    return Outcome(unit, "equal", bad=bad.found, reference_bad=bad.found)


def _scan(unit: Unit, model: Side) -> Outcome:
    bad, zeros = _Bad(unit.columns), True
    for first, last in spans(unit):
        values = model.values(unit, first, last)
        bad.values(values, first)
        zeros = zeros and not values.any()
    return Outcome(unit, "scanned", zeros=zeros and len(unit.parameter.shape) > 1, bad=bad.found)


def _measure(unit: Unit, model: Side, reference: Side) -> Outcome:
    """The outcome by the numbers: equal ones of another dtype, correctly rounded ones, or the size of the error."""
    mine, other = _dtype(model, unit), _dtype(reference, unit)
    narrower = mine is not None and other is not None and not holds(mine, other)
    bad, reference_bad = _Bad(unit.columns), _Bad(unit.columns)
    noises, signals, powers = [], [], []
    equal, rounded = True, narrower
    decoder = model.decoder(unit) or reference.decoder(unit)
    smoothed = any(unit.names & side.opened.smoothed for side in (model, reference))
    scaling = _Scaling(unit, model, reference) if decoder is not None and smoothed else None
    for first, last in spans(unit):
        values, wanted = model.values(unit, first, last), reference.values(unit, first, last)
        equal = equal and _alike(unit, values, wanted)
        if rounded and mine is not None:
            expected = as_tensor(from_float32(np.ascontiguousarray(wanted.numpy()), mine), mine, wanted.shape)
            rounded = _alike(unit, values, expected.float())
        wanted = wanted if scaling is None else scaling(values, wanted)
        powers.append(_powers(values, bad, first))
        signals.append(_powers(wanted, reference_bad, first))
        noises.append(_powers(values - wanted))
    rows = torch.cat(signals), torch.cat(noises)
    signal, noise, power = float(rows[0].sum()), float(rows[1].sum()), float(torch.cat(powers).sum())
    details: dict[str, Any] = {"bad": bad.found, "reference_bad": reference_bad.found}
    baked = reference.bake and unit.parameter.role is Role.TEMPERATURE
    plain = mine is not None and other is not None
    error = sqrt(noise / signal) if signal > 0 else (0.0 if noise == 0 else float("inf"))
    if baked and (equal or error < 1e-6):  # exp may differ in its last bit between machines
        return Outcome(unit, "baked", **details)
    if equal and plain:
        return Outcome(unit, "equal" if mine == other else "widened", **details)
    status: Status = "quantized" if decoder is not None else "rounded" if rounded else "different"
    least = EXACT
    if decoder is not None:
        least = limit(decoder, any(unit.names & side.opened.learned for side in (model, reference)))
        _rows_off(rows[0], rows[1], least, off := _Bad(1))
        details |= {"rows_off": off.found, "scheme": decoder.label}
    return Outcome(unit, status, error, _decibel(signal, noise), least, zeros=power == 0 < signal, **details)


class _Scaling:
    """The reference with the factors that smoothing gave it, one for each channel between the two matrices of a pair.

    They are the ones that fit best by least squares: columns of down and output projections, rows of what comes before.
    """

    def __init__(self, unit: Unit, model: Side, reference: Side) -> None:
        self._columns: Tensor | None = None
        if unit.half == "down" or unit.parameter.local.endswith("o_proj.weight"):
            pairs = ((model.values(unit, *span), reference.values(unit, *span)) for span in spans(unit))
            sums = [torch.stack(_products(values, wanted, 0)) for values, wanted in pairs]
            self._columns = _factors(*torch.stack(sums).sum(0))

    def __call__(self, values: Tensor, wanted: Tensor) -> Tensor:
        """Rows of the reference as they should be in the model."""
        if self._columns is not None:
            return wanted * self._columns
        return wanted * _factors(*_products(values, wanted, 1))[:, None]


def _products(values: Tensor, wanted: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    mine, other = (torch.nan_to_num(t.double(), posinf=0.0, neginf=0.0) for t in (values, wanted))
    return (mine * other).sum(dim), other.square().sum(dim)


def _factors(products: Tensor, squares: Tensor) -> Tensor:
    """1 where the best would be none that smoothing gives: it turns no sign and empties nothing."""
    found = products / squares
    return torch.where((found > 1e-3) & (found < 1e3), found, 1.0).float()


def _dtype(side: Side, unit: Unit) -> str | None:
    stretch = side.full(unit)
    return None if stretch is None else stretch.tensor.dtype


def _alike(unit: Unit, first: Tensor, second: Tensor) -> bool:
    """Equal bits; balancing biases, which are only ever added, by value: there -0 is 0."""
    if unit.parameter.role is Role.BALANCING:
        return torch.equal(first, second)
    return torch.equal(first.contiguous().view(torch.int32), second.contiguous().view(torch.int32))


def _powers(values: Tensor, bad: _Bad | None = None, first: int = 0) -> Tensor:
    """Sum of squares of each row's finite values, float64 [rows]; counts the others in `bad`, from row `first` on."""
    norms = torch.linalg.vector_norm(values, dim=1).double()
    if not torch.isfinite(norms).all():
        if bad is not None:
            bad.values(values, first)
        values = torch.nan_to_num(values.double(), nan=0.0, posinf=0.0, neginf=0.0)
        norms = torch.linalg.vector_norm(values, dim=1)
    squares: Tensor = norms.square()
    return squares


def _rows_off(signal: Tensor, noise: Tensor, expected: Limit, found: _Bad) -> None:
    """Rows with an error near their own size. Rows much weaker than the others may vanish below a common scale."""
    worst = 10 ** (-min(6.0, expected.fail - 3) / 10)
    found.mask(((noise > worst * signal) & (signal > 1e-3 * signal.mean())).numpy(), 0)


def _decibel(signal: float, noise: float) -> float | None:
    """10 log10(signal / noise), None without noise; -300 where there is no signal, which JSON can hold."""
    if noise == 0:
        return None
    return max(-300.0, 10 * log10(signal / noise)) if signal > 0 else -300.0


class _Bad:
    """Counts numbers that are not finite over the row ranges of a unit."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.found: Bad | None = None

    def values(self, values: Tensor, first: int) -> None:
        """Count in float32 rows, the first of which is row `first`. A sum that is finite proves that all are."""
        if not torch.isfinite(values.sum()):
            self.mask((~torch.isfinite(values)).reshape(-1).numpy(), first)

    def mask(self, mask: Any, first: int) -> None:
        """Count in a flat mask of the rows from `first` on; None when all of them are finite."""
        if mask is None or not mask.any():
            return
        row, column = divmod(int(mask.argmax()), self._columns)
        known = self.found
        if known is None:
            self.found = Bad(int(mask.sum()), first + row, column)
        else:
            self.found = Bad(known.count + int(mask.sum()), known.row, known.column)
