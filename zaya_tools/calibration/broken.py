"""Why numbers are not finite: because the weights are not, or because a sound model overflows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zaya_tools.checkpoint.source import stretches
from zaya_tools.dtypes import SIZES, nonfinite
from zaya_tools.errors import NonFiniteError
from zaya_tools.layouts.match import Match
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import parameters


@contextmanager
def explaining(weights: Weights, block: int) -> Iterator[None]:
    """Let a NonFiniteError out of `block` say what it comes of; its weights are looked at only then."""
    try:
        yield
    except NonFiniteError as error:
        culprit = broken_weight(weights.found, block)
        if culprit is not None:
            raise NonFiniteError(
                f"{error.message}, since {culprit}",
                "the weights themselves are broken: copy the checkpoint again; `zaya validate` lists all that is wrong",
            ) from error
        if weights.dtype is not torch.float32:
            raise NonFiniteError(error.message, f"{error.hint}, or compute with --dtype float32") from error
        raise


def broken_weight(found: Match, block: int) -> str | None:
    """Which stored tensor of a block, or of the embedding before the first one, holds what is no number, and where."""
    for parameter in parameters(found.architecture):
        if parameter.block != block and not (block == 0 and parameter.block is None):
            continue
        for bound in found.bound[parameter.name]:
            if bound.tensor is None:
                continue
            for offset, data in stretches(bound.tensor):
                mask = nonfinite(data, bound.tensor.dtype)
                if mask is not None:
                    element = offset // SIZES[bound.tensor.dtype] + int(mask.argmax())
                    return f"{bound.tensor.name} is NaN or infinite at element {element:,}"
    return None
