from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.model.support import BASE, write_deep

MEASURE = """
import sys
from pathlib import Path
import torch
from zaya_tools import calibrate
from zaya_tools.calibration.data import Choice
from zaya_tools.calibration.run import Settings
from zaya_tools.data import TINY

torch.set_num_threads(1)

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

for number, folder in enumerate(sys.argv[2:]):
    settings = Settings(Choice(samples=8, context=64), tokenizer=str(TINY), budget=0)
    calibrate(folder, Path(sys.argv[1]) / str(number), settings)
    print(peak())
"""


def test_peak_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    shallow = replace(BASE, hidden_size=256, experts=8, expert_width=512, vocab_size=320, dtype="bfloat16")
    folders = []
    for blocks in (3, 24):
        folders.append(write_deep(tmp_path / str(blocks), shallow, blocks))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), *map(str, folders)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    few, many = map(int, result.stdout.split())
    # Eight times the blocks, of 6 MB each as stored and 12 MB as they compute; the statistics of one are 1 MB.
    assert many - few < 60
