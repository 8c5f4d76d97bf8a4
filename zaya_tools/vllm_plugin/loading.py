"""Checkpoint tensors into the model's parameters, each parameter exactly once.

vLLM's own loaders count what they were given, not what they filled: a scale that is missing, a group of the wrong size
or an expert left in 16 bits passes. Here every tensor has a place in the table of parameters, every place is filled
once, and the headers are checked against the quantization config before anything is served.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zaya_tools.errors import LayoutError, listing
from zaya_tools.layouts.native import NATIVE
from zaya_tools.vllm_plugin.audit import Headers
from zaya_tools.vllm_plugin.moe import DOWN, GATE, UP
from zaya_tools.vllm_plugin.weights import take

_EXPERT = re.compile(r"(model\.layers\.(\d+)\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(.+)")
_STACK = re.compile(r"(model\.layers\.(\d+)\.mlp\.experts)\.(gate_up|down)_proj(?:\.(.+))?")
_SHARDS = {"gate": GATE, "up": UP, "down": DOWN}
_MIXING = re.compile(r"(model\.layers\.\d+\.self_attn\.qkv_proj)\.(conv_qk_.+)")
_DELAYED_BIAS = ".self_attn.qkv_proj.v_proj_delayed.bias"
_TIED = ("lm_head.weight", "model.embed_tokens.weight")
# What vLLM keeps beside stored tensors: defaults of the key/value cache, and orders that static GPTQ does not have.
_OWN = re.compile(r"\.self_attn\.attn\.|_(weight_shape|weight_g_idx|g_idx_sort_indices|input_g_idx)$|\.weight_shape$")

Slot = tuple[str, str, int]
"""Parameter, matrix of an expert (or nothing) and expert (or -1)."""


class _Loading:
    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.filled: Counter[Slot] = Counter()
        self.problems: list[str] = []

    def put(self, slot: Slot, name: str, fill: Callable[[], object]) -> None:
        """Fill a slot and count it; what goes wrong is noted under the tensor's name."""
        try:
            fill()
        except (LayoutError, AssertionError, RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            self.problems.append(f"{name} does not fit: {reason}")
            return
        self.filled[slot] += 1

    def tensor(self, name: str, tensor: Tensor) -> None:
        expert, stack = _EXPERT.fullmatch(name), _STACK.fullmatch(name)
        mixing = _MIXING.fullmatch(name)
        if expert:
            prefix, _, number, matrix, suffix = expert.groups()
            self._expert(name, prefix, int(number), _SHARDS[matrix], suffix, tensor)
        elif stack:
            prefix, _, matrix, suffix = stack.groups()
            self._stack(name, prefix, matrix, suffix, tensor)
        elif mixing:
            module: Any = self.modules.get(mixing[1])
            known: list[bool] = []
            if module is not None:
                self.put((name, "", -1), name, lambda: known.append(module.load(mixing[2], tensor)))
            if module is None or known == [False]:
                self._no_place(name)
        else:
            self._dense(name, tensor)
            zero = name.replace("v_proj_delayed.bias", "delayed_zero")
            if name.endswith(_DELAYED_BIAS) and zero in self.parameters:
                self.put((zero, "", -1), name, lambda: take(self.parameters[zero], tensor))

    def _no_place(self, name: str) -> None:
        self.problems.append(f"{name} has no place in the model as its config describes it")

    def _dense(self, name: str, tensor: Tensor) -> None:
        parameter = self.parameters.get(name)
        if parameter is None:
            if not name.endswith(".weight_shape"):  # the shape is known, only some kernels ask for it
                self._no_place(name)
            return
        loader = getattr(parameter, "weight_loader", take)
        self.put((name, "", -1), name, lambda: loader(parameter, tensor))

    def _expert(self, name: str, prefix: str, expert: int, shard: str, suffix: str, tensor: Tensor) -> None:
        stem = "w2" if shard == DOWN else "w13"
        place = f"{prefix}.routed_experts.{stem}_{suffix}"
        parameter: Any = self.parameters.get(place)
        if parameter is None:
            if suffix != "weight_shape":
                self._no_place(name)
            return
        held: list[bool] = []
        # vLLM's loaders tell scales from weights by the parameter's name.
        self.put((place, shard, expert), name, lambda: held.append(parameter.weight_loader(
            parameter, tensor, f"{stem}_{suffix}", shard_id=shard, expert_id=expert, return_success=True)))  # fmt: skip
        if held == [False]:  # another rank's
            del self.filled[place, shard, expert]

    def _stack(self, name: str, prefix: str, matrix: str, suffix: str | None, tensor: Tensor) -> None:
        if suffix == "weight_shape":
            return
        layer: Any = self.modules.get(f"{prefix}.routed_experts")
        if layer is None:
            self._no_place(name)
            return
        experts = layer.global_num_experts
        if suffix is None:
            # Stacks of packed values keep the plain name.
            suffix = "weight_packed" if f"{prefix}.routed_experts.w13_weight_packed" in self.parameters else "weight"
        if tensor.shape[:1] != (experts,):
            self.problems.append(
                f"{name} has shape {list(tensor.shape)}, expected {experts} experts along the first axis"
            )
            return
        for expert, own in enumerate(tensor):
            if matrix == "down":
                self._expert(name, prefix, expert, DOWN, suffix, own)
                continue
            # One number for both halves, or one row of numbers for every row of both.
            halves = (own, own) if own.numel() == 1 else own.chunk(2) if own.shape[0] % 2 == 0 else (own,)
            if len(halves) != 2:
                self.problems.append(f"{name} has shape {list(tensor.shape)}, which has no gate and up halves")
                return
            for shard, half in zip((GATE, UP), halves, strict=True):
                self._expert(name, prefix, expert, shard, suffix, half)

    def expected(self, stored: set[str]) -> Iterator[Slot]:
        """Every slot that has to be filled; `stored` are the suffixes of quantized matrices in the checkpoint."""
        for name, parameter in self.parameters.items():
            module, _, local = name.rpartition(".")
            layer: Any = self.modules[module]
            if _OWN.search(name):
                continue
            if module.endswith(".experts.routed_experts"):
                stem, _, suffix = local.partition("_")
                if suffix in stored or suffix in ("weight", "weight_packed"):
                    for expert in range(layer.global_num_experts):
                        if layer._map_global_expert_id_to_local_expert_id(expert) >= 0:
                            yield from ((name, shard, expert) for shard in ((DOWN,) if stem == "w2" else (GATE, UP)))
            elif local == "delayed_zero":
                if self.parameters.get(f"{module}.v_proj_delayed.bias") is not None:
                    yield (name, "", -1)
            elif module.endswith(".qkv_proj") and parameter is not None:
                yield from self._convolution(module, local)
            elif local in ("weight", "weight_packed", "bias") or local in stored or not _is_quantity(local):
                yield (name, "", -1)

    def _convolution(self, module: str, local: str) -> Iterator[Slot]:
        kind, _, bias = local.partition("_")
        yield (f"{module}.conv_qk_{kind}.{bias or 'weight'}", "", -1)


def _is_quantity(local: str) -> bool:
    return local.startswith(("weight_", "input_", "output_"))


def load(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Fill a `ZayaForCausalLM` from (name, tensor) pairs; returns the names of all its parameters.

    LayoutError naming what is missing, surplus, stored twice or of the wrong form.
    """
    loading = _Loading(model)
    headers = Headers(model.config.to_dict())  # type: ignore[union-attr, operator]
    tied, stated = bool(model.architecture.tied), bool(model.stated_tied)  # type: ignore[union-attr]
    kept: dict[str, Tensor] = {}
    for stored, tensor in weights:
        name = NATIVE.canonical(stored)
        headers.note(stored, tensor)
        if NATIVE.unused(name):
            continue
        if stated and name in _TIED:
            kept[name] = tensor
        if tied and name == "lm_head.weight":
            continue
        loading.tensor(name, tensor)
    # The headers know better than the loaders what is wrong, so they speak first.
    suffixes = headers.check()
    if len(kept) == 2 and not torch.equal(*kept.values()):
        loading.problems.append("lm_head.weight is stored, differs from the embedding, and the config ties them")
    slots = set(loading.expected(suffixes))
    missing = sorted({slot[0] for slot in slots if not loading.filled[slot]})
    twice = sorted({slot[0] for slot, count in loading.filled.items() if count > 1})
    if missing:
        loading.problems.append(f"{len(missing)} parameters were not filled: {listing(missing)}")
    if twice:
        loading.problems.append(f"{len(twice)} parameters were filled twice: {listing(twice)}")
    if loading.problems:
        first, *rest = loading.problems
        more = f" (and {len(rest)} more problems)" if rest else ""
        raise LayoutError(first + more, "`zaya validate --checks structure` lists everything that is wrong with it")
    return set(loading.parameters)
