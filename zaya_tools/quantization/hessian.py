"""Second moments of a layer's inputs as matrices: gathered in full, or brought back from a calibration's sketch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zaya_tools.calibration.moments import OVERFLOW, Moments, directions
from zaya_tools.errors import NonFiniteError

PRIOR = 2.0
"""Tokens for each channel that common statistics count for beside an expert's own: what few tokens show of how
channels go together is mostly chance."""


def sketched(moments: Moments, *, shared: bool, device: torch.device | str = "cpu") -> Tensor:
    """H [parts, width, width], float32, of every part: the strong directions from the sketch, the rest as a diagonal.

    With `shared` all parts see the same kind of input (gate and up of the experts do): those that few tokens reached
    lean on the others. Without, they lean on channels that have nothing to do with one another. Parts without tokens
    have only that, all channels alike.
    """
    width = moments.second_moment.shape[-1]
    tokens = moments.tokens.double()
    held, sketch = moments.second_moment.double(), moments.sketch.double()
    total = tokens.sum().clamp_min(1)
    signs = directions(width).double()
    if shared:
        common = (tokens[:, None] * held).sum(0) / total
        common_sketch = (tokens[:, None, None] * sketch).sum(0) / total
    else:
        common = torch.where(tokens[:, None] > 0, held, 1.0)
        common_sketch = common[:, :, None] * signs
    # Only experts can starve: a layer that all tokens pass needs nothing to lean on.
    prior = PRIOR * width if len(tokens) > 1 else 0.0
    share = (tokens / (tokens + prior).clamp_min(1))[:, None]
    diagonal = share * held + (1 - share) * common
    mixed = share[:, :, None] * sketch + (1 - share)[:, :, None] * common_sketch
    return _nystrom(diagonal.to(device), mixed.to(device), signs.to(device))


def _nystrom(diagonal: Tensor, sketch: Tensor, signs: Tensor) -> Tensor:
    """H [..., n, n] from Y = H S: Y (S^T Y)^-1 Y^T (Nystroem), and what of the diagonal it leaves out."""
    core = signs.T @ sketch
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    largest = values.amax(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    kept = values > 1e-7 * largest
    factors = torch.where(kept, values.clamp_min(1e-300).rsqrt(), 0.0)
    low = sketch @ (vectors * factors[..., None, :])
    # A sketch may take a channel for stronger than it is: its length is known, so it is cut to that.
    length = low.square().sum(-1)
    excess = (diagonal / length.clamp_min(torch.finfo(length.dtype).tiny)).clamp(max=1.0).sqrt()
    low = (low * excess[..., None]).float()
    found = low @ low.mT
    torch.diagonal(found, dim1=-2, dim2=-1).clamp_(min=diagonal.float())
    return torch.as_tensor(found)


class Hessians:
    """Sums of x x^T [parts, width, width] while tokens come in, for one site of one block."""

    def __init__(self, name: str, parts: int, width: int, device: torch.device) -> None:
        self.name = name
        self.tokens = [0] * parts
        self._sums = torch.zeros(parts, width, width, device=device)

    def add(self, part: int, rows: Tensor) -> None:
        """Take inputs [rows, width]; NonFiniteError where one is NaN or infinite."""
        values = rows.float()
        self._sums[part].addmm_(values.T, values)
        self.tokens[part] += len(rows)
        if not bool(torch.diagonal(self._sums[part]).sum().isfinite()):
            which = f", expert {part}" if len(self.tokens) > 1 else ""
            raise NonFiniteError(f"{self.name}{which}: activations are NaN or infinite", OVERFLOW)

    def pool(self, total: Callable[[Tensor], object]) -> None:
        """Add what other processes have seen: `total` turns a tensor into its sum over all of them."""
        tokens = torch.tensor(self.tokens, device=self._sums.device)
        total(tokens)
        total(self._sums)
        self.tokens = tokens.tolist()

    def means(self, *, shared: bool) -> Tensor:
        """The mean of x x^T of every part, leaning like `sketched` on all tokens, or on channels apart.

        In the place of the sums, which are large: nothing can be added any more.
        """
        sums, parts = self._sums, len(self.tokens)
        count = torch.tensor(self.tokens, dtype=torch.float32, device=sums.device)[:, None, None]
        if parts == 1:
            return sums.div_(count.clamp_min(1))
        prior = PRIOR * sums.shape[-1]
        if shared:
            sums.add_(sums.sum(0).div_(count.sum().clamp_min(1)), alpha=prior)
        else:
            diagonal = torch.diagonal(sums, dim1=-2, dim2=-1)
            own = diagonal / count[:, :, 0].clamp_min(1)
            diagonal.add_(torch.where(count[:, :, 0] > 0, own, 1.0), alpha=prior)
        return sums.div_(count + prior)
