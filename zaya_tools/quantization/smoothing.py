"""Magnitudes moved from one layer into the next, where nothing but a product stands between them.

ZAYA1 has two such pairs whose layers may be quantized: an expert's up projection before its down projection, and the
value projections before the output projection. A channel of the first is divided by s, the column of the second that
meets it is multiplied by s: the model computes the same. Norms are never touched, so nothing is moved through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.quantization.kernels import grouped, minmax, nearest
from zaya_tools.quantization.scheme import SMOOTH, Observer, Scheme

POWERS = tuple(step / 10 for step in range(11))
_REACH = 1e3


def strengths(
    weight: Tensor,
    hessian: Tensor,
    size: Tensor,
    scheme: Scheme,
    dtype: torch.dtype,
    observer: Observer,
    channels: Tensor,
) -> Tensor:
    """The factors s [columns] for a layer `weight` [rows, columns], of those tried the best.

    AWQ (arXiv 2306.00978) and SmoothQuant (arXiv 2211.10438) both take size(x)^a / size(w)^(1 - a) for a from 0 to 1,
    `size` [columns] being the channels' mean magnitude for the one and the largest for the other. The error is
    tr((W - Q) H (W - Q)^T), and for SmoothQuant also that of inputs rounded to 8 bits a token. Columns of the same
    number in `channels` int64 [columns] get one factor. All ones stays a candidate.
    """
    columns = weight.shape[1]
    best = torch.ones(columns, device=weight.device)
    least = _error(weight, hessian, best, scheme, dtype, size if observer == SMOOTH else None)
    tiny = torch.finfo(torch.float32).tiny
    seen = _common(size.float(), channels).clamp_min(tiny)
    heavy = _common(weight.float().abs().amax(0), channels).clamp_min(tiny)
    for power in POWERS:
        tried = seen**power / heavy ** (1 - power)
        tried = tried / tried.log().mean().exp()
        tried = tried.clamp(1 / _REACH, _REACH)
        error = _error(weight, hessian, tried, scheme, dtype, size if observer == SMOOTH else None)
        if error < least:
            best, least = tried, error
    return best


def value_channels(architecture: Architecture) -> Tensor:
    """Which channel of the values each column of the output projection meets: query heads of a group share theirs."""
    a = architecture
    heads = torch.arange(a.query_heads) // (a.query_heads // a.kv_heads)
    return (heads[:, None] * a.head_dim + torch.arange(a.head_dim)).flatten()


def _common(values: Tensor, channels: Tensor) -> Tensor:
    """The largest value among the columns of one channel, for each of them."""
    most = torch.zeros_like(values).scatter_reduce(0, channels, values, "amax")
    return most[channels]


def _error(
    weight: Tensor, hessian: Tensor, factors: Tensor, scheme: Scheme, dtype: torch.dtype, size: Tensor | None
) -> float:
    scaled = weight.float() * factors
    groups = grouped(scaled, scheme)
    scales = minmax(groups.abs().amax(-1).to(dtype), scheme, None)
    numbers = nearest(groups / scales.value[:, None], scheme.kind)
    gap = (scaled - (numbers * scales.value[:, None]).view(scaled.shape)) / factors
    error = ((gap @ hessian) * gap).sum()
    if size is not None:
        # A token is rounded in steps of its largest input over 127; half of the largest ever seen stands for that.
        step = (size / factors).max() / 2 / 127
        error = error + scaled.square().sum() * step**2 / 12
    return float(error)
