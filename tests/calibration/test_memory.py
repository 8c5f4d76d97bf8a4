from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.model.support import BASE, write_deep

MEASURE = """
import sys
from pathlib import Path
import torch
from zaya_tools import calibrate, quantize
from zaya_tools.calibration.data import Choice
from zaya_tools.calibration.run import Settings
from zaya_tools.data import TINY
from zaya_tools.quantization.calibrated import Calibration

torch.set_num_threads(1)

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

choice = Choice(samples=8, context=64)
for number, folder in enumerate(sys.argv[3:]):
    out = Path(sys.argv[2]) / str(number)
    if sys.argv[1] == "calibrate":
        calibrate(folder, out, Settings(choice, tokenizer=str(TINY), budget=0))
    else:
        quantize(folder, out, sys.argv[1], calibration=Calibration(choice=choice, tokenizer=str(TINY), budget=0))
    print(peak())
"""


@pytest.mark.parametrize(("work", "deep"), [("calibrate", 24), ("int4-imatrix", 24), ("int4-gptq", 12)])
def test_peak_memory_does_not_grow_with_depth(work: str, deep: int, tmp_path: Path) -> None:
    if work == "int4-gptq":
        pytest.importorskip("llmcompressor")
    shallow = replace(BASE, hidden_size=256, head_dim=64, experts=8, expert_width=512, vocab_size=320, dtype="bfloat16")
    folders = []
    for blocks in (3, deep):
        folders.append(write_deep(tmp_path / str(blocks), shallow, blocks))
    command = [sys.executable, "-c", MEASURE, work, str(tmp_path), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    few, many = map(int, result.stdout.split())
    # A block is 6 MB as stored and 12 MB as it computes; the statistics of one are 1 MB.
    assert many - few < 6 * (deep - 3)
