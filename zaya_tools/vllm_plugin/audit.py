"""The headers and scales of a checkpoint as its tensors stream by, checked as `zaya validate` checks a folder's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zaya_tools.checkpoint.source import Source
from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.opened import Opened
from zaya_tools.evaluation.quantized import form_faults
from zaya_tools.evaluation.scales import exponents
from zaya_tools.evaluation.stored import NAMES
from zaya_tools.layouts.base import COMPANIONS
from zaya_tools.layouts.match import match
from zaya_tools.layouts.native import NATIVE
from zaya_tools.tensors import TensorInfo

_NOWHERE = Path("checkpoint")
_SCALES = tuple(f".{suffix}" for suffix in COMPANIONS if suffix.endswith("scale"))
HINT = "`zaya inspect` and `zaya validate --checks structure` say what is wrong with it"


def scale_fault(scale: Tensor) -> tuple[str, list[int]] | None:
    """What is wrong with a tensor of scales, and where its first bad one is; None where all are finite and positive."""
    numbers = exponents(scale) if scale.dtype == torch.uint8 else scale.float()
    finite = numbers.isfinite()
    bad = ~(finite & (numbers > 0))
    if not bad.any():
        return None
    nonfinite = int((~finite).sum())
    kinds = ((nonfinite, "NaN or infinite"), (int(bad.sum()) - nonfinite, "zero or negative"))
    text = ", ".join(f"{count:,} of {scale.numel():,} {kind}" for count, kind in kinds if count)
    return text, bad.nonzero()[0].tolist()


class Headers:
    """Names, dtypes and shapes of what was loaded, the scales that cannot be, and the config that they belong to."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.tensors: dict[str, TensorInfo] = {}
        self.scales: dict[str, tuple[str, list[int]]] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """Remember one tensor. LayoutError for a second one of the same name."""
        if name in self.tensors:
            raise LayoutError(f"{name} is stored twice", HINT)
        shape = tuple(tensor.shape)
        self.tensors[name] = TensorInfo(
            name, NAMES.get(tensor.dtype, str(tensor.dtype)), shape, _NOWHERE, 0, tensor.nbytes
        )
        fault = scale_fault(tensor) if name.endswith(_SCALES) else None
        if fault:
            self.scales[name] = fault

    def check(self) -> set[str]:
        """The suffixes of quantization tensors that are stored.

        LayoutError for a tensor that is missing, surplus or misshapen, for quantized ones that are not what the
        config says of them, and for scales that are not finite and positive.
        """
        opened = Opened(
            Source(_NOWHERE, self.config, self.tensors, ()), match(self.tensors, self.config, "the checkpoint")
        )
        if not opened.native:
            raise LayoutError(
                f"the checkpoint has the {opened.found.layout.name} layout, which vLLM cannot serve",
                "`zaya convert SRC DST` makes it native",
            )
        problems = [
            *opened.found.problems,
            *(finding.message for finding in form_faults(opened)),
            *self._scale_problems(stacked=opened.found.layout is NATIVE),
        ]
        if problems:
            more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
            raise LayoutError(problems[0] + more, HINT)
        parts = (bound for bounds in opened.found.bound.values() for bound in bounds)
        return {suffix for bound in parts for suffix in bound.companions}

    def _scale_problems(self, *, stacked: bool) -> Iterator[str]:
        for name, (text, index) in self.scales.items():
            expert = f" (expert {index[0]})" if stacked and ".experts." in name else ""
            yield f"{name} is not finite and positive{expert}: {text}"
