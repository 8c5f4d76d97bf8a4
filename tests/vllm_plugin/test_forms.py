"""Rounding by GPTQ changes numbers, not forms: what is tested in vLLM of one way to round holds for the others.

llm-compressor is needed to round so, and cannot be installed beside vLLM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.synthetic import read_tensors
from zaya_tools import quantize
from zaya_tools.calibration.data import Choice
from zaya_tools.data import TINY
from zaya_tools.quantization.calibrated import Calibration
from zaya_tools.quantization.scheme import GPTQ, IMATRIX

from .forms import write_mix

FEW = Calibration(choice=Choice(samples=4, context=64))
Form = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def form(folder: Path) -> tuple[Form, Any]:
    """What vLLM reads of a checkpoint but for the numbers."""
    tensors = {name: (t.dtype, tuple(t.shape)) for name, t in read_tensors(folder).items()}
    return tensors, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("mixed", [False, True], ids=["int4", "a mix by block"])
def test_gptq_writes_what_another_way_to_round_writes(tmp_path: Path, mixed: bool) -> None:
    pytest.importorskip("llmcompressor")
    written = []
    for observer in (GPTQ, IMATRIX):
        place = tmp_path / observer
        place.mkdir()
        quantize(TINY, place / "model", write_mix(place, observer) if mixed else f"int4-{observer}", calibration=FEW)
        written.append(place / "model")
    assert form(written[0]) == form(written[1])
    first, second = (read_tensors(folder) for folder in written)
    packed = [name for name in first if name.endswith("weight_packed")]
    # The numbers are others, or nothing was compared.
    assert len(packed) > 20
    assert not any(torch.equal(first[name], second[name]) for name in packed)
