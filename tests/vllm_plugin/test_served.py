"""Full-precision checkpoints: what vLLM computes with the plugin is what the block-by-block engine computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.support import random_ids, random_model
from zaya_tools.architecture import Architecture
from zaya_tools.evaluation.vllm_engine import serve
from zaya_tools.evaluation.windows import cut

from .engine import BASE, GEOMETRIES, Answer, ask, drawn, model_of, prompts_of, running, write_random

pytestmark = pytest.mark.vllm

LENGTHS = (1, 2, 3, 17, 40, 33, 1, 5, 60)
"""More prompts than requests that run at once, so that slots are used again, and longer than a step: they are fed in
chunks beside the decodes of others. Of 16 tokens a step, chunks end anywhere."""
NEW = tuple(3 + 2 * index for index in range(len(LENGTHS)))


def same(answers: list[Answer], architecture: Architecture) -> None:
    model = random_model(architecture)
    for answer in answers:
        gap, greedy = answer.gap(model)
        assert len(gap) > 0
        assert gap.max() < 1e-4
        assert greedy


@pytest.mark.parametrize("name", GEOMETRIES)
def test_batches_of_chunks_and_decodes(tmp_path: Path, name: str) -> None:
    architecture = GEOMETRIES[name]
    with running(write_random(tmp_path, architecture)) as llm:
        assert type(model_of(llm)).__module__ == "zaya_tools.vllm_plugin.model"
        same(ask(llm, prompts_of(architecture, *LENGTHS), NEW), architecture)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_geometries(tmp_path: Path, seed: int) -> None:
    architecture = drawn(seed)
    with running(write_random(tmp_path, architecture)) as llm:
        same(ask(llm, prompts_of(architecture, *LENGTHS), NEW), architecture)


def test_preempted_requests_start_again(tmp_path: Path) -> None:
    """Memory for two requests of four: what a preempted one left in its slot is not its state when it resumes."""
    settings: dict[str, Any] = {
        "num_gpu_blocks_override": 6, "max_num_batched_tokens": 256, "disable_log_stats": False,
    }  # fmt: skip
    with running(write_random(tmp_path, BASE), **settings) as llm:
        same(ask(llm, prompts_of(BASE, 50, 50, 50, 50), 150, score_prompts=False), BASE)
        (preemptions,) = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    assert preemptions > 0


@pytest.mark.parametrize("name", ["history 5", "sliding"])
def test_prefix_cache_hits(tmp_path: Path, name: str) -> None:
    architecture = GEOMETRIES[name]
    shared = random_ids(architecture, 300, seed=7).tolist()
    prompts = [[*shared, *tail] for tail in prompts_of(architecture, 1, 3, 20)]
    settings: dict[str, Any] = {"enable_prefix_caching": True, "max_model_len": 400, "max_num_batched_tokens": 64}
    with running(write_random(tmp_path, architecture), **settings) as llm:
        first = ask(llm, [shared], 4, score_prompts=False)
        again = ask(llm, prompts, 8, score_prompts=False)
    assert [answer.cached for answer in first] == [0]
    assert all(0 < answer.cached < 300 + 20 for answer in again)
    same([*first, *again], architecture)


def test_compiled(tmp_path: Path) -> None:
    architecture = GEOMETRIES["sliding"]
    with running(write_random(tmp_path, architecture), enforce_eager=False) as llm:
        same(ask(llm, prompts_of(architecture, *LENGTHS), NEW), architecture)


@pytest.mark.parametrize(
    "engine",
    [{}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}],
    ids=["two processes", "tensor parallel", "expert parallel"],
)
def test_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to ask the other process for its model's class
    ids = random_ids(BASE, 90, seed=5)
    windows, prompts = cut(ids.tolist(), 30), prompts_of(BASE, 1, 7, 20)
    served = serve(write_random(tmp_path, BASE), windows, prompts, 6, "float32", sys.executable, engine)
    assert served.model_class == "zaya_tools.vllm_plugin.model.ZayaForCausalLM"
    model = random_model(BASE)
    logs = model.logits(windows.ids).log_softmax(-1)[:, :-1].gather(-1, windows.ids[:, 1:, None])[..., 0]
    assert (torch.tensor([list(row) for row in served.logprobs]) - logs).abs().max() < 1e-4
    for prompt, made in zip(prompts, served.generated, strict=True):
        last = model.logits(torch.tensor([[*prompt, *made]]))[0, len(prompt) - 1 : -1]
        assert last.argmax(-1).tolist() == list(made)


def test_pipeline_parallelism_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(Exception, match="Pipeline parallelism is not supported"),
        running(write_random(tmp_path, BASE), pipeline_parallel_size=2),
    ):
        pass
