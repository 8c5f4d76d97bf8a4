"""One block on its way to fewer bits: its sites are gone through in the order in which data pass them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.observing import Sites, sites
from zaya_tools.errors import ZayaError
from zaya_tools.layouts.base import Part
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.model.block import Block
from zaya_tools.model.loading import build_block
from zaya_tools.model.streaming import Stream
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import Parameter
from zaya_tools.quantization.fit import Task, fit, restored
from zaya_tools.quantization.group import Group
from zaya_tools.quantization.hessian import sketched
from zaya_tools.quantization.inputs import gather
from zaya_tools.quantization.quantize import Quantized
from zaya_tools.quantization.resolve import Decision
from zaya_tools.quantization.scheme import AWQ, GPTQ, INFORMED, SMOOTH, Activations, Scheme
from zaya_tools.quantization.smoothing import strengths, value_channels
from zaya_tools.tensors import TensorInfo

_BELIEVABLE = (1e-6, 1e7)
"""Largest inputs of a layer beyond which something is wrong with the model or the text."""

_REACH = {Activations.TENSOR: 448.0, Activations.LOCAL: 448.0 * 6.0}


class BlockWork:
    """The work on block `index`: `run` or `recall`, then `pass_on`.

    Where data run along (`states`), `tensors` become what the stored ones mean, in the compute dtype.
    """

    def __init__(
        self, weights: Weights, index: int, decisions: Mapping[str, Decision], moments: Mapping[str, Moments],
        states: Stream | None, group: Group,
    ) -> None:  # fmt: skip
        self.index, self.group = index, group
        self._weights, self._moments, self._states = weights, moments, states
        self._a: Architecture = weights.architecture
        self._decisions = decisions
        self._sites: Sites = sites(self._a, index)
        self._sources: dict[str, dict[str, Any]] = {}
        self.tensors = weights.dense(index, self._note)
        self._dtypes = {local: tensor.dtype for local, tensor in self.tensors.items()}
        self._factors: dict[str, Tensor] = {}
        self._moved: set[str] = set()

    def _note(self, parameter: Parameter, source: TensorInfo, data: memoryview) -> None:
        """Keep the digest of what a matrix is made of: the manifest says it of every byte of the source."""
        decision = self._decisions.get(parameter.name)
        if decision is not None and decision.scheme is not None:
            self._sources[source.name] = {"nbytes": source.nbytes, "blake3": blake3(data).hexdigest()}

    def run(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Stored tensors by name, and what is to be known of them: facts by the name of the weight, and sources."""
        self.smooth()
        stored: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        for number in range(len(self._sites)):
            for parameter, made in self._site(number):
                for part, one in zip(NATIVE_PER_EXPERT.parts(parameter, self._a), made, strict=True):
                    stored |= {_stored_name(part, suffix): _alone(tensor) for suffix, tensor in one.tensors.items()}
                    facts[part.name] = {
                        "lost": asdict(one.facts),
                        "smoothed": self._is_smoothed(parameter, part.name),
                        "learned": self._decisions[parameter.name].observer in INFORMED,
                    }
        return stored, {"facts": facts, "sources": self._sources}

    def recall(self, stored: Mapping[str, Tensor]) -> None:
        """Make the block what an earlier run stored."""
        for parameter, decision in self._chosen(range(len(self._sites))):
            task = self._task(parameter, decision)
            entries = [entry.suffix for entry in task.scheme.stored(*self._shape(task), "BF16")]
            each = [
                {suffix: stored[_stored_name(part, suffix)].to(task.weight.device) for suffix in entries}
                for part in NATIVE_PER_EXPERT.parts(parameter, self._a)
            ]
            self._replace(parameter, task, each)

    def pass_on(self) -> None:
        """Let the data, where they run along, pass the block as it is now."""
        states = self._states
        if states is not None:
            self.group.run(lambda: states.run(self.index, self.block()))

    def _chosen(self, numbers: Iterable[int]) -> list[tuple[Parameter, Decision]]:
        every = [(p, self._decisions[p.name]) for number in numbers for p in self._sites[number]]
        return [(parameter, decision) for parameter, decision in every if decision.scheme is not None]

    def _task(self, parameter: Parameter, decision: Decision) -> Task:
        """All matrices of a parameter."""
        assert decision.scheme is not None
        assert decision.observer is not None
        weight = self.tensors[parameter.local]
        stacked = weight if weight.ndim == 3 else weight[None]
        parts = len(NATIVE_PER_EXPERT.parts(parameter, self._a)) // len(stacked)
        dtype = self._dtypes[parameter.local]
        first = 0 if weight.ndim == 3 else None
        return Task(parameter.name, stacked, parts, decision.scheme, decision.observer, dtype, first)

    @staticmethod
    def _shape(task: Task) -> tuple[int, int]:
        return task.weight.shape[1] // task.parts, task.weight.shape[2]

    def _site(self, number: int) -> list[tuple[Parameter, list[Quantized]]]:
        """What became of the matrices that share a site's inputs."""
        chosen = self._chosen([number])
        hessians = self._hessians(number, [decision for _, decision in chosen])
        tasks = [self._task(parameter, decision) for parameter, decision in chosen]
        made = self._fit(tasks, hessians)
        del hessians  # as large as many matrices, and not needed while those grow
        for (parameter, _), task, parts in zip(chosen, tasks, made, strict=True):
            each = len(parts) // len(task.weight)
            for place, one in enumerate(parts):
                if any(entry.suffix == "weight_shape" for entry in task.scheme.stored(*self._shape(task), "BF16")):
                    one.tensors["weight_shape"] = torch.tensor(self._shape(task))
                if task.scheme.activations.calibrated:
                    one.tensors.update(self._input_scale(parameter, task.scheme, place // each))
            if self._states is not None:  # what comes after sees what was stored
                self._replace(parameter, task, [one.tensors for one in parts])
        return [(parameter, parts) for (parameter, _), parts in zip(chosen, made, strict=True)]

    def _fit(self, tasks: list[Task], hessians: Tensor | None) -> list[list[Quantized]]:
        """The parts of every task's matrices. Stacks are shared out; single matrices go to the processes in turn."""
        group = self.group

        def mine() -> list[list[Quantized]]:
            found = []
            for place, task in enumerate(tasks):
                count = len(task.weight)
                own = group.share(count) if count > 1 else range(int(place % group.size == group.rank))
                some = slice(own.start, own.stop)
                expert = None if task.expert is None else own.start
                part = replace(task, weight=task.weight[some], expert=expert)
                found.append(fit(part, None if hessians is None else hessians[some]) if own else [])
            return found

        made = group.run(mine)
        if group.size == 1:
            return made
        every = group.collect([[_moved(one, torch.device("cpu")) for one in parts] for parts in made])
        device = self._weights.device
        return [[_moved(one, device) for held in every for one in held[place]] for place in range(len(tasks))]

    def _replace(self, parameter: Parameter, task: Task, stored: Sequence[Mapping[str, Tensor]]) -> None:
        # The compute dtype is what the block would cast to in any case.
        shape = self.tensors[parameter.local].shape
        self.tensors[parameter.local] = restored(task, stored, self._weights.dtype).view(shape)

    def block(self) -> Block:
        """The block as its tensors are now; experts are cast one by one in use, which saves a second copy of them."""
        place = self._weights
        return build_block(
            self._a, self.index, self.tensors, dtype=place.dtype, device=place.device, cast_experts=False
        )

    def _hessians(self, number: int, decisions: list[Decision]) -> Tensor | None:
        site = self._sites[number]
        observers = {decision.observer for decision in decisions}
        shared = number != 3
        if GPTQ in observers:
            assert self._states is not None
            states, block = self._states, self.block()
            sums = self.group.run(lambda: gather(states, self.index, block, self._sites, number))
            sums.pool(self.group.total)
            return sums.means(shared=shared)
        if not observers & set(INFORMED):
            return None
        found = sketched(self._known(site[0]), shared=shared, device=self._weights.device)
        factors = self._factors.get(site[0].name)
        return found if factors is None else found / (factors[:, :, None] * factors[:, None, :])

    def _known(self, parameter: Parameter) -> Moments:
        if parameter.name not in self._moments:
            raise ZayaError(f"nothing is known of the inputs of {parameter.name}", "give --stats or --data")
        return self._moments[parameter.name]

    def _input_scale(self, parameter: Parameter, scheme: Scheme, part: int) -> dict[str, Tensor]:
        """The number that static activations are divided by.

        An expert that saw nothing but zeros, or no token at all, has that of its block, and a block of which all that
        is true has 1: numbers with an exponent are as fine there as elsewhere.
        """
        held = self._known(parameter)
        amax = held.amax if self._factors.get(parameter.name) is None else (
            held.channel_amax / self._factors[parameter.name].cpu()
        ).amax(-1)  # fmt: skip
        largest = float(amax[part]) or float(amax.max()) or _REACH[scheme.activations]
        if not _BELIEVABLE[0] < largest < _BELIEVABLE[1]:
            which = f", expert {part}" if len(held.tokens) > 1 else ""
            raise ZayaError(
                f"{parameter.name}{which}: inputs up to {largest:.3g} cannot be those of a sound model",
                "check the source with `zaya validate`, and the text that it was calibrated on",
            )
        if scheme.activations is Activations.TENSOR:
            scale = torch.tensor([largest / _REACH[scheme.activations]]).to(self._dtypes[parameter.local])
            return {"input_scale": scale.clamp_min(torch.finfo(scale.dtype).tiny)}
        return {"input_global_scale": torch.tensor([_REACH[scheme.activations] / largest])}

    def smooth(self) -> None:
        """Move magnitudes within the pairs of which both sides are quantized by a rule that asks for it."""
        projections, (output,), (gate_up,), (down,) = self._sites
        if self._asks(gate_up, down):
            self._smooth_experts(gate_up, down)
        values = [p for p in projections if ".v_proj" in p.local]
        if not self._a.attention_bias and self._asks(*values, output):
            self._smooth_values(values, output)

    def _asks(self, *pair: Parameter) -> bool:
        decided = [self._decisions[p.name] for p in pair]
        return decided[-1].observer in (AWQ, SMOOTH) and all(
            d.scheme is not None and d.scheme.rows == 1 and d.observer == decided[-1].observer for d in decided
        )

    def _factors_of(self, parameter: Parameter, part: int, weight: Tensor, hessian: Tensor, channels: Tensor) -> Tensor:
        decision, held = self._decisions[parameter.name], self._known(parameter)
        assert decision.scheme is not None
        assert decision.observer is not None
        if not held.tokens[part]:
            return torch.ones(weight.shape[-1], device=weight.device)
        size = held.channel_amax[part] if decision.observer == SMOOTH else held.mean_abs[part]
        return strengths(
            weight, hessian, size.to(weight.device), decision.scheme, self._dtypes[parameter.local],
            decision.observer, channels.to(weight.device),
        )  # fmt: skip

    def _smooth_experts(self, gate_up: Parameter, down: Parameter) -> None:
        hessians = sketched(self._known(down), shared=False, device=self._weights.device)
        first, second = self.tensors[gate_up.local].float().clone(), self.tensors[down.local].float().clone()
        width = self._a.expert_width
        found = torch.ones(len(second), width, device=second.device)
        for expert in range(len(second)):
            found[expert] = self._factors_of(down, expert, second[expert], hessians[expert], torch.arange(width))
            first[expert, width:] /= found[expert][:, None]
            second[expert] *= found[expert]
        self.tensors[gate_up.local], self.tensors[down.local] = first, second
        self._factors[down.name] = found
        self._moved |= {gate_up.name, down.name}

    def _smooth_values(self, values: list[Parameter], output: Parameter) -> None:
        hessian = sketched(self._known(output), shared=True, device=self._weights.device)[0]
        weight = self.tensors[output.local].float()
        channels = value_channels(self._a).to(weight.device)
        found = self._factors_of(output, 0, weight, hessian, channels)
        self.tensors[output.local] = weight * found
        each = torch.ones(self._a.key_width, device=weight.device).scatter(0, channels, found)
        for parameter, own in zip(values, each.chunk(2), strict=True):
            self.tensors[parameter.local] = self.tensors[parameter.local].float() / own[:, None]
        self._factors[output.name] = found[None]
        self._moved |= {output.name, *(parameter.name for parameter in values)}

    def _is_smoothed(self, parameter: Parameter, name: str) -> bool:
        return parameter.name in self._moved and ".gate_proj" not in name


def _stored_name(part: Part, suffix: str) -> str:
    return part.name if suffix == "weight" else part.companion(suffix)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that has its memory for itself: gate and up may share a scale, files may not."""
    own = tensor.cpu()
    return own.clone() if own.numel() == 1 or own.untyped_storage().nbytes() > own.nbytes else own


def _moved(made: Quantized, device: torch.device) -> Quantized:
    return replace(made, tensors={suffix: tensor.to(device) for suffix, tensor in made.tensors.items()})
