from __future__ import annotations

import torch
from torch import Tensor

from zaya_tools.model.experts import DenseExperts, run_experts
from zaya_tools.model.router import Routing


def routing(choice: list[int]) -> Routing:
    return Routing(torch.tensor(choice), torch.linspace(0.1, 0.9, len(choice)))


def test_each_chosen_expert_runs_once_and_skipped_tokens_get_zero() -> None:
    calls = []

    def experts(expert: int, rows: Tensor) -> Tensor:
        calls.append((expert, len(rows)))
        return rows * (expert + 1)

    x = torch.randn(6, 4)
    chosen = routing([3, 1, 4, 1, 0, 4])
    out = run_experts(x, chosen, experts, 4)
    assert calls == [(0, 1), (1, 2), (3, 1)]
    assert not out[[2, 5]].any()
    factor = torch.tensor([4.0, 2, 0, 2, 1, 0]) * chosen.weight
    torch.testing.assert_close(out, x * factor[:, None])


def test_a_batch_that_skips_altogether() -> None:
    x = torch.full((2, 1, 3), torch.nan)
    skipped = Routing(torch.full((2, 1), 2), torch.ones(2, 1))
    assert torch.equal(run_experts(x, skipped, lambda _, rows: rows, 2), torch.zeros(2, 1, 3))


def test_weights_of_another_dtype_are_cast_in_use() -> None:
    experts = DenseExperts(torch.randn(2, 8, 3).bfloat16(), torch.randn(2, 3, 4).bfloat16())
    wide = DenseExperts(experts.gate_up.float(), experts.down.float())
    rows = torch.randn(5, 3)
    assert torch.equal(experts(1, rows), wide(1, rows))
