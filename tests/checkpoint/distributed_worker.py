"""One of two processes that save a model together: `python -m tests.checkpoint.distributed_worker FOLDER RANK PORT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.megatron import trainer_state
from tests.synthetic import small


def main(folder: Path, rank: int, port: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in trainer_state(small(experts=4)).items():
        axis: int | None = 0
        if name.endswith(("linear_fc2.weight", "o_proj.weight")):
            axis = 1
        elif not tensor.dim() or name.endswith("norm.weight"):
            axis = None
        state[name] = distribute_tensor(tensor, mesh, [Replicate() if axis is None else Shard(axis)])
        state[f"optimizer.state.exp_avg.{name}"] = torch.zeros(1)
    save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
