"""Numbers about a raw checkpoint on disk, computed in float32 from the values that the file holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zaya_tools.architecture import Architecture, native_config
from zaya_tools.training.export import WEIGHTS, import_raw
from zaya_tools.training.tokenizer import BOS, byte_ids

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Measured:
    """Likelihood of a text and how its tokens were routed.

    `use` counts tokens, one row a block, one column a class: the experts, then skip.
    """

    tokens: int
    nats: float
    use: tuple[tuple[int, ...], ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a byte."""
        return math.exp(self.nats / self.tokens)

    def shares(self, block: int) -> list[float]:
        """Share of the tokens that each expert of a block got; skip is not among them."""
        return [count / sum(self.use[block]) for count in self.use[block][:-1]]

    @property
    def skipped(self) -> float:
        """Share of all routing choices that took the skip class."""
        return sum(row[-1] for row in self.use) / sum(map(sum, self.use))


def build_model(architecture: Architecture) -> Any:
    """A freshly initialised float32 `ZayaForCausalLM`.

    Matrices have a standard deviation of 0.05 and temperatures are 1; the router starts louder, because the balancing
    biases can only sort tokens whose probabilities differ by more than one nudge.
    """
    import torch
    from transformers import ZayaConfig, ZayaForCausalLM

    values = {**native_config(architecture), "initializer_range": 0.05, "dtype": "float32"}
    config = ZayaConfig(**values)
    # The plain loop over experts: the same sums in the same order on every machine.
    config._experts_implementation = "eager"
    model = ZayaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.qk_norm.temp.fill_(1.0)
            for matrix in (p for p in layer.mlp.gate.parameters() if p.ndim == 2):
                matrix.normal_(std=1.5 * matrix.shape[1] ** -0.5)
    return model


def load_model(folder: Path, architecture: Architecture) -> Any:
    """The raw checkpoint in `folder` as a float32 `ZayaForCausalLM` in evaluation mode."""
    from safetensors.torch import load_file

    state = import_raw(architecture, load_file(folder / WEIGHTS))
    if architecture.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = build_model(architecture)
    # Not `from_pretrained`: it would overwrite the skip class's balancing bias.
    model.load_state_dict(state, strict=True)
    return model.eval()


@contextmanager
def routing_counts(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside the context, entry i counts the choices of block i: int64 [experts + 1], skip last."""
    import torch

    layers: Any = model.get_submodule("model.layers")
    gates = [layer.mlp.gate for layer in layers]
    counts = [torch.zeros(gate.num_router_classes, dtype=torch.int64) for gate in gates]

    def hook(block: int) -> Any:
        def count(gate: Any, _: Any, output: tuple[Tensor, ...]) -> None:
            scores = torch.softmax(output[0].detach().float(), dim=-1) + gate.balancing_biases
            counts[block] += torch.bincount(scores.argmax(dim=-1), minlength=gate.num_router_classes)

        return count

    handles = [gate.register_forward_hook(hook(block)) for block, gate in enumerate(gates)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def measure(model: Any, text: str, context: int = 256, batch: int = 12) -> Measured:
    """Score every UTF-8 byte of `text` once: pieces of `context` bytes, each after `<bos>`.

    Raises ValueError for an empty text.
    """
    import torch
    from torch.nn.functional import cross_entropy

    ids = torch.tensor(byte_ids(text.encode()))
    if not len(ids):
        raise ValueError("no text to measure on")
    whole = len(ids) // context * context
    groups = list(torch.split(ids[:whole].view(-1, context), batch))
    groups += [ids[None, whole:]] if whole < len(ids) else []
    nats = 0.0
    with torch.inference_mode(), routing_counts(model) as counts:
        for targets in groups:
            inputs = torch.cat([torch.full((len(targets), 1), BOS), targets[:, :-1]], dim=1)
            logits = model(input_ids=inputs, use_cache=False).logits
            nats += float(cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum"))
    return Measured(len(ids), nats, tuple(tuple(row.tolist()) for row in counts))


def moved(initial: Mapping[str, Tensor], final: Mapping[str, Tensor]) -> dict[str, float]:
    """Name -> share of the elements that differ after both sides are rounded to bfloat16."""
    import torch

    return {
        name: float((final[name].to(torch.bfloat16) != initial[name].to(torch.bfloat16)).float().mean())
        for name in initial
    }
