"""Quantization that knows the inputs, block by block: a block's matrices are stored at once, and feed the next block.

A block is read, its sites are gone through in the order in which data passes them, and what they become is kept in a
hidden folder. Where a rule says gptq, the data run along: each site sees what the sites and blocks before it, already
quantized, make of them. Memory is two blocks and the second moments of one site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from zaya_tools.calibration.broken import explaining
from zaya_tools.calibration.moments import Moments
from zaya_tools.calibration.workspace import Workspace
from zaya_tools.checkpoint.pump import Segment
from zaya_tools.errors import ZayaError
from zaya_tools.model.streaming import BUDGET, Stream
from zaya_tools.model.weights import Weights
from zaya_tools.quantization.block import BlockWork
from zaya_tools.quantization.group import ALONE, Group
from zaya_tools.quantization.quantize import Facts
from zaya_tools.quantization.resolve import Decision
from zaya_tools.quantization.scheme import GPTQ, INFORMED

STAGE = "quantized"
Report = Callable[[int, int], None]
"""Takes the block just done and how many there are."""


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
    weights: Weights, decisions: Mapping[str, Decision], known: Knowledge, space: Workspace | None, *,
    group: Group = ALONE, budget: int = BUDGET, report: Report | None = None,
) -> None:  # fmt: skip
    """Quantize every block that has anything to quantize, into files of the workspace, from the first not yet done.

    The processes of a group run along with a share of the sequences each, and round a share of the matrices; the first
    of them has the workspace. Raises NonFiniteError and ZayaError, naming block and expert, for activations, weights
    and scales that cannot be.
    """
    a = weights.architecture
    states = None
    first = 0
    if needs_passes(decisions):
        if known.ids is None:
            raise ZayaError("gptq needs data to run along", "give --data")
        own = group.share(len(known.ids))
        states = Stream(weights, weights.ends(), known.ids[own.start : own.stop], budget=budget)
        # Several have none on disk: what was finished is run through again, which costs a fraction of rounding it.
        if space is not None and group.size == 1:
            first = space.load_states(STAGE, states) + 1
    for index in range(first, a.blocks):
        finished = group.collect(space is not None and space.read(_record(index)) is not None)[0]
        if finished and states is None:
            continue
        with explaining(weights, index):
            _one_block(BlockWork(weights, index, decisions, known.moments, states, group), space, finished)
        if states is not None and space is not None and group.size == 1:
            space.save_states(STAGE, index, states)
        if report is not None:
            report(index, a.blocks)


def _record(block: int) -> str:
    return f"block-{STAGE}-{block}.json"


def tensors_file(block: int) -> str:
    """The file of a workspace that has what a block's matrices became."""
    return f"block-{STAGE}-{block}.safetensors"


def _one_block(work: BlockWork, space: Workspace | None, finished: bool) -> None:
    """Quantize a block, or take what it became, and let the data pass it."""
    if finished:
        held = space is not None and (space.folder / tensors_file(work.index)).exists()
        work.recall(work.group.collect(space.read_tensors(tensors_file(work.index)) if space and held else {})[0])
    else:
        tensors, record = work.run()
        if space is not None:
            if tensors:
                space.write_tensors(tensors_file(work.index), tensors)
            space.write(_record(work.index), record)
    work.pass_on()


@dataclass(frozen=True)
class Record:
    """What quantizing did to each matrix by the name of its weight, those into or out of which magnitudes moved, and
    the tensors of the source that they were made of, by name."""

    facts: Mapping[str, Facts]
    smoothed: Set[str]
    learned: Set[str]
    sources: Mapping[str, Segment]


def record_of(space: Workspace, blocks: int) -> Record:
    """The record of all blocks, once they are done."""
    found: dict[str, Facts] = {}
    smoothed: set[str] = set()
    learned: set[str] = set()
    sources: dict[str, Segment] = {}
    for index in range(blocks):
        record = space.read(_record(index)) or {"facts": {}, "sources": {}}
        sources |= {name: Segment(name, 0, **held) for name, held in record["sources"].items()}
        for name, held in record["facts"].items():
            found[name] = Facts(**held["lost"])
            smoothed |= {name} if held["smoothed"] else set()
            learned |= {name} if held["learned"] else set()
    return Record(found, smoothed, learned, sources)
