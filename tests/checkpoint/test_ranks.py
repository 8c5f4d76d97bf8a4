"""Ranks that are missing, doubled, mixed or cut in unknown ways, and arguments that do not fit the tensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.trained import FILE, A, ranks, refused, rewrite
from tests.megatron import (
    State,
    rank_state,
    save,
    tensor_rank,
    trainer_args,
    trainer_state,
    write_ranks,
)
from zaya_tools.checkpoint.inspection import inspect


def test_a_missing_rank(tmp_path: Path) -> None:
    place = ranks(tmp_path, ep=4)
    shutil.rmtree(place / "mp_rank_00_002")
    refused(r"1 of 4 ranks \(ep 4\) are missing: mp_rank_00_002", place)


def test_the_first_rank_is_missing(tmp_path: Path) -> None:
    place = ranks(tmp_path, ep=4)
    shutil.rmtree(place / "mp_rank_00_000")
    refused("missing: mp_rank_00_000", place)


def test_a_rank_too_many(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    shutil.copytree(place / "mp_rank_00_001", place / "mp_rank_00_002")
    refused("mp_rank_00_002 is no rank of this checkpoint", place)


def test_ranks_of_two_iterations(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    rewrite(place / "mp_rank_00_001" / FILE, lambda state: state.update(iteration=200))
    refused("mp_rank_00_000 is of iteration 100, mp_rank_00_001 of 200", place)


def test_ranks_of_two_runs(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    rewrite(place / "mp_rank_00_001" / FILE, lambda state: setattr(state["args"], "tensor_model_parallel_size", 2))
    refused("other parallel sizes", place)


def test_a_rank_that_was_copied_to_anothers_place(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    shutil.copy(place / "mp_rank_00_000" / FILE, place / "mp_rank_00_001" / FILE)
    refused("mp_rank_00_000 and mp_rank_00_001 hold the same experts", place)


def test_ranks_that_hold_all_experts(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    whole = rank_state(trainer_args(A, expert_model_parallel_size=2), 100, [trainer_state(A)], optimizer=False)
    for name in ("mp_rank_00_000", "mp_rank_00_001"):
        save(place / name / FILE, whole)
    refused("mp_rank_00_000 holds 4 experts of a half-layer, which does not fit 4 experts over 2 ranks", place)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    name = "decoder.layers.1.zaya_block.local_experts.0.linear_fc1.weight"
    other = name.replace("linear_fc1", "linear_fc2")
    rewrite(place / "mp_rank_00_001" / FILE, lambda state: [state["model"].pop(key) for key in (name, other)])
    refused("mp_rank_00_001: half-layer 1 has experts 1, expected 0 to 1", place)


def test_half_an_expert_that_is_missing(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    name = "decoder.layers.3.zaya_block.local_experts.1.linear_fc2.weight"
    rewrite(place / "mp_rank_00_001" / FILE, lambda state: state["model"].pop(name))
    refused(r"missing.*decoder\.layers\.3\.zaya_block\.local_experts\.3\.linear_fc2\.weight", place)


def test_a_half_layer_that_is_missing(tmp_path: Path) -> None:
    place = ranks(tmp_path, ep=1)

    def drop(state: dict[str, Any]) -> None:
        for key in [key for key in state["model"] if key.startswith("decoder.layers.2.")]:
            del state["model"][key]

    rewrite(place / "mp_rank_00" / FILE, drop)
    refused("mp_rank_00 has half-layers .* without a gap|are numbered from 0", place)


def test_what_ranks_share_has_to_be_the_same(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    name = "decoder.layers.0.self_attn.linear_q.weight"
    rewrite(place / "mp_rank_00_001" / FILE, lambda state: state["model"][name].view(-1)[3].add_(1))
    refused(f"{name} differs between mp_rank_00_000 and mp_rank_00_001", place)
    assert inspect(place).convertible, "weights are not read for a report"


def test_what_ranks_share_has_one_shape(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    name = "decoder.final_norm.weight"
    rewrite(place / "mp_rank_00_001" / FILE, lambda state: state["model"].update({name: torch.zeros(3)}))
    refused(f"{name} is BF16 .* in mp_rank_00_000, F32 .3. in mp_rank_00_001", place)


def test_no_arguments_in_several_ranks(tmp_path: Path) -> None:
    place = ranks(tmp_path)
    rewrite(place / "mp_rank_00_000" / FILE, lambda state: state.pop("args"))
    refused("not known which are pipeline stages", place)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hidden_size": 64}, "the run's config says hidden_size = 64, the tensors say 32"),
        ({"num_experts": 5}, "holds 4 experts of a half-layer, which does not fit 5 experts"),
        ({"num_layers": 2}, "the run's config says blocks = 1, the tensors say 2"),
        ({"moe_ffn_hidden_size": 64}, r"has shape \[64, 32\], expected \[128, 32\]"),
        ({"padded_vocab_size": 128}, "the run's config says vocab_size = 128, the tensors say 64"),
        ({"moe_router_topk": 2}, "routes to one expert"),
        ({"rotary_base": "x"}, "the saved arguments: rotary_base must be a number"),
        ({"norm_epsilon": 1e-6}, "the saved arguments contradict themselves about the norms' epsilon"),
        ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size"),
        ({"kv_channels": 8}, "head_dim"),
    ],
)
def test_arguments_are_checked_against_the_tensors(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    refused(message, ranks(tmp_path, ep=1, **args))


@pytest.mark.parametrize("stated", [{"moe_ffn_hidden_size": 32, "ffn_hidden_size": 999}, {"ffn_hidden_size": 32},
                                    {"ffn_hidden_size": 64}])  # fmt: skip
def test_an_experts_width_is_one_side_or_both(tmp_path: Path, stated: dict[str, int]) -> None:
    place = ranks(tmp_path, ep=1, **{"moe_ffn_hidden_size": None, **stated})
    assert inspect(place).architecture.expert_width == 32


@pytest.mark.parametrize(
    "heads", [{"num_attention_heads": 2}, {"num_attention_heads": 4, "cca_num_q_heads": [2, 0] * 2}]
)
def test_attention_heads_are_query_heads_unless_those_are_said(tmp_path: Path, heads: dict[str, Any]) -> None:
    place = ranks(tmp_path, ep=1, hidden_size=32, **heads)
    if "cca_num_q_heads" in heads:
        refused("num_attention_heads = 4, the tensors have 2 query heads", place)
    else:
        assert inspect(place).architecture.query_heads == 2


def test_tensor_parallel_cuts_that_are_not_known(tmp_path: Path) -> None:
    place = tmp_path / "iter_0000100"
    write_ranks(place, A, tp=2, optimizer=False)
    for rank in range(2):

        def cut(state: dict[str, Any]) -> None:
            name = "decoder.layers.0.self_attn.conv_qk.0.bias"
            state["model"][name] = state["model"][name].chunk(2)[rank].clone()  # noqa: B023

        rewrite(place / f"mp_rank_{rank:02d}" / FILE, cut)
    refused(r"conv_qk\.0\.bias", place)


def test_tensor_parallel_ranks_of_another_size(tmp_path: Path) -> None:
    place = tmp_path / "iter_0000100"
    write_ranks(place, A, tp=2, optimizer=False)
    name = "decoder.layers.0.self_attn.o_proj.weight"
    quarter: State = tensor_rank({name: torch.zeros(32, 32, dtype=torch.bfloat16)}, 4, 0)
    for rank in range(2):
        rewrite(place / f"mp_rank_{rank:02d}" / FILE, lambda state: state["model"].update(quarter))
    refused(r"o_proj\.weight has shape \[32, 8\] in each of 2 tensor-parallel ranks", place)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_file_that_is_cut_off(tmp_path: Path, place: float) -> None:
    folder = ranks(tmp_path, ep=1)
    file = folder / "mp_rank_00" / FILE
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * place)])
    refused("not a whole zip|not a file of torch.save", folder)
