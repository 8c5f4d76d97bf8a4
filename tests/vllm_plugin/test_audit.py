"""Scales that cannot be, as a checkpoint's tensors stream by. The rest of the audit is tested by what vLLM refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.evaluation.support import UP, Edit, write_quantized
from tests.synthetic import LAYOUTS, read_tensors
from zaya_tools.errors import LayoutError
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.parameters import Role
from zaya_tools.vllm_plugin.audit import Headers, scale_fault

STACK = "model.layers.1.mlp.experts.gate_up_proj.weight_scale"


def audited(folder: Path) -> set[str]:
    headers = Headers(json.loads((folder / "config.json").read_text()))
    for name, tensor in read_tensors(folder).items():
        headers.note(name, tensor)
    return headers.check()


def spoil(name: str, index: int, value: float) -> Edit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        changed = tensors[name].clone()
        changed.view(-1)[index] = value
        tensors[name] = changed

    return edit


@pytest.mark.parametrize(
    ("preset", "suffix", "value", "kind"),
    [
        ("FP8_DYNAMIC", "weight_scale", float("nan"), "NaN or infinite"),
        ("FP8_DYNAMIC", "weight_scale", float("-inf"), "NaN or infinite"),
        ("W4A16", "weight_scale", 0.0, "zero or negative"),
        ("W8A8", "weight_scale", -1.0, "zero or negative"),
        ("FP8", "input_scale", 0.0, "zero or negative"),
        ("NVFP4", "weight_scale", float("nan"), "NaN or infinite"),
        ("NVFP4", "weight_global_scale", float("inf"), "NaN or infinite"),
        ("NVFP4", "input_global_scale", 0.0, "zero or negative"),
        ("MXFP4A16", "weight_scale", 255, "NaN or infinite"),
    ],
)
def test_a_scale_that_cannot_be(tmp_path: Path, preset: str, suffix: str, value: float, kind: str) -> None:
    folder = write_quantized(tmp_path / "good", preset, layout=NATIVE_PER_EXPERT)
    count = read_tensors(folder)[f"{UP}.{suffix}"].numel()
    assert suffix in audited(folder)
    broken = write_quantized(
        tmp_path / "bad", preset, layout=NATIVE_PER_EXPERT, edit=spoil(f"{UP}.{suffix}", -1, value)
    )
    with pytest.raises(LayoutError) as caught:
        audited(broken)
    assert caught.value.message == f"{UP}.{suffix} is not finite and positive: 1 of {count} {kind}"


def test_the_expert_of_a_stack_is_named(tmp_path: Path) -> None:
    # 64 rows of gate and 64 of up an expert.
    folder = write_quantized(
        tmp_path, "FP8_DYNAMIC", layout=LAYOUTS["native"], roles=(Role.EXPERT,), ignore=(r"re:^(?!.*experts).*$",),
        edit=spoil(STACK, 2 * 128 + 70, 0.0),
    )  # fmt: skip
    with pytest.raises(
        LayoutError, match=r"is not finite and positive \(expert 2\): 1 of 512 zero or negative"
    ) as caught:
        audited(folder)
    assert caught.value.message.startswith(STACK)


def test_exponents_are_no_numbers() -> None:
    assert scale_fault(torch.zeros(4, dtype=torch.uint8)) is None  # 2 ** -127
    assert scale_fault(torch.full((4, 2), 254, dtype=torch.uint8)) is None
    assert scale_fault(torch.tensor([[1, 255]], dtype=torch.uint8)) == ("1 of 2 NaN or infinite", [0, 1])
