"""A checkpoint that several processes saved, each its part of every tensor, as torch's own reader reads it."""

from __future__ import annotations

import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

from tests.checkpoint.support import ROOT
from tests.megatron import save, trainer_args, trainer_state
from tests.synthetic import same_bits, small, write_checkpoint
from zaya_tools.checkpoint.conversion import convert
from zaya_tools.checkpoint.distributed import open_distributed
from zaya_tools.checkpoint.source import read_bytes
from zaya_tools.layouts.raw import RAW

A = small(experts=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "iter_0000100"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.checkpoint.distributed_worker", str(place)]
    workers = [subprocess.Popen([*command, str(rank), port], cwd=ROOT) for rank in range(2)]
    assert [worker.wait(timeout=180) for worker in workers] == [0, 0]
    save(place / "common.pt", {"args": trainer_args(A), "iteration": 100})
    return place


def test_both_processes_hold_parts(folder: Path) -> None:
    tensors = open_distributed(folder, {}).tensors
    cut = [tensor for tensor in tensors.values() if tensor.chunks]
    assert {chunk.file.name for tensor in cut for chunk in tensor.chunks} == {"__0_0.distcp", "__1_0.distcp"}
    assert any(chunk.width < tensor.pitch for tensor in cut for chunk in tensor.chunks)
    assert len(cut) > len(tensors) / 2


def test_every_tensor_is_what_torch_reads(folder: Path) -> None:
    wanted = {name: torch.empty_like(tensor) for name, tensor in trainer_state(A).items()}
    load(wanted, checkpoint_id=folder, no_dist=True)
    found = open_distributed(folder, {}).tensors
    assert found.keys() == wanted.keys()
    for name, tensor in trainer_state(A).items():
        assert same_bits(wanted[name], tensor), name
        data = torch.from_numpy(read_bytes(found[name]))
        assert torch.equal(data, tensor.contiguous().view(-1).view(torch.uint8)), name


def test_the_shards_are_those_of_the_raw_export(folder: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw", RAW, A)
    convert(tmp_path / "raw", tmp_path / "expected")
    convert(folder, tmp_path / "out")
    for file in (tmp_path / "expected").glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_metadata_may_hold_the_plans_of_the_processes(folder: Path, tmp_path: Path) -> None:
    # Megatron keeps them there, to save the next iteration faster.
    shutil.copytree(folder, tmp_path / "iter_0000100")
    file = tmp_path / "iter_0000100" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    index = next(iter(metadata.storage_data))
    items = [WriteItem(index, WriteItemType.SHARD, tensor_data=None)]
    metadata.all_local_plans = [SavePlan(items, storage_data=_StoragePrefix("__0_"))]
    file.write_bytes(pickle.dumps(metadata))
    found = open_distributed(tmp_path / "iter_0000100", {}).tensors
    assert found.keys() == open_distributed(folder, {}).tensors.keys()
