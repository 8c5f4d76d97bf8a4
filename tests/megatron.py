"""Checkpoints as Megatron trainers save them, written with torch's own torch.save and torch.distributed.checkpoint.

Names and shards are made here by hand from the trainer's description, so that the package's own rules cannot hide.
"""

from __future__ import annotations

import argparse
import enum
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.synthetic import TORCH, logical, split
from zaya_tools.architecture import Architecture
from zaya_tools.layouts.raw import RAW

State = dict[str, Tensor]


def primus(name: str) -> str:
    """The trainer's name of a tensor of the raw layout."""
    if name == "model.embed_tokens.weight":
        return "embedding.word_embeddings.weight"
    if name.startswith("lm_head."):
        return name.replace("lm_head.", "output_layer.")
    name = name.replace("model.", "decoder.", 1)
    return name.replace(".self_attn.qkv.", ".self_attn.").replace(".experts.local_experts.", ".local_experts.")


def trainer_state(a: Architecture, *, seed: int = 0, dtype: str = "BF16") -> State:
    """The whole model as the trainer's state dict has it, with the buffers that only trainers keep."""
    raw = split(RAW, a, logical(a, seed=seed, dtype=dtype))
    state = {primus(name): tensor for name, tensor in raw.items()}
    for half in range(1, 2 * a.blocks, 2):
        router = f"decoder.layers.{half}.zaya_block.router."
        state[f"{router}balance_m"] = torch.full((a.experts + 1,), 0.25)
        state[f"{router}balance_v"] = torch.full((a.experts + 1,), 0.5)
        state[f"{router}balance_step"] = torch.tensor(7)
    state["decoder.layers.1.zaya_block.router.router_states_scale"] = torch.ones(a.router_width, dtype=TORCH[dtype])
    return state


class ModelType(enum.Enum):
    """Stands for `megatron.core.enums.ModelType`, which saved arguments hold an instance of."""

    encoder_or_decoder = 1


@contextmanager
def trainer_modules() -> Iterator[None]:
    """While this lasts, ModelType can be pickled as the trainer's own."""
    names = ("megatron", "megatron.core", "megatron.core.enums")
    modules = {name: types.ModuleType(name) for name in names}
    vars(modules[names[-1]])["ModelType"] = ModelType
    home = ModelType.__module__
    ModelType.__module__ = names[-1]
    sys.modules.update(modules)
    try:
        yield
    finally:
        ModelType.__module__ = home
        for name in names:
            del sys.modules[name]


def trainer_args(a: Architecture, **replaced: Any) -> argparse.Namespace:
    """The arguments of a run of this geometry, under Megatron's and Primus' names; `replaced` None leaves one out."""
    args: dict[str, Any] = {
        "num_layers": 2 * a.blocks,
        "hidden_size": a.hidden_size,
        "num_attention_heads": a.query_heads,
        "group_query_attention": True,
        "num_query_groups": a.kv_heads,
        "kv_channels": a.head_dim,
        "ffn_hidden_size": a.expert_width,
        "moe_ffn_hidden_size": a.expert_width,
        "num_experts": a.experts,
        "moe_router_topk": 1,
        "zaya_mlp_expansion": a.router_width,
        "zaya_use_mod": True,
        "zaya_use_eda": True,
        "zaya_high_prec": True,
        "scale_residual_merge": True,
        "clamp_temp": a.clamp_temp,
        "cca_time0": a.time0,
        "cca_time1": a.time1,
        "padded_vocab_size": a.vocab_size,
        "vocab_size": a.vocab_size - 3,
        "untie_embeddings_and_output_weights": not a.tied,
        "add_qkv_bias": a.attention_bias,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "norm_epsilon": a.norm_eps,
        "layernorm_epsilon": np.float64(a.norm_eps),
        "swiglu": True,
        "rotary_base": int(a.rope_theta),
        "rotary_percent": a.rotary_fraction,
        "partial_rotary_factor": a.rotary_fraction,
        "rotary_scaling_factor": 40.0,
        "position_embedding_type": "rope",
        "max_position_embeddings": np.int64(a.max_positions),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "params_dtype": torch.bfloat16,
        "model_type": ModelType.encoder_or_decoder,
        "save": Path("/runs/zaya1"),
        "rank": 0,
        "lr": 3e-4,
        "data_path": ["/data/a", "/data/b"],
        "seed": np.int32(1234),
    }
    if any(a.sliding):
        window = (a.sliding_window or 0) - 1
        args["swa_layers"] = [entry for slides in a.sliding for entry in (window if slides else 0, 0)]
        args["swa_rotary_base"] = a.sliding_rope_theta
    args |= replaced
    return argparse.Namespace(**{key: value for key, value in args.items() if value is not None})


def optimizer_state(model: Mapping[str, Tensor]) -> dict[str, Any]:
    """Adam's moments and the float32 masters of a model: 12 bytes a parameter."""
    wide = [tensor.float() for tensor in model.values()]
    state = {n: {"exp_avg": t.clone(), "exp_avg_sq": t.square(), "step": n} for n, t in enumerate(wide)}
    groups = [{"params": list(range(len(wide))), "lr": np.float64(3e-4), "betas": (0.9, 0.95)}]
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": [[torch.nn.Parameter(tensor) for tensor in wide]],
        "grad_scaler": None,
    }


def rank_state(args: argparse.Namespace, iteration: int, stages: list[State], optimizer: bool = True) -> dict[str, Any]:
    """What one rank saves: arguments, model, optimizer, scheduler and random state."""
    models: dict[str, Any] = {"model": OrderedDict(stages[0])}
    if len(stages) > 1:
        models = {f"model{number}": OrderedDict(stage) for number, stage in enumerate(stages)}
    everything = {f"{n}.{name}": tensor for n, stage in enumerate(stages) for name, tensor in stage.items()}
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 1e18,
        **models,
        **({"optimizer": optimizer_state(everything)} if optimizer else {}),
        "opt_param_scheduler": {"max_lr": 3e-4, "num_steps": np.int64(512)},
        "rng_state": [
            {
                "random_rng_state": (3, tuple(range(8)), None),
                "np_rng_state": np.random.RandomState(0).get_state(),
                "torch_rng_state": torch.get_rng_state()[:64].clone(),
                "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
            }
        ],
    }


def save(file: Path, state: Any) -> None:
    """torch.save, with the trainer's modules about."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with trainer_modules():
        torch.save(state, file)


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


def stages_of(state: State, halves: int, stages: int) -> list[State]:
    """The pipeline stages of a model, each with its half-layers numbered from 0."""
    bounds = [halves * n // stages for n in range(stages + 1)]
    result: list[State] = [{} for _ in range(stages)]
    for name, tensor in state.items():
        found = _LAYER.fullmatch(name)
        if not found:
            result[0 if name.startswith("embedding.") else -1][name] = tensor
            continue
        layer = int(found[1])
        stage = next(n for n in range(stages) if bounds[n] <= layer < bounds[n + 1])
        result[stage][f"decoder.layers.{layer - bounds[stage]}.{found[2]}"] = tensor
    return result


def expert_rank(state: State, experts: int, ranks: int, rank: int) -> State:
    """What one of `ranks` expert-parallel ranks holds: its experts numbered from 0, and all else."""
    each = experts // ranks
    result = {}
    for name, tensor in state.items():
        found = _EXPERT.fullmatch(name)
        if not found:
            result[name] = tensor
        elif int(found[2]) // each == rank:
            result[f"{found[1]}{int(found[2]) % each}{found[3]}"] = tensor
    return result


def tensor_rank(state: State, ranks: int, rank: int) -> State:
    """What one of `ranks` tensor-parallel ranks holds of the cuts that are usual; gate and up rows come in pairs."""
    result = {}
    for name, tensor in state.items():
        if name.endswith(("word_embeddings.weight", "output_layer.weight", "linear_q.weight", "linear_k.weight")):
            result[name] = tensor.chunk(ranks, 0)[rank].clone()
        elif name.endswith("linear_fc1.weight"):
            gate, up = tensor.chunk(2, 0)
            result[name] = torch.cat([gate.chunk(ranks, 0)[rank], up.chunk(ranks, 0)[rank]])
        elif name.endswith(("linear_fc2.weight", "o_proj.weight")):
            result[name] = tensor.chunk(ranks, 1)[rank].clone()
        else:
            result[name] = tensor
    return result


def write_ranks(
    folder: Path,
    a: Architecture,
    state: State | None = None,
    *,
    ep: int = 1,
    pp: int = 1,
    tp: int = 1,
    virtual: int = 1,
    iteration: int = 100,
    optimizer: bool = True,
    prefix: str = "",
    dtype: str = "BF16",
    **args: Any,
) -> State:
    """An iteration's folder in the torch format; returns the whole model's state dict."""
    whole = trainer_state(a, dtype=dtype) if state is None else state
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "expert_model_parallel_size": ep}
    chunks = stages_of(whole, 2 * a.blocks, pp * virtual)
    number = 0
    for t in range(tp):
        for p in range(pp):
            # Stages of a virtual pipeline go round the ranks: the first of every rank, then the second.
            own = [chunks[v * pp + p] for v in range(virtual)]
            for e in range(ep):
                parts = [tensor_rank(expert_rank(stage, a.experts, ep, e), tp, t) if tp > 1
                         else expert_rank(stage, a.experts, ep, e) for stage in own]  # fmt: skip
                parts = [{f"{prefix}{name}": tensor for name, tensor in part.items()} for part in parts]
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                held = trainer_args(a, **{**sizes, "rank": number, **args})
                save(folder / name / "model_optim_rng.pt", rank_state(held, iteration, parts, optimizer))
                number += 1
    return whole


def write_run(folder: Path, a: Architecture, *, iteration: int = 100, **options: Any) -> Path:
    """A run with one iteration in the torch format and its tracker file; the iteration's folder."""
    place = folder / f"iter_{iteration:07d}"
    write_ranks(place, a, iteration=iteration, **options)
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return place


def write_distributed(
    folder: Path, a: Architecture, state: State | None = None, *, iteration: int = 100, args: Any = None
) -> State:
    """An iteration in the torch_dist format, saved by torch.distributed.checkpoint in this process alone."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

    whole = trainer_state(a) if state is None else state
    optimizer = {f"optimizer.state.exp_avg.{name}": tensor.float() for name, tensor in whole.items()}
    extra = {"rng_state/shard_0_1": torch.zeros(16, dtype=torch.uint8)}
    save_distributed({**whole, **optimizer, **extra}, checkpoint_id=folder, no_dist=True)
    common = {"args": args or trainer_args(a), "checkpoint_version": 3.0, "iteration": iteration}
    save(folder / "common.pt", common)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return whole
