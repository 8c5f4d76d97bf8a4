"""The folder that a Megatron trainer loads: a tracker file, and one rank's file in the torch format."""

from __future__ import annotations

from dataclasses import replace

from zaya_tools.architecture import Architecture
from zaya_tools.checkpoint.plan import Plan
from zaya_tools.checkpoint.ranks import FILES
from zaya_tools.checkpoint.sidefiles import TRACKER
from zaya_tools.checkpoint.torchwriter import TorchShard, constant
from zaya_tools.layouts.megatron import trainer_state
from zaya_tools.layouts.megatron_config import arguments_of
from zaya_tools.parameters import Role

_RELEASE = "release"  # how Megatron calls weights without optimizer state: training begins at iteration 0


def as_run(plan: Plan, architecture: Architecture) -> Plan:
    """The plan with all tensors in one file of one rank, beside fresh state for what only a trainer keeps."""
    outputs = tuple(plan.outputs())
    router = next(output.dtype for output in outputs if output.role is Role.ROUTER)
    state = trainer_state(architecture)
    constants = tuple(constant(name, dtype or router, shape, value) for name, dtype, shape, value in state)
    file = f"{_RELEASE}/mp_rank_00/{FILES[0]}"
    return replace(plan, shards=(TorchShard(file, outputs, constants, arguments_of(architecture)),))


def is_run(plan: Plan) -> bool:
    """Whether a plan writes a run."""
    return any(isinstance(shard, TorchShard) for shard in plan.shards)


def run_files() -> dict[str, bytes]:
    """The small files of a run by name."""
    return {TRACKER: f"{_RELEASE}\n".encode()}
