"""The headers of a checkpoint as its tensors stream by, checked as `zaya validate` checks those of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zaya_tools.checkpoint.source import Source
from zaya_tools.errors import LayoutError
from zaya_tools.evaluation.opened import Opened
from zaya_tools.evaluation.quantized import form_faults
from zaya_tools.evaluation.stored import NAMES
from zaya_tools.layouts.match import match
from zaya_tools.tensors import TensorInfo

_NOWHERE = Path("checkpoint")
HINT = "`zaya inspect` and `zaya validate --checks structure` say what is wrong with it"


class Headers:
    """Names, dtypes and shapes of what was loaded, and the config that they belong to."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.tensors: dict[str, TensorInfo] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """Remember one tensor. LayoutError for a second one of the same name."""
        if name in self.tensors:
            raise LayoutError(f"{name} is stored twice", HINT)
        shape = tuple(tensor.shape)
        self.tensors[name] = TensorInfo(
            name, NAMES.get(tensor.dtype, str(tensor.dtype)), shape, _NOWHERE, 0, tensor.nbytes
        )

    def check(self) -> set[str]:
        """The suffixes of quantization tensors that are stored.

        LayoutError for a tensor that is missing, surplus or misshapen, and for quantized ones that are not what the
        config says of them.
        """
        opened = Opened(
            Source(_NOWHERE, self.config, self.tensors, ()), match(self.tensors, self.config, "the checkpoint")
        )
        if not opened.native:
            raise LayoutError(
                f"the checkpoint has the {opened.found.layout.name} layout, which vLLM cannot serve",
                "`zaya convert SRC DST` makes it native",
            )
        problems = [*opened.found.problems, *(finding.message for finding in form_faults(opened))]
        if problems:
            more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
            raise LayoutError(problems[0] + more, HINT)
        parts = (bound for bounds in opened.found.bound.values() for bound in bounds)
        return {suffix for bound in parts for suffix in bound.companions}
