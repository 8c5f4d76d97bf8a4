"""A matrix in, stored tensors and what was lost out: the one entry to quantization's arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, log10, sqrt

import torch
from torch import Tensor

from zaya_tools.errors import ZayaError
from zaya_tools.model.weights import TORCH
from zaya_tools.quantization import native
from zaya_tools.quantization.reference import quantize_rows
from zaya_tools.quantization.scheme import INFORMED, Kind, Observer, Scheme

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_NV_REACH = 448.0 * 6.0  # the largest e4m3 scale times the largest e2m1 number


@dataclass(frozen=True)
class Facts:
    """What quantization did to some elements. Facts of several stretches add up.

    `clipped` counts elements beyond the stored range, that is, further from their stored number than rounding
    explains.
    """

    squared_error: float = 0.0
    squared_norm: float = 0.0
    clipped: int = 0
    numel: int = 0

    def __add__(self, other: Facts) -> Facts:
        return Facts(
            self.squared_error + other.squared_error,
            self.squared_norm + other.squared_norm,
            self.clipped + other.clipped,
            self.numel + other.numel,
        )

    @property
    def relative_error(self) -> float:
        """Length of the error over the length of the weights; 0 for weights that are all zero."""
        return sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal over quantization noise in decibels; infinite without noise."""
        return -20 * log10(self.relative_error) if self.relative_error else inf

    @property
    def clipped_fraction(self) -> float:
        """Clipped elements over all elements."""
        return self.clipped / self.numel if self.numel else 0.0

    def as_dict(self) -> dict[str, float | None]:
        """The three figures for a record; `sqnr_db` is None without noise, as JSON has no infinity."""
        noise = self.sqnr_db
        return {
            "relative_error": self.relative_error,
            "sqnr_db": noise if isfinite(noise) else None,
            "clipped_fraction": self.clipped_fraction,
        }


@dataclass(frozen=True)
class Quantized:
    """A quantized stretch of rows.

    `tensors` has what `Scheme.stored` lists, by suffix, contiguous and on the weight's device, except `weight_shape`,
    which only the whole matrix knows, and what belongs to inputs. Where `finite` is False the weight holds NaN or
    infinity: the tensors and the facts mean nothing then.
    """

    tensors: dict[str, Tensor]
    facts: Facts
    finite: bool


def largest(values: Tensor) -> float:
    """The largest magnitude of a bfloat16, float16 or float32 tensor of any shape; NaN where it holds one.

    0 for a tensor without elements.
    """
    if not values.numel():
        return 0.0
    if native.usable(values):
        return native.largest(values)
    low, high = torch.aminmax(values)  # no copy, unlike abs; a NaN is both
    return max(abs(low.item()), abs(high.item()))


def global_scale(amax: float, dtype: torch.dtype) -> float:
    """The float32 scale that NVFP4 multiplies a matrix's group scales by: 448 * 6 / amax.

    Computed in the weight's dtype, reciprocal first, as compressed-tensors' `generate_gparam` does; 1 where there is
    no such number (all zero, or too small). Unlike there, float16's narrow range does not count as too small: the
    library gives 1 for every float16 matrix below 0.041, whose group scales then have few bits left.
    """
    reach = torch.tensor(max(amax, torch.finfo(dtype).tiny), dtype=dtype)
    result = (reach.reciprocal() * _NV_REACH).float().item()
    if not isfinite(result) and amax > 0:
        result = (_NV_REACH / torch.tensor(amax)).item()
    return result if isfinite(result) else 1.0


def quantize(
    weight: Tensor,
    scheme: Scheme,
    observer: Observer,
    *,
    amax: float | None = None,
    out: Mapping[str, Tensor] | None = None,
) -> Quantized:
    """Quantize `weight` [rows, columns] in bfloat16, float16 or float32, on any device.

    The rows may be any slab of a matrix that begins at a multiple of `scheme.rows`. Several threads may call this at
    once. A scale is rounded to its stored type before it divides the weights; scales are finite and positive.

    `minmax` gives, bit by bit, what compressed-tensors and llm-compressor give without calibration: scales computed
    in the weight's dtype, weight / scale rounded to that dtype and then to the stored type. That includes what they
    do at the ends of a dtype's range: a scale of zero (no magnitude, or one that underflows) becomes the dtype's
    machine epsilon, 0.125 for NVFP4's groups, and in float16 1 for MXFP4's; such weights all become zero. At the upper
    end -8 or -128 times a scale may be more than float32 holds. Not theirs: MXFP4 groups within an eighth of the
    dtype's largest number get its largest exponent; the library writes the code of NaN.

    `mse` searches for the scales with the smallest squared error and rounds weights once. No group, and so no tensor,
    has a larger squared error than with `minmax`.

    `amax` is the largest magnitude of all that shares a global scale (NVFP4); by default the weight's own. `out` has
    contiguous tensors to write to, by suffix, instead of new ones. ZayaError for a dtype or a width that the scheme
    cannot have, ValueError for tensors in `out` of another form.
    """
    if observer in INFORMED or not scheme.rows:
        raise ZayaError(f"{scheme.name} by {observer} is not known from the weight alone", "it needs a calibration")
    if weight.dtype not in _NAMES:
        raise ZayaError(f"weights of type {weight.dtype} cannot be quantized", "bfloat16, float16 or float32 can")
    rows, columns = weight.shape
    if not weight.numel():
        raise ZayaError(f"a matrix of {rows} x {columns} has nothing to quantize")
    if scheme.rows == 1 and scheme.columns and columns % scheme.columns:
        raise ZayaError(f"groups of {scheme.columns} do not divide {columns:,} columns")
    if scheme.packed and columns % 8:  # whole-row INT4: rows end with a packed word
        raise ZayaError(f"{columns:,} columns are no multiple of 8, which {scheme.name} packs in a word")
    weight = weight.contiguous()
    tensors = _tensors(weight, scheme, out or {})
    whole = None
    if scheme.kind is Kind.NVFP4:
        amax = largest(weight) if amax is None else amax
        if not isfinite(amax):
            return Quantized(tensors, Facts(numel=weight.numel()), finite=False)
        whole = tensors["weight_global_scale"].fill_(global_scale(amax, weight.dtype))
    codes = tensors["weight_packed" if scheme.packed else "weight"].view(torch.uint8)
    path = native.quantize_rows if native.usable(weight) else quantize_rows
    found = path(weight, scheme, mse=observer == "mse", whole=whole, codes=codes, scales=tensors["weight_scale"])
    if found is None:
        return Quantized(tensors, Facts(numel=weight.numel()), finite=False)
    return Quantized(tensors, Facts(*found, weight.numel()), finite=True)


def _tensors(weight: Tensor, scheme: Scheme, out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where to write, by suffix."""
    tensors = {}
    for stored in scheme.stored(weight.shape[0], weight.shape[1], _NAMES[weight.dtype]):
        if stored.suffix == "weight_shape" or stored.suffix.startswith("input_"):
            continue
        given = out.get(stored.suffix)
        if given is None:
            given = torch.empty(stored.shape, dtype=TORCH[stored.dtype], device=weight.device)
        form = (given.shape, given.dtype, given.device, given.is_contiguous())
        if form != (stored.shape, TORCH[stored.dtype], weight.device, True):
            raise ValueError(f"{stored.suffix} has to be {stored.dtype} {list(stored.shape)}, contiguous")
        tensors[stored.suffix] = given
    return tensors
