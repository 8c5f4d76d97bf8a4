"""Layer-major execution: a block's weights are read, used for all sequences, and dropped.

What stays is the hidden and router states of the evaluation set, in memory up to a budget and on disk past it. So
the memory of a run is two blocks (one at work, one being read) and that budget, whatever the model's depth.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from zaya_tools.architecture import Architecture
from zaya_tools.errors import ZayaError
from zaya_tools.model.block import Block, BlockOutput, run_sequences
from zaya_tools.model.ends import Ends
from zaya_tools.model.rotary import rotaries
from zaya_tools.model.weights import Weights

BUDGET = 10**9
"""Bytes of states that are kept in memory before they go to disk."""
TOKENS = 4096
"""Tokens that a block works on at a time: enough to use each expert's weights well."""
_COPIED = 2**26


class States:
    """A tensor [sequences, tokens, width] that is read and written by ranges of sequences, in memory or in a file."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, in_memory: bool) -> None:
        """Hold room for `shape`; uninitialised."""
        self.shape, self.dtype = shape, dtype
        self._stride = prod(shape[1:]) * dtype.itemsize
        self._held = torch.empty(shape, dtype=dtype) if in_memory else None
        # Unnamed: it is gone when it is closed, however the process ends.
        self._file: IO[bytes] | None = None if in_memory else tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        if self._file is not None:
            self._file.truncate(self.nbytes)  # what was not written yet can be read, and copied

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.shape[0] * self._stride

    def read(self, start: int, stop: int) -> Tensor:
        """Sequences [start, stop); not to be changed."""
        if self._held is not None:
            return self._held[start:stop]
        assert self._file is not None
        out = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        view = out.view(-1).view(torch.uint8).numpy().data
        done = 0
        while done < len(view):
            done += os.preadv(self._file.fileno(), [view[done:]], start * self._stride + done)
        return out

    def write(self, start: int, values: Tensor) -> None:
        """Put `values` [sequences, tokens, width] at sequence `start`."""
        if self._held is not None:
            self._held[start : start + len(values)].copy_(values)
            return
        assert self._file is not None
        view = values.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], start * self._stride + done)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ZayaError(
                f"the disk is full: {self.nbytes:,} bytes of states do not fit into {tempfile.gettempdir()}",
                "free some space, or name a folder on a larger disk in the environment variable TMPDIR",
            ) from error

    def copy(self) -> States:
        """The same values in a place of their own, in memory where these are."""
        twin = States(self.shape, self.dtype, self._held is not None)
        step = max(1, _COPIED // self._stride)
        for start in range(0, self.shape[0], step):
            twin.write(start, self.read(start, min(start + step, self.shape[0])))
        return twin

    def save(self, file: Path) -> None:
        """Write everything to a file, which is on disk when this returns."""
        step = max(1, _COPIED // self._stride)
        with file.open("wb") as stream:
            for start in range(0, self.shape[0], step):
                rows = self.read(start, min(start + step, self.shape[0]))
                stream.write(rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(stream.fileno())

    def load(self, file: Path) -> None:
        """Take everything from a file that `save` wrote for this shape and dtype."""
        step = max(1, _COPIED // self._stride)
        with file.open("rb") as stream:
            for start in range(0, self.shape[0], step):
                stop = min(start + step, self.shape[0])
                data = bytearray(stream.read((stop - start) * self._stride))
                self.write(start, torch.frombuffer(data, dtype=self.dtype).view(stop - start, *self.shape[1:]))


@dataclass(frozen=True)
class Layer:
    """What a block left behind: `hidden` [sequences, tokens, hidden] float32, and the routing of every token.

    `choice` int16 [sequences, tokens] is the expert, or the number of experts for skip; `weight` float32 likewise.
    `hidden` is overwritten when the next block runs.
    """

    index: int
    hidden: States
    choice: Tensor
    weight: Tensor


class Computing(Protocol):
    """What a stream has to know of the weights: the geometry, and where and in what it computes."""

    @property
    def architecture(self) -> Architecture:
        """The geometry as run."""

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""


class Stream:
    """The states of a set of sequences on their way through the blocks, one block at a time.

    Token ids [sequences, tokens] int64 are embedded at once. `hidden` [sequences, tokens, hidden] float32 and
    `carried` [sequences, tokens, router width] of the compute dtype are what the last block run left; past `budget`
    bytes they live in a temporary file.
    """

    def __init__(self, weights: Computing, ends: Ends, ids: Tensor, *, budget: int = BUDGET) -> None:
        a = weights.architecture
        sequences, tokens = ids.shape
        self.architecture, self.device = a, weights.device
        held = sequences * tokens * (4 * a.hidden_size + weights.dtype.itemsize * a.router_width)
        self.hidden = States((sequences, tokens, a.hidden_size), torch.float32, held <= budget)
        self.carried = States((sequences, tokens, a.router_width), weights.dtype, held <= budget)
        self.step = max(1, TOKENS // tokens)
        for start in range(0, sequences, self.step):
            self.hidden.write(start, ends.embed(ids[start : start + self.step].to(self.device)))
        self._tables = rotaries(a, torch.arange(tokens, device=self.device))

    def fork(self) -> Stream:
        """Another stream at the same point, with states of its own."""
        twin = copy(self)
        twin.hidden, twin.carried = self.hidden.copy(), self.carried.copy()
        return twin

    def run(self, index: int, block: Block, *, keep: bool = True) -> Layer:
        """Run block `index` over all sequences; without `keep` the states stay as they are, ready for another run."""
        sequences, tokens, _ = self.hidden.shape
        choice = torch.empty((sequences, tokens), dtype=torch.int16)
        weight = torch.empty((sequences, tokens), dtype=torch.float32)
        for start, stop, run in self.chunks(index):
            out = run(block)
            if keep:
                self.hidden.write(start, out.hidden)
                self.carried.write(start, out.router_states)
            choice[start:stop] = out.routing.choice.to("cpu", torch.int16)
            weight[start:stop] = out.routing.weight.cpu()
        return Layer(index, self.hidden, choice, weight)

    def chunks(self, index: int) -> Iterator[tuple[int, int, Callable[[Block], BlockOutput]]]:
        """(first sequence, last and one, a function that runs block `index` on them and keeps nothing), to the end."""
        rotary = self._tables[self.architecture.sliding[index]]
        for start in range(0, self.hidden.shape[0], self.step):
            stop = min(start + self.step, self.hidden.shape[0])
            hidden = self.hidden.read(start, stop).to(self.device)
            before = self.carried.read(start, stop).to(self.device) if index else None

            def run(block: Block, hidden: Tensor = hidden, before: Tensor | None = before) -> BlockOutput:
                with torch.inference_mode():
                    return run_sequences(hidden, before, block, rotary)

            yield start, stop, run


def stream(weights: Weights, ends: Ends, ids: Tensor, *, budget: int = BUDGET) -> Iterator[Layer]:
    """Run token ids [sequences, tokens] int64 through the blocks, yielding after each.

    The first yield has index -1 and is the embedding, with empty routing. Past `budget` bytes, states live in a
    temporary file.
    """
    states = Stream(weights, ends, ids, budget=budget)
    nothing = torch.empty((len(ids), 0))
    yield Layer(-1, states.hidden, nothing.to(torch.int16), nothing)
    for index, block in enumerate(weights):
        yield states.run(index, block)
