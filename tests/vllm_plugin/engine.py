"""A checkpoint in vLLM and in the block-by-block engine, side by side."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.model.support import YARN, random_ids, random_tensors
from tests.synthetic import write_tensors
from zaya_tools.architecture import Architecture, native_config
from zaya_tools.model.model import ZayaModel
from zaya_tools.model.weights import Weights

BASE = Architecture(
    blocks=3, hidden_size=64, query_heads=4, kv_heads=2, head_dim=32, experts=5, expert_width=64, router_width=12,
    vocab_size=128, eos_token=1, dtype="float32", max_positions=512,
)  # fmt: skip
"""The smallest heads and widths that vLLM's CPU kernels take. The skip class is alive, see `random_tensors`."""


def geometry(**fields: Any) -> Architecture:
    return replace(BASE, **{"sliding": (), **fields})


GEOMETRIES = {
    "history 2": BASE,
    "history 5": geometry(time0=4, time1=3),
    "history 3, attention bias": geometry(time0=3, attention_bias=True),
    "no history": geometry(time0=1, time1=1),
    "sliding": geometry(sliding=(False, True, True), sliding_window=5),
    "all sliding, one kv head": geometry(sliding=(True,) * 3, sliding_window=7, kv_heads=1),
    "untied head with bias": geometry(tied=False, head_bias=True),
    "whole head turned, yarn": geometry(rotary_fraction=1.0, rope_scaling=YARN),
}


def drawn(seed: int) -> Architecture:
    """Any geometry that the CPU's kernels take."""
    pick = random.Random(seed)
    blocks, kv_heads = pick.randint(1, 4), pick.randint(1, 3)
    sliding = tuple(pick.random() < 0.5 for _ in range(blocks))
    return Architecture(
        blocks=blocks,
        hidden_size=32 * pick.randint(1, 4),
        query_heads=kv_heads * pick.randint(1, 3),
        kv_heads=kv_heads,
        head_dim=pick.choice([32, 64, 80]),
        experts=pick.randint(2, 9),
        expert_width=32 * pick.randint(1, 3),
        router_width=pick.randint(3, 20),
        vocab_size=pick.randint(20, 200),
        time0=pick.randint(1, 4),
        time1=pick.randint(1, 4),
        tied=pick.random() < 0.5,
        attention_bias=pick.random() < 0.5,
        head_bias=pick.random() < 0.5,
        norm_eps=pick.choice([1e-5, 1e-6]),
        rotary_fraction=pick.choice([0.25, 0.5, 1.0]),
        rope_theta=pick.choice([1e4, 5e6]),
        sliding=sliding,
        sliding_window=pick.randint(2, 30) if any(sliding) else None,
        max_positions=512,
        eos_token=1,
        dtype="float32",
    )


def write_random(folder: Path, architecture: Architecture) -> Path:
    write_tensors(folder, random_tensors(architecture), native_config(architecture))
    return folder


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Any]:
    """A vllm.LLM that is gone afterwards, also where it could not start."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    wanted: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256,
        "max_num_seqs": 4, "max_num_batched_tokens": 16, "enable_chunked_prefill": True,
        "enable_prefix_caching": False, "disable_log_stats": True,
    }  # fmt: skip
    llm = None
    try:
        llm = LLM(str(folder), **{**wanted, **settings})
        yield llm
    finally:
        llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def model_of(llm: Any) -> Any:
    (found,) = llm.apply_model(lambda model: model)
    return found


@dataclass(frozen=True)
class Answer:
    """What vLLM made of a prompt: its continuation, and nats of every token but the first, prompt and new ones."""

    prompt: list[int]
    generated: list[int]
    logprobs: Tensor
    cached: int

    def gap(self, model: ZayaModel) -> tuple[Tensor, bool]:
        """Differences to a model's log-probabilities, and whether its greedy continuation is the same."""
        ids = torch.tensor([self.prompt + self.generated])
        logs = model.logits(ids)[0].float().log_softmax(-1)
        own = logs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        greedy = logs[len(self.prompt) - 1 : -1].argmax(-1).tolist()
        return (own[-len(self.logprobs) :] - self.logprobs).abs(), greedy == self.generated


def ask(
    llm: Any, prompts: Sequence[list[int]], new_tokens: Sequence[int] | int = 6, *, score_prompts: bool = True
) -> list[Answer]:
    from vllm import SamplingParams

    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    params = [
        SamplingParams(max_tokens=count, temperature=0, prompt_logprobs=0 if score_prompts else None, logprobs=0,
                       detokenize=False, ignore_eos=True)
        for count in counts
    ]  # fmt: skip
    answers = []
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for ids, out in zip(prompts, outputs, strict=True):
        generated = list(out.outputs[0].token_ids)
        found = [entry[token].logprob for token, entry in zip(generated, out.outputs[0].logprobs, strict=True)]
        if score_prompts:
            found = [entry[t].logprob for t, entry in zip(ids[1:], out.prompt_logprobs[1:], strict=True)] + found
        answers.append(Answer(ids, generated, torch.tensor(found), out.num_cached_tokens or 0))
    return answers


def prompts_of(architecture: Architecture, *lengths: int) -> list[list[int]]:
    return [random_ids(architecture, length, seed=seed).tolist() for seed, length in enumerate(lengths)]


def streaming(folder: Path, dtype: torch.dtype = torch.float32) -> ZayaModel:
    weights = Weights.open(folder, dtype=dtype)
    return ZayaModel(weights.architecture, weights.ends().cast(), weights.resident())
