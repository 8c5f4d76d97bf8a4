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
from zaya_tools.calibration.broken import explaining
from zaya_tools.calibration.data import Choice, Sample, sample
from zaya_tools.calibration.identity import identity
from zaya_tools.calibration.moments import OVERFLOW, Moments
from zaya_tools.calibration.observing import Observer
from zaya_tools.calibration.place import check_destination, finished, stamp_of
from zaya_tools.calibration.statistics import (
    BlockCoverage,
    Statistics,
    json_file,
    load,
    moments_of,
    read_document,
    save,
    tensors,
)
from zaya_tools.calibration.workspace import EVERY, Workspace, open_workspace
from zaya_tools.checkpoint.destination import partial_folder, settle
from zaya_tools.checkpoint.hub import expand, locate
from zaya_tools.checkpoint.plan import stamps
from zaya_tools.errors import DestinationError, LayoutError, NonFiniteError, ZayaError
from zaya_tools.evaluation.validation import compute_dtype
from zaya_tools.model.block import Block
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
    """The statistics and where they are. `starved` are the experts below the least number of tokens asked for.

    `already_complete` says that a resumed run found nothing left to do.
    """

    file: Path
    statistics: Statistics
    document: dict[str, Any]
    starved: tuple[tuple[int, int, int], ...]
    already_complete: bool = False


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
    dtype = compute_dtype(wanted.dtype)
    file = statistics_file(destination)
    folder, name = locate(str(model))
    check_destination(file, folder, force or resume)
    weights = Weights.open(folder, dtype=dtype, device=choose_device(wanted.device))
    a = weights.architecture
    if weights.found.quantized:
        raise LayoutError(f"{name} is quantized already", "calibrate the checkpoint that it was made from")
    drawn = draw(weights, wanted.choice, wanted.tokenizer, pool=POOL if wanted.balance else 1)
    who = identity(weights.found)
    options = {**asdict(wanted.choice), "balance": wanted.balance, "dtype": wanted.dtype}
    # What the figures depend on. An unfinished run is tied to the very files as well: they might change in between.
    stamp = _digest(
        __version__, torch.__version__, who, a.as_dict(), drawn.digest, {**options, "device": weights.device.type}
    )
    run_stamp = _digest(stamp, stamps(weights.source.headers))
    if resume and not force and finished(file) and _complete(file, stamp):
        found, document = load(file, a, who), read_document(file)
        if partial_folder(file).is_dir():  # a kill came before it was gone
            with open_workspace(file, run_stamp, resume=True, force=False):
                pass
        return Calibrated(file, found, document, found.starved(wanted.min_expert_tokens), already_complete=True)
    with open_workspace(file, run_stamp, resume=resume, force=force, every=wanted.every) as space:
        run = Pass(weights, weights.ends(), space, wanted.budget, report or (lambda _: None))
        ids = run.balanced(drawn, wanted.choice.samples) if wanted.balance else drawn.ids
        moments, blocks = run.measure(ids)
        facts = {
            "tool": {"zaya_tools": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "stamp": stamp,
            "model": name,
            "data": {**options, "windows": len(ids), "tokens": ids.numel(), "passages": drawn.passages,
                     "duplicates": drawn.duplicates, "unusable_conversations": drawn.unusable,
                     "unusable_first": drawn.reason,
                     "digest": Sample(ids, 0, 0).digest},
            "experts": a.experts,
        }  # fmt: skip
        found = Statistics(moments, blocks, who, facts)
        check_destination(file, folder, replace=True)  # what came there meanwhile is nobody's to replace
        document = save(found, a, file, space.folder)
    return Calibrated(file, found, document, found.starved(wanted.min_expert_tokens))


def draw(weights: Weights, choice: Choice, tokenizer: str | None, *, pool: int = 1) -> Sample:
    """What `sample` gives of a choice for a model, by its own tokenizer or the one in the folder `tokenizer`."""
    folder = expand(tokenizer) if tokenizer else weights.source.side_folder
    a = weights.architecture
    return sample(choice, folder, a.vocab_size, pool=pool, positions=a.max_positions)


def statistics_file(destination: str | Path) -> Path:
    """The safetensors file that a name means: with that ending, whether it, `.json` or neither was given."""
    path = expand(destination)
    if path.name in ("", "..") or "\0" in path.name:
        raise ZayaError(f"{str(destination)!r} is no name for a file of statistics", "give one, like stats.safetensors")
    file = settle(path)
    if file.suffix == ".json":
        return file.with_suffix(".safetensors")
    return file if file.suffix == ".safetensors" else file.with_name(f"{file.name}.safetensors")


def _complete(file: Path, stamp: str) -> bool:
    """Whether what stands at `file` is of this very run; False where an unfinished run is to go on first.

    DestinationError for all else that may stand there.
    """
    if stamp_of(file) == stamp:
        return True
    if stamp_of(file) is None and not json_file(file).exists() and partial_folder(file).is_dir():
        return False  # a kill came between the two files
    raise DestinationError(
        f"{file} is of another model, other data, other options or another version",
        "choose another name, or --force to replace it",
    )


def _digest(*facts: Any) -> str:
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
            layer = self._through(states, index, block)
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
            layer = self._through(states, index, observer.block)
            own = observer.moments()
            moments |= own
            self.space.write_tensors(f"block-measured-{index}", tensors(own, a, (index,)))
            coverage = self._done("measuring", states, layer, observer.entropy, time.monotonic() - started)
            blocks.append(coverage)
        # They are large, and all that was wanted of them is kept by now.
        self.space.forget_states("measuring")
        return moments, tuple(blocks)

    def _through(self, states: Stream, index: int, block: Block) -> Layer:
        """Run a block; NonFiniteError, with its cause, where numbers in it are not finite."""
        with explaining(self.weights, index), torch.inference_mode():
            if not bool(block.router.balancing.isfinite().all()):  # every choice would be of a class that is no number
                raise NonFiniteError(f"block {index}: what balances its router is NaN or infinite", OVERFLOW)
            layer = states.run(index, block)
            check_finite(states, index)
        return layer

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
            raise NonFiniteError(f"block {block}: its output is NaN or infinite", OVERFLOW)


def _by_sequence(layer: Layer, experts: int) -> Tensor:
    """Tokens [sequences, experts] that each sequence gave each expert."""
    counts = torch.zeros(len(layer.choice), experts + 1)
    counts.scatter_add_(1, layer.choice.long(), torch.ones(layer.choice.shape))
    return counts[:, :experts]
