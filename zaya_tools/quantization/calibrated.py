"""`zaya quantize` with recipes that know the inputs: blocks first, in a hidden folder, then one checkpoint of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from torch import Tensor

from zaya_tools import __version__
from zaya_tools.calibration.data import Choice, shortfalls
from zaya_tools.calibration.identity import identity
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.run import Pass, Progress, draw, statistics_file
from zaya_tools.calibration.statistics import Statistics, load, read_document
from zaya_tools.calibration.workspace import EVERY, Workspace, open_workspace
from zaya_tools.checkpoint.destination import partial_folder
from zaya_tools.checkpoint.header import read_header
from zaya_tools.checkpoint.plan import COPY, Output, Piece, Shard, stamps
from zaya_tools.checkpoint.pump import Segment, ShardDigest
from zaya_tools.errors import DestinationError, ZayaError
from zaya_tools.evaluation.opened import LEARNED, SMOOTHED
from zaya_tools.evaluation.validation import compute_dtype
from zaya_tools.layouts.native import NATIVE_PER_EXPERT
from zaya_tools.model.streaming import BUDGET
from zaya_tools.model.weights import Weights
from zaya_tools.parameters import parameters
from zaya_tools.quantization.blocks import (
    Knowledge,
    needs_passes,
    needs_statistics,
    quantize_blocks,
    record_of,
    tensors_file,
)
from zaya_tools.quantization.gptq import kernel
from zaya_tools.quantization.group import ALONE, Group
from zaya_tools.quantization.planning import QuantizedOutput
from zaya_tools.tensors import TensorInfo

if TYPE_CHECKING:
    from zaya_tools.quantization.conversion import Quantization


@dataclass(frozen=True)
class Calibration:
    """What recipes learn of the inputs from: a statistics file, or data of which statistics are made on the way.

    `choice` None means no data were named; `tokenizer` is a folder (default: the model's), `dtype` what the model
    computes in, `every` the seconds between saved states.
    """

    statistics: str | Path | None = None
    choice: Choice | None = None
    tokenizer: str | None = None
    dtype: str = "float32"
    budget: int = BUDGET
    every: float = EVERY


@dataclass(frozen=True)
class Stage:
    """How far the work on the blocks is."""

    name: str
    block: int
    blocks: int


Report = Callable[[Stage], None]


def needs_calibration(work: Quantization) -> bool:
    """Whether a plan has anything to learn from inputs."""
    return needs_passes(work.resolved.decisions) or needs_statistics(work.resolved.decisions)


def lacking(work: Quantization, calibration: Calibration) -> ZayaError | None:
    """What is missing to run a plan: data, or statistics where those are enough."""
    decisions = work.resolved.decisions
    if calibration.choice is not None or not needs_calibration(work):
        return None
    library = "--data library is the standard library's source, for want of better"
    if needs_passes(decisions):
        return ZayaError(f"recipe {work.recipe.name} needs data to run along", f"give --data; {library}")
    if calibration.statistics is None:
        return ZayaError(
            f"recipe {work.recipe.name} needs data to know its inputs",
            f"give --stats FILE, which `zaya calibrate` makes, or --data; {library}",
        )
    return None


@dataclass(frozen=True)
class Learned:
    """What is known before anything is run, `record`, which tells it from anything else, and notes for people."""

    weights: Weights
    known: Knowledge
    record: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def learn(work: Quantization, calibration: Calibration, device: torch.device, group: Group = ALONE) -> Learned:
    """Read statistics and data as a plan needs them.

    ZayaError where they are not given, cannot be read or are of another model, and where llm-compressor is needed and
    not installed.
    """
    decisions = work.resolved.decisions
    if missing := lacking(work, calibration):
        raise missing
    if needs_passes(decisions):
        kernel()
    weights = Weights(work.source, work.found, compute_dtype(calibration.dtype), device)
    moments: Mapping[str, Moments] = {}
    ids: Tensor | None = None
    notes: tuple[str, ...] = ()
    record: dict[str, Any] = {"dtype": calibration.dtype}
    if group.size > 1:
        record["processes"] = group.size  # sums over shares of the data are rounded otherwise
        if calibration.choice is not None and not calibration.choice.repeatable:
            raise ZayaError("several processes cannot read one pipe", "give a file to --data")
    if calibration.statistics is not None and needs_statistics(decisions):
        held, digest = read_statistics(calibration.statistics, weights)
        moments = held.moments
        record["statistics"] = {"data": held.facts.get("data"), "blake3": digest}
    if needs_passes(decisions) or not moments:
        assert calibration.choice is not None
        drawn = draw(weights, calibration.choice, calibration.tokenizer)
        ids = drawn.ids
        notes = tuple(shortfalls(len(ids), calibration.choice.samples, drawn.unusable, drawn.reason))
        record["data"] = {**asdict(calibration.choice), "windows": len(ids), "digest": drawn.digest}
    return Learned(weights, Knowledge(moments, ids), record, notes)


def read_statistics(name: str | Path, weights: Weights) -> tuple[Statistics, str]:
    """The statistics of this very model that a name means, and the BLAKE3 of their tensors. Raises as `load` does."""
    file = statistics_file(name)
    held = load(file, weights.architecture, identity(weights.found))
    digest: str = read_document(file)["tensors"]["blake3"]  # which loading has held against the bytes
    return held, digest


@dataclass(frozen=True)
class Prepared:
    """Every quantized tensor of the blocks by native name, in files of the workspace, and facts by weight.

    `sources` are the tensors that they were made of, as they were read.
    """

    tensors: Mapping[str, TensorInfo]
    facts: Mapping[str, Mapping[str, Any]]
    stems: Mapping[str, list[str]]
    sources: Mapping[str, Segment]

    def shard(self, shard: Shard) -> Shard:
        """The shard with what was quantized copied from where it is now."""
        return replace(shard, outputs=tuple(map(self._copied, shard.outputs)))

    def digest(self, digest: ShardDigest, shard: Shard) -> ShardDigest:
        """The digest of a shard made of it, with facts, and the true sources in the place of the workspace's files."""
        made = [o for o in shard.outputs if isinstance(o, QuantizedOutput) and o.bulk and o.matrix.name in self.facts]
        read = {piece.tensor.name: self.sources[piece.tensor.name] for o in made for piece in o.pieces}
        segments = (*(segment for segment in digest.segments if segment.tensor not in self.tensors), *read.values())
        own = {o.matrix.name: self.facts[o.matrix.name] for o in made}
        return replace(digest, segments=segments, facts={**digest.facts, **own})

    def _copied(self, output: Output) -> Output:
        if not isinstance(output, QuantizedOutput) or output.matrix.name not in self.facts:
            return output
        held = [self.tensors[f"{stem}.{output.suffix}"] for stem in self.stems[output.matrix.name]]
        pieces = tuple(Piece(tensor, 0, tensor.nbytes) for tensor in held)
        return Output(output.name, output.dtype, output.shape, output.dtype, pieces, COPY, output.role)


@contextmanager
def prepared(
    work: Quantization, destination: Path, learned: Learned, calibration: Calibration, *, resume: bool, force: bool,
    group: Group = ALONE, report: Report | None = None,
) -> Iterator[Prepared | None]:  # fmt: skip
    """Quantize the blocks of a plan; what this yields is there until the block under it ends.

    Of a group's processes only the first gets it. After an error or a kill, `resume` goes on with the blocks that were
    finished.
    """
    weights, known, decisions = learned.weights, learned.known, work.resolved.decisions
    say = report or (lambda _: None)
    with ExitStack() as stack:
        opened = _workspace(work, destination, learned, resume=resume, force=force, every=calibration.every)
        space = group.run(lambda: stack.enter_context(opened) if group.leads else None)
        if needs_statistics(decisions) and not known.moments:
            found = group.run(lambda: measured(weights, known.ids, calibration.budget, space, say) if space else {})
            known = Knowledge(group.collect(found)[0], known.ids)
        quantize_blocks(
            weights, decisions, known, space, group=group, budget=calibration.budget,
            report=lambda block, blocks: say(Stage("quantizing", block, blocks)),
        )  # fmt: skip
        yield _collect(space, weights.architecture.blocks, work) if space else None


def tidy(work: Quantization, destination: Path, learned: Learned) -> None:
    """Delete what a run of this plan, killed after it had published, left of its work on the blocks."""
    if partial_folder(_beside(destination)).exists():
        with suppress(DestinationError), _workspace(work, destination, learned, resume=True, force=False):
            pass


def _beside(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}.blocks")


def _workspace(
    work: Quantization, destination: Path, learned: Learned, *, resume: bool, force: bool, every: float = EVERY
) -> AbstractContextManager[Workspace]:
    facts = [__version__, torch.__version__, learned.weights.device.type, stamps(work.source.headers),
             work.options["recipe"], learned.record]  # fmt: skip
    stamp = blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return open_workspace(_beside(destination), stamp, resume=resume, force=force, every=every)


def measured(weights: Weights, ids: Tensor | None, budget: int, space: Workspace, say: Report) -> Mapping[str, Moments]:
    """Moments by parameter name, of a pass over token ids [sequences, tokens] that goes on where `space` says."""
    assert ids is not None

    def report(done: Progress) -> None:
        say(Stage(done.stage, done.block, done.blocks))

    return Pass(weights, weights.ends(), space, budget, report).measure(ids)[0]


def _collect(space: Workspace, blocks: int, work: Quantization) -> Prepared:
    tensors: dict[str, TensorInfo] = {}
    for file in (space.folder / tensors_file(index) for index in range(blocks)):
        if file.exists():
            tensors |= {tensor.name: tensor for tensor in read_header(file).tensors}
    record = record_of(space, blocks)
    stems = _stems(work)
    found: dict[str, Mapping[str, Any]] = {}
    for name, output in work.matrices.items():
        weights = [f"{stem}.weight" for stem in stems[name] if f"{stem}.weight" in record.facts]
        if weights:
            own = [record.facts[weight] for weight in weights]
            found[name] = {"scheme": output.matrix.scheme.name, **sum(own[1:], own[0]).as_dict()}
        for key, names in ((SMOOTHED, record.smoothed), (LEARNED, record.learned)):
            if names & set(weights):
                found[name] = {**found[name], key: True}
    return Prepared(tensors, found, stems, record.sources)


def _stems(work: Quantization) -> dict[str, list[str]]:
    """The modules that a weight of the plan is made of, in order: a stack of experts is made of many."""
    a = work.plan.architecture
    found: dict[str, list[str]] = {}
    for parameter in parameters(a):
        single = [part.name.removesuffix(".weight") for part in NATIVE_PER_EXPERT.parts(parameter, a)]
        parts = work.plan.layout.parts(parameter, a)
        each = len(single) // len(parts)
        found |= {part.name: single[i * each : (i + 1) * each] for i, part in enumerate(parts)}
    return found
