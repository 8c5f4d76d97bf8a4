from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.synthetic import config_of, write_tensors
from zaya_tools.layouts.native import NATIVE
from zaya_tools.model import streaming
from zaya_tools.model.block import run_sequences
from zaya_tools.model.rotary import rotaries
from zaya_tools.model.streaming import Layer, States, stream
from zaya_tools.model.weights import Weights

from .support import BASE, GEOMETRIES, random_ids, random_tensors, write_deep

A = GEOMETRIES["sliding"]
SHAPE = (7, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tensors(path, random_tensors(A), config_of(NATIVE, A))
    return path


def ids() -> Tensor:
    return random_ids(A, *SHAPE)


def collected(layers: Iterator[Layer]) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """What each layer left, copied before the next one overwrites it."""
    return [(layer.index, layer.hidden.read(0, SHAPE[0]).clone(), layer.choice, layer.weight) for layer in layers]


def direct(folder: Path, dtype: torch.dtype = torch.float32) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """The same, all sequences at once and all blocks in memory."""
    weights = Weights.open(folder, dtype=dtype)
    ends = weights.ends()
    hidden, carried = ends.embed(ids()), None
    result = [(-1, hidden, torch.empty(SHAPE[0], 0, dtype=torch.int16), torch.empty(SHAPE[0], 0))]
    tables = rotaries(A, torch.arange(SHAPE[1]))
    for index, block in enumerate(weights.resident()):
        out = run_sequences(hidden, carried, block, tables[A.sliding[index]])
        hidden, carried = out.hidden, out.router_states
        result.append((index, hidden, out.routing.choice.short(), out.routing.weight))
    return result


@pytest.mark.parametrize("budget", [10**9, 0], ids=["in memory", "in a file"])
@pytest.mark.parametrize("tokens", [1, 12, 30, 10**6], ids=lambda tokens: f"{tokens} at a time")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_budget_nor_step_changes_a_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int, tokens: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(streaming, "TOKENS", tokens)
    weights = Weights.open(folder, dtype=dtype)
    found = collected(stream(weights, weights.ends(), ids(), budget=budget))
    expected = direct(folder, dtype)
    assert [layer[0] for layer in found] == [-1, 0, 1, 2]
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    for (_, hidden, choice, weight), (_, wanted, wanted_choice, wanted_weight) in zip(found, expected, strict=True):
        assert hidden.dtype == torch.float32
        assert choice.dtype == torch.int16
        if dtype == torch.float32:
            assert torch.equal(choice, wanted_choice)
            torch.testing.assert_close(weight, wanted_weight, atol=tolerance, rtol=tolerance)
        # In bfloat16, sums of another order round some token to another expert.
        assert (hidden - wanted).abs().amax(-1).median() <= tolerance


def test_memory_and_file_hold_the_same_bits(folder: Path) -> None:
    weights = Weights.open(folder)
    ends = weights.ends()
    exact = a_budget_of(weights)
    runs = [collected(stream(weights, ends, ids(), budget=budget)) for budget in (exact, exact - 1)]
    for memory, file in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(memory[1:], file[1:], strict=True))


def a_budget_of(weights: Weights) -> int:
    return SHAPE[0] * SHAPE[1] * (4 * A.hidden_size + weights.dtype.itemsize * A.router_width)


@pytest.mark.parametrize(("below", "in_memory"), [(0, True), (1, False)])
def test_the_budget_decides_where_states_are(folder: Path, below: int, in_memory: bool) -> None:
    weights = Weights.open(folder)
    first = next(iter(stream(weights, weights.ends(), ids(), budget=a_budget_of(weights) - below)))
    read = first.hidden.read(0, 2)
    again = first.hidden.read(0, 2)
    # In memory it is the same tensor, from a file another one.
    assert (read.data_ptr() == again.data_ptr()) == in_memory
    assert torch.equal(read, again)


def test_two_models_run_in_lockstep(folder: Path, tmp_path: Path) -> None:
    other = {n: t + 0.01 if n.endswith("down_proj") else t for n, t in random_tensors(A).items()}
    write_tensors(tmp_path, other, config_of(NATIVE, A))
    one, two = Weights.open(folder), Weights.open(tmp_path)
    apart = [collected(stream(weights, weights.ends(), ids())) for weights in (one, two)]
    pairs = zip(stream(one, one.ends(), ids(), budget=0), stream(two, two.ends(), ids()), strict=True)
    for index, (mine, theirs) in enumerate(pairs):
        assert mine.index == theirs.index == index - 1
        for layer, alone in ((mine, apart[0]), (theirs, apart[1])):
            assert torch.equal(layer.hidden.read(0, SHAPE[0]), alone[index][1])
            assert torch.equal(layer.choice, alone[index][2])
    assert not torch.equal(apart[0][-1][1], apart[1][-1][1])


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_read_and_written_by_ranges(in_memory: bool, dtype: torch.dtype) -> None:
    states = States((5, 3, 4), dtype, in_memory)
    values = torch.randn(5, 3, 4).to(dtype)
    states.write(2, values[2:])
    states.write(0, values[:2])
    assert torch.equal(states.read(0, 5), values)
    assert torch.equal(states.read(1, 4), values[1:4])
    states.write(3, values[:1].mT.contiguous().mT)  # of another order in memory
    assert torch.equal(states.read(3, 4), values[:1])
    assert torch.equal(states.read(4, 5), values[4:])


MEASURE = """
import sys
from pathlib import Path
import torch
from zaya_tools.model.streaming import stream
from zaya_tools.model.weights import Weights

torch.set_num_threads(1)

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

ids = torch.randint(0, 64, (8, 64), generator=torch.Generator().manual_seed(0))
for folder in sys.argv[1:]:
    weights = Weights.open(Path(folder))
    for layer in stream(weights, weights.ends(), ids, budget=0):
        pass
    print(peak())
"""


def test_peak_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    shallow = replace(BASE, hidden_size=256, experts=8, expert_width=512, vocab_size=64, dtype="bfloat16")
    folders = []
    for blocks in (3, 30):
        folders.append(write_deep(tmp_path / str(blocks), shallow, blocks))
    size = sum(file.stat().st_size for file in folders[-1].iterdir()) / 2**20
    assert size > 150
    command = [sys.executable, "-c", MEASURE, *map(str, folders)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    few, many = map(int, result.stdout.split())
    # Ten times the blocks, of 6 MB each as stored and 12 MB as they compute.
    assert many - few < 40
