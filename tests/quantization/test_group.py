"""Several processes on one block, as torchrun starts them. On a CPU they talk through Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.checkpoint.support import tree
from tests.synthetic import same_bits
from zaya_tools import quantize
from zaya_tools.calibration.data import Choice
from zaya_tools.data import TINY
from zaya_tools.errors import ZayaError
from zaya_tools.quantization.calibrated import Calibration
from zaya_tools.quantization.group import ALONE, Group, joined, own_device
from zaya_tools.quantization.hessian import Hessians

PROGRAM = "zaya_tools"
ROOT = Path(__file__).parents[2]
OPTIONS = ["--recipe", "int4-gptq", "--data", "library", "--samples", "8", "--context", "64"]
GIVEN = Calibration(choice=Choice(data="library", samples=8, context=64))


def start(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a module or a script, with its arguments, in two processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=600, check=False)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize(("count", "size"), [(16, 4), (16, 3), (2, 8), (0, 2), (1, 1)])
def test_everything_is_shared_out_once_and_in_order(count: int, size: int) -> None:
    shares = [list(Group(rank, size).share(count)) for rank in range(size)]
    assert [number for share in shares for number in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_nothing_is_waited_for() -> None:
    with joined() as group:
        assert group == ALONE
        assert group.leads
        assert group.lead(lambda: 3) == 3
        assert group.collect("x") == ["x"]
        tensor = torch.ones(3)
        group.total(tensor)
        assert torch.equal(tensor, torch.ones(3))


def test_devices_are_not_shared() -> None:
    assert own_device("cpu", Group(1, 2)) == torch.device("cpu")
    with pytest.raises(ZayaError, match="cannot all work on cuda:1"):
        own_device("cuda:1", Group(1, 2))


def test_two_processes_make_the_checkpoint_that_one_makes(tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    torch.set_num_threads(1)
    # One sequence, which one process has: sums over two shares of the data would be rounded otherwise.
    options = ["--recipe", "int4-gptq", "--data", "library", "--samples", "1", "--context", "512"]
    done = start("-m", PROGRAM, "quantize", TINY, tmp_path / "two", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    given = Calibration(choice=Choice(data="library", samples=1, context=512))
    quantize(TINY, tmp_path / "one", "int4-gptq", calibration=given)
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    assert [name for name in one if not same_bits(one[name], two[name])] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("shared", [False, True])
def test_sums_of_two_processes_are_those_of_one(shared: bool) -> None:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    whole, first, second = (Hessians("x", 2, 6, torch.device("cpu")) for _ in range(3))
    for part, own in enumerate((rows[:30], rows[30:])):
        whole.add(part, own)
        first.add(part, own[:7])
        second.add(part, own[7:])
    others = iter([torch.tensor(second.tokens), second._sums])
    first.pool(lambda tensor: tensor.add_(next(others)))
    assert first.tokens == whole.tokens == [30, 10]
    torch.testing.assert_close(first.means(shared=shared), whole.means(shared=shared))


@pytest.mark.parametrize("fault", ["destination", "source", "option"])
def test_what_stops_one_process_is_said_once(fault: str, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("x")
    source = tmp_path / "nothing" if fault == "source" else TINY
    more = ["--device", "gpu"] if fault == "option" else []
    done = start("-m", PROGRAM, "quantize", source, tmp_path / "there", *OPTIONS, *more)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1


KILL = """
import os, signal, sys
import torch.distributed as dist
from tests.quantization.test_group import GIVEN
from zaya_tools import quantize
from zaya_tools.data import TINY

def report(stage):
    if stage.name == "quantizing" and stage.block == int(sys.argv[2]) and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

quantize(TINY, sys.argv[1], "int4-gptq", calibration=GIVEN, report=report, resume=sys.argv[2] == "-1")
os._exit(0)  # as the command does: torch aborts now and then while its threads are taken down
"""


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    script = tmp_path / "killed.py"
    script.write_text(KILL)
    for name, block in (("whole", "-1"), ("killed", "1"), ("killed", "-1")):
        done = start(script, tmp_path / name, block)
        assert (done.returncode == 0) == (block == "-1"), done.stderr
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")
