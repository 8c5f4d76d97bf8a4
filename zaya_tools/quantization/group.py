"""Processes that share the work on a block, as `torchrun` starts them: each has a device, and the first one writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zaya_tools.errors import ZayaError
from zaya_tools.model.device import choose_device

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""The first process measures and writes while the others wait; one that dies takes the others along anyway."""


@dataclass(frozen=True)
class Group:
    """This process's number and how many there are. All call the same methods in the same order."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of `count` things are this process's: stretches of nearly equal length, in the order of ranks."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives here, when it is through everywhere. A ZayaError in any process is raised in all."""
        if self.size == 1:
            return work()
        error: ZayaError | None = None
        result: T | None = None
        try:
            result = work()
        except ZayaError as found:
            error = found
        raised = next((found for found in self.collect(error) if found is not None), None)
        if raised is not None:
            raise raised
        return cast("T", result)

    def lead(self, work: Callable[[], T]) -> T:
        """What `work` gives in the first process, which alone does it."""
        mine = self.run(lambda: work() if self.leads else None)
        return cast("T", self.collect(mine)[0])

    def collect(self, value: T) -> list[T]:
        """Every process's value, which can be pickled, in the order of ranks."""
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return cast("list[T]", found)

    def total(self, tensor: Tensor) -> None:
        """Make a tensor, in its place, the sum of what it is in every process."""
        if self.size > 1:
            dist.all_reduce(tensor)


ALONE = Group()


@contextmanager
def joined() -> Iterator[Group]:
    """The group that this process was started in: by `torchrun`, or whatever has set torch.distributed up; else alone.

    GPUs talk through NCCL, everything else through Gloo. ZayaError where a process has no GPU of its own.
    """
    if not dist.is_available() or not (dist.is_initialized() or dist.is_torchelastic_launched()):
        yield ALONE
        return
    if dist.is_initialized():
        yield Group(dist.get_rank(), dist.get_world_size())
        return
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) != int(os.environ.get("WORLD_SIZE", "1")):
        raise ZayaError("the processes are on several machines", "start them on one: torchrun --nproc-per-node N")
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)
    try:
        group = Group(dist.get_rank(), dist.get_world_size())
        yield group
        group.collect(None)  # nobody takes down what another still talks through
    finally:
        dist.destroy_process_group()


def own_device(name: str, group: Group) -> torch.device:
    """The device of this process: the one that is asked for, and of several GPUs its own.

    ZayaError where several processes would have to share one.
    """
    if group.size == 1 or name == "cpu":
        return choose_device(name)
    if name not in ("auto", "cuda"):
        raise ZayaError(f"{group.size} processes cannot all work on {name}", "leave --device out: each takes its own")
    if choose_device(name).type == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", group.rank))
    if local >= torch.cuda.device_count():
        raise ZayaError(
            f"{group.size} processes were started and there are {torch.cuda.device_count()} GPUs",
            f"torchrun --nproc-per-node {torch.cuda.device_count()}",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
