"""Quantization that knows the inputs, block by block: a block's matrices are stored at once, and feed the next block.

A block is read, its sites are gone through in the order in which data passes them, and what they become is kept in a
hidden folder. Where a rule says gptq, the data run along: each site sees what the sites and blocks before it, already
quantized, make of them. Memory is two blocks and the second moments of one site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.observing import Sites, sites
from zaya_tools.calibration.workspace import Workspace
from zaya_tools.errors import ZayaError
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.model.block import Block
from zaya_tools.model.loading import build_block
from zaya_tools.model.streaming import BUDGET, Stream
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import Parameter
from zaya_tools.quantization.fit import Task, fit, restored
from zaya_tools.quantization.hessian import sketched
from zaya_tools.quantization.inputs import gather
from zaya_tools.quantization.quantize import Facts, Quantized
from zaya_tools.quantization.resolve import Decision
from zaya_tools.quantization.scheme import AWQ, GPTQ, INFORMED, SMOOTH, Activations, Observer, Scheme
from zaya_tools.quantization.smoothing import strengths, value_channels

STAGE = "quantized"
Report = Callable[[int, int], None]
"""Takes the block just done and how many there are."""

_BELIEVABLE = (1e-6, 1e7)
"""Largest inputs of a layer beyond which something is wrong with the model or the text."""

_REACH = {Activations.TENSOR: 448.0, Activations.LOCAL: 448.0 * 6.0}


def needs_passes(decisions: Mapping[str, Decision]) -> bool:
    """Whether the data have to run along, rather than their statistics being enough."""
    return any(d.scheme is not None and d.observer == GPTQ for d in decisions.values())


def needs_statistics(decisions: Mapping[str, Decision]) -> bool:
    """Whether a calibration's statistics go into it."""
    return any(
        d.scheme is not None and ((d.observer in INFORMED and d.observer != GPTQ) or d.scheme.activations.calibrated)
        for d in decisions.values()
    )


@dataclass(frozen=True)
class Knowledge:
    """What is known of the inputs: moments by parameter name, and token ids [sequences, tokens] to run along."""

    moments: Mapping[str, Moments]
    ids: Tensor | None


def quantize_blocks(
    weights: Weights, decisions: Mapping[str, Decision], known: Knowledge, space: Workspace, *,
    budget: int = BUDGET, report: Report | None = None,
) -> None:  # fmt: skip
    """Quantize every block that has anything to quantize, into files of the workspace, from the first not yet done.

    Raises NonFiniteError and ZayaError, naming block and expert, for activations, weights and scales that cannot be.
    """
    a = weights.architecture
    states = None
    first = 0
    if needs_passes(decisions):
        if known.ids is None:
            raise ZayaError("gptq needs data to run along", "give --data")
        states = Stream(weights, weights.ends(), known.ids, budget=budget)
        first = space.load_states(STAGE, states) + 1
    else:
        while first < a.blocks and space.read(f"block-{STAGE}-{first}.json") is not None:
            first += 1
    for index in range(first, a.blocks):
        work = _Block(weights, index, decisions, known.moments, states)
        tensors, facts = work.run()
        if tensors:
            space.write_tensors(f"block-{STAGE}-{index}.safetensors", tensors)
        space.write(f"block-{STAGE}-{index}.json", facts)
        if states is not None:
            states.run(index, work.block())
            space.save_states(STAGE, index, states)
        if report is not None:
            report(index, a.blocks)


class _Block:
    """One block on its way to fewer bits; where data run along, `tensors` become what the stored ones mean."""

    def __init__(
        self, weights: Weights, index: int, decisions: Mapping[str, Decision], moments: Mapping[str, Moments],
        states: Stream | None,
    ) -> None:  # fmt: skip
        self._weights, self._index, self._moments, self._states = weights, index, moments, states
        self._a: Architecture = weights.architecture
        self._decisions = decisions
        self._sites: Sites = sites(self._a, index)
        self.tensors = weights.dense(index)
        self._dtypes = {local: tensor.dtype for local, tensor in self.tensors.items()}
        self._factors: dict[str, Tensor] = {}
        self._moved: set[str] = set()

    def run(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Stored tensors by name, and facts by the name of the weight."""
        self._smooth()
        stored: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        for number, site in enumerate(self._sites):
            chosen = [(p, self._decisions[p.name]) for p in site if self._decisions[p.name].scheme is not None]
            hessians = self._hessians(number, [decision for _, decision in chosen])
            for parameter, decision in chosen:
                assert decision.scheme is not None
                assert decision.observer is not None
                made = self._fit(parameter, decision.scheme, decision.observer, hessians)
                for part, one in zip(NATIVE_PER_EXPERT.parts(parameter, self._a), made, strict=True):
                    for suffix, tensor in one.tensors.items():
                        name = part.name if suffix == "weight" else part.companion(suffix)
                        stored[name] = tensor.cpu().clone()  # gate and up may share a scale, files may not
                    facts[part.name] = {**asdict(one.facts), "smoothed": self._is_smoothed(parameter, part.name)}
        return stored, facts

    def block(self) -> Block:
        """The block as its tensors are now; experts are cast one by one in use, which saves a second copy of them."""
        place = self._weights
        return build_block(
            self._a, self._index, self.tensors, dtype=place.dtype, device=place.device, cast_experts=False
        )

    def _hessians(self, number: int, decisions: list[Decision]) -> Tensor | None:
        site = self._sites[number]
        observers = {decision.observer for decision in decisions}
        shared = number != 3
        if GPTQ in observers:
            assert self._states is not None
            return gather(self._states, self._index, self.block(), self._sites, number).means(shared=shared)
        if not observers & set(INFORMED):
            return None
        found = sketched(self._known(site[0]), shared=shared, device=self._weights.device)
        factors = self._factors.get(site[0].name)
        return found if factors is None else found / (factors[:, :, None] * factors[:, None, :])

    def _known(self, parameter: Parameter) -> Moments:
        if parameter.name not in self._moments:
            raise ZayaError(f"nothing is known of the inputs of {parameter.name}", "give --stats or --data")
        return self._moments[parameter.name]

    def _fit(
        self, parameter: Parameter, scheme: Scheme, observer: Observer, hessians: Tensor | None
    ) -> list[Quantized]:
        local = parameter.local
        weight = self.tensors[local]
        stacked = weight if weight.ndim == 3 else weight[None]
        parts = len(NATIVE_PER_EXPERT.parts(parameter, self._a)) // len(stacked)
        task = Task(parameter.name, stacked, parts, scheme, observer, self._dtypes[local])
        made = fit(task, hessians)
        for number, one in enumerate(made):
            rows, columns = weight.shape[-2] // parts, weight.shape[-1]
            if any(entry.suffix == "weight_shape" for entry in scheme.stored(rows, columns, "BF16")):
                one.tensors["weight_shape"] = torch.tensor([rows, columns])
            if scheme.activations.calibrated:
                one.tensors.update(self._input_scale(parameter, scheme, number // parts))
        if self._states is not None:  # what comes after sees what was stored
            self.tensors[local] = restored(task, made).view(weight.shape)
        return made

    def _input_scale(self, parameter: Parameter, scheme: Scheme, part: int) -> dict[str, Tensor]:
        """The number that static activations are divided by. An expert without tokens has that of its block."""
        held = self._known(parameter)
        amax = held.amax if self._factors.get(parameter.name) is None else (
            held.channel_amax / self._factors[parameter.name].cpu()
        ).amax(-1)  # fmt: skip
        largest = float(amax[part] if held.tokens[part] else amax.max())
        if not largest > 0:
            raise ZayaError(
                f"{parameter.name}: no token reached any expert, so that its inputs' scale is unknown",
                "calibrate on more text",
            )
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

    def _smooth(self) -> None:
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


def facts_of(space: Workspace, blocks: int) -> tuple[dict[str, Facts], set[str]]:
    """What quantizing did to each matrix by the name of its weight, and those into or out of which magnitudes moved."""
    found: dict[str, Facts] = {}
    smoothed = set()
    for index in range(blocks):
        for name, held in (space.read(f"block-{STAGE}-{index}.json") or {}).items():
            if held.pop("smoothed"):
                smoothed.add(name)
            found[name] = Facts(**held)
    return found, smoothed
