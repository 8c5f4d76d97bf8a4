"""`zaya calibrate`: one pass over the data, block by block, in bounded memory, that an interruption does not undo."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from zaya_tools import __version__
from zaya_tools.calibration.balance import choose
from zaya_tools.calibration.data import Choice, Sample, sample
from zaya_tools.calibration.identity import identity
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.observing import Observer
from zaya_tools.calibration.statistics import BlockCoverage, Statistics, moments_of, save, tensors
from zaya_tools.calibration.workspace import EVERY, Workspace, open_workspace
from zaya_tools.checkpoint.destination import settle
from zaya_tools.checkpoint.hub import locate
from zaya_tools.checkpoint.plan import stamps
from zaya_tools.errors import DestinationError, LayoutError, NonFiniteError, ZayaError
from zaya_tools.evaluation.validation import DTYPES
from zaya_tools.model.device import choose_device
from zaya_tools.model.ends import Ends
from zaya_tools.model.streaming import BUDGET, Layer, Stream
from zaya_tools.model.weights import Weights

POOL = 8
"""Times the samples that are looked at when sequences are chosen by the experts that they feed."""


@dataclass(frozen=True)
class Progress:
    """How far a pass is, and the coverage of the block just done.

    `stage` is "routing" where sequences are looked for, then "measuring".
    """

    stage: str
    block: int
    blocks: int
    tokens: int
    seconds: float
    coverage: BlockCoverage


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Settings:
    """How to calibrate. `tokenizer` is a folder (default: the model's); `every` the seconds between saved states."""

    choice: Choice = field(default_factory=Choice)
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    balance: bool = False
    min_expert_tokens: int = 0
    budget: int = BUDGET
    every: float = EVERY


@dataclass(frozen=True)
class Calibrated:
    """The statistics and where they are. `starved` are the experts below the least number of tokens asked for."""

    file: Path
    statistics: Statistics
    document: dict[str, Any]
    starved: tuple[tuple[int, int, int], ...]


def calibrate(
    model: str | Path, destination: str | Path, settings: Settings | None = None, *,
    resume: bool = False, force: bool = False, report: Report | None = None,
) -> Calibrated:  # fmt: skip
    """Gather the statistics of a checkpoint, a folder or hub id of any layout, into `destination`.

    The file ends in `.safetensors`, and a JSON document is written beside it. Raises a ZayaError for settings, data
    or a model that cannot be used, and NonFiniteError, naming block and expert, where activations are not finite.
    After a kill `resume=True` goes on with the blocks that were finished and gives the same bytes.
    """
    wanted = settings or Settings()
    if wanted.dtype not in DTYPES:
        raise ZayaError(f"unknown dtype {wanted.dtype!r}", f"choose {' or '.join(DTYPES)}")
    file = statistics_file(destination)
    folder, name = locate(str(model))
    _check_destination(file, folder, force or resume)
    weights = Weights.open(folder, dtype=DTYPES[wanted.dtype], device=choose_device(wanted.device))
    if weights.found.quantized:
        raise LayoutError(f"{name} is quantized already", "calibrate the checkpoint that it was made from")
    tokenizer = Path(wanted.tokenizer).expanduser() if wanted.tokenizer else weights.source.side_folder
    drawn = sample(wanted.choice, tokenizer, weights.architecture.vocab_size, pool=POOL if wanted.balance else 1)
    who = identity(weights.found)
    options = {**asdict(wanted.choice), "balance": wanted.balance, "dtype": wanted.dtype}
    stamp = _fingerprint(weights, drawn, {**options, "device": weights.device.type})
    with open_workspace(file, stamp, resume=resume, force=force, every=wanted.every) as space:
        run = Pass(weights, weights.ends(), space, wanted.budget, report or (lambda _: None))
        ids = run.balanced(drawn, wanted.choice.samples) if wanted.balance else drawn.ids
        moments, blocks = run.measure(ids)
        facts = {
            "tool": {"zaya_tools": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "model": name,
            "data": {**options, "windows": len(ids), "tokens": ids.numel(), "passages": drawn.passages,
                     "duplicates": drawn.duplicates, "digest": Sample(ids, 0, 0).digest},
            "experts": weights.architecture.experts,
        }  # fmt: skip
        found = Statistics(moments, blocks, who, facts)
        save(found, weights.architecture, file)
    document = found.document(weights.architecture)
    return Calibrated(file, found, document, found.starved(wanted.min_expert_tokens))


def statistics_file(destination: str | Path) -> Path:
    """The safetensors file that a name means: with that ending, whether or not it was given."""
    file = settle(destination)
    return file if file.suffix == ".safetensors" else file.with_name(f"{file.name}.safetensors")


def _check_destination(file: Path, model: Path, replace: bool) -> None:
    if file.is_dir():
        raise DestinationError(f"{file} is a folder", "name a file for the statistics")
    if not file.parent.is_dir():
        raise DestinationError(f"the folder {file.parent} does not exist", "create it first")
    if file.resolve().parent.is_relative_to(model.resolve()):
        raise DestinationError(f"{file} would be written into the checkpoint {model}", "choose another place")
    if file.exists() and not replace:
        raise DestinationError(f"{file} already exists", "choose another name, or --force to replace it")


def _fingerprint(weights: Weights, drawn: Sample, options: dict[str, Any]) -> str:
    facts = [__version__, torch.__version__, stamps(weights.source.headers), drawn.digest, options]
    return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Pass:
    """Passes over the blocks that keep in `space` what they need to go on after an interruption."""

    weights: Weights
    ends: Ends
    space: Workspace
    budget: int
    report: Report

    def balanced(self, drawn: Sample, samples: int) -> Tensor:
        """The sequences of a pool that feed all experts best, after a pass over it that only routes."""
        known = self.space.read("chosen-windows.json")
        if known is None:
            counts = self._route(drawn.ids)
            known = {"windows": choose(counts, samples)}
            self.space.write("chosen-windows.json", known)
            self.space.forget_states("routing")
        return drawn.ids[known["windows"]]

    def _route(self, ids: Tensor) -> Tensor:
        a = self.weights.architecture
        states = Stream(self.weights, self.ends, ids, budget=self.budget)
        done = self.space.load_states("routing", states)
        counts = torch.zeros(len(ids), a.blocks, a.experts)
        for index in range(done + 1):
            counts[:, index] = self.space.read_tensors(f"block-routing-{index}")["counts"]
        started = time.monotonic()
        for index, block in enumerate(self.weights.blocks(done + 1), done + 1):
            layer = states.run(index, block)
            counts[:, index] = _by_sequence(layer, a.experts)
            self.space.write_tensors(f"block-routing-{index}", {"counts": counts[:, index].contiguous()})
            self._done("routing", states, layer, 0.0, time.monotonic() - started)
        return counts.flatten(1)

    def measure(self, ids: Tensor) -> tuple[dict[str, Moments], tuple[BlockCoverage, ...]]:
        """Moments by parameter name, and coverage by block, of these sequences."""
        a = self.weights.architecture
        states = None
        done = a.blocks - 1
        if self.space.read(f"block-measured-{done}.json") is None:
            states = Stream(self.weights, self.ends, ids, budget=self.budget)
            done = self.space.load_states("measuring", states)
        moments: dict[str, Moments] = {}
        blocks: list[BlockCoverage] = []
        for index in range(done + 1):
            moments |= moments_of(self.space.read_tensors(f"block-measured-{index}"), a, (index,))
            record = self.space.read(f"block-measured-{index}.json")
            assert record is not None
            record["expert_tokens"] = tuple(record["expert_tokens"])
            blocks.append(BlockCoverage(**record))
        if states is None:
            return moments, tuple(blocks)
        started = time.monotonic()
        for index, block in enumerate(self.weights.blocks(done + 1), done + 1):
            observer = Observer(a, index, block, self.weights.device)
            with torch.inference_mode():
                layer = states.run(index, observer.block)
            check_finite(states, index)
            own = observer.moments()
            moments |= own
            self.space.write_tensors(f"block-measured-{index}", tensors(own, a, (index,)))
            coverage = self._done("measuring", states, layer, observer.entropy, time.monotonic() - started)
            blocks.append(coverage)
        # They are large, and all that was wanted of them is kept by now.
        self.space.forget_states("measuring")
        return moments, tuple(blocks)

    def _done(self, stage: str, states: Stream, layer: Layer, entropy: float, seconds: float) -> BlockCoverage:
        a = self.weights.architecture
        tokens = torch.bincount(layer.choice.flatten().long(), minlength=a.experts + 1).tolist()
        coverage = BlockCoverage(layer.index, tuple(tokens[:-1]), tokens[-1], entropy)
        if stage == "measuring":
            self.space.write(f"block-measured-{layer.index}.json", asdict(coverage))
        self.space.save_states(stage, layer.index, states)
        self.report(Progress(stage, layer.index, a.blocks, layer.choice.numel(), seconds, coverage))
        return coverage


def check_finite(states: Stream, block: int) -> None:
    """NonFiniteError where the hidden states after a block are not finite."""
    for start in range(0, states.hidden.shape[0], states.step):
        stop = min(start + states.step, states.hidden.shape[0])
        if not bool(states.hidden.read(start, stop).sum().isfinite()):
            raise NonFiniteError(
                f"block {block}: its output is NaN or infinite",
                "the model overflows on this text: check the source with `zaya validate`, or compute in float32",
            )


def _by_sequence(layer: Layer, experts: int) -> Tensor:
    """Tokens [sequences, experts] that each sequence gave each expert."""
    counts = torch.zeros(len(layer.choice), experts + 1)
    counts.scatter_add_(1, layer.choice.long(), torch.ones(layer.choice.shape))
    return counts[:, :experts]
