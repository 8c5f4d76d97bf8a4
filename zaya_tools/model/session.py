"""Serving with state: requests are fed in chunks, many at once, and generate greedily."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zaya_tools.errors import ZayaError
from zaya_tools.model.model import ZayaModel


@dataclass
class _Request:
    number: int
    slot: int
    pending: list[int]
    generated: list[int] = field(default_factory=list)


class Session:
    """Requests in `slots` slots of up to `capacity` tokens each, prompt and continuation together."""

    def __init__(self, model: ZayaModel, slots: int, capacity: int) -> None:
        """Hold empty state for the requests, in the model's compute dtype and on its device."""
        self.model = model
        self.state = model.state(slots, capacity)

    def open(self) -> int:
        """Start a request and return its slot. Raises ZayaError when no slot is free."""
        return self.state.allocate()

    def close(self, slot: int) -> None:
        """End a request; its slot is free for the next."""
        self.state.release(slot)

    def step(self, chunks: Sequence[tuple[int, Sequence[int]]], padding: int = 0) -> list[Tensor]:
        """Feed each slot its next token ids, all in one packed batch, in any order.

        Returns, for each chunk, the final normed states [its tokens, hidden]; `model.ends.logits` takes them.
        `padding` rows are added to give batches a common shape. Raises ZayaError as `State.advance` does.
        """
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i][1]) != 1 or not self.state.length(chunks[i][0]))
        if not order:
            return []
        plan = self.state.advance([(chunks[i][0], len(chunks[i][1])) for i in order], padding)
        rows: list[int] = []
        starts = {}
        for i in order:
            if len(rows) == plan.decodes - padding:
                rows += [0] * padding
            starts[i] = len(rows)
            rows += chunks[i][1]
        rows += [0] * (len(plan.slots) - len(rows))
        hidden = self.model.advance(torch.tensor(rows, device=self.model.device), plan, self.state)
        return [hidden[starts[i] : starts[i] + len(ids)] for i, (_, ids) in enumerate(chunks)]

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, *, chunk: int = 512, stop: Collection[int] = ()
    ) -> list[list[int]]:
        """Continue each prompt greedily by up to `tokens` token ids, ending after one that is in `stop`.

        Prompts wait for free slots; a step feeds at most `chunk` token ids, decodes first, or one a running request
        if that is more. Raises ZayaError for an empty prompt and for one that does not fit a slot.
        """
        for prompt in prompts:
            if not prompt:
                raise ZayaError("an empty prompt has no next token", "start it with the beginning-of-text token")
            if len(prompt) + tokens - 1 > self.state.capacity:
                raise ZayaError(
                    f"{len(prompt):,} prompt and {tokens:,} new tokens exceed the {self.state.capacity:,} of a slot",
                    "give the session a larger capacity",
                )
        waiting = deque(enumerate(prompts))
        running: list[_Request] = []
        results: list[list[int]] = [[] for _ in prompts]
        while tokens > 0 and (waiting or running):
            while waiting and self.state.free:
                number, prompt = waiting.popleft()
                running.append(_Request(number, self.open(), list(prompt)))
            for request in self._advance(running, chunk):
                if len(request.generated) == tokens or request.generated[-1] in stop:
                    results[request.number] = request.generated
                    self.close(request.slot)
                    running.remove(request)
        return results

    def _advance(self, running: Sequence[_Request], chunk: int) -> list[_Request]:
        """Run one step; gives the requests that got a new token."""
        fed: list[tuple[_Request, list[int]]] = []
        for request in sorted(running, key=lambda r: len(r.pending)):
            ids = request.pending[: max(chunk, 0 if fed else 1)]
            if not ids:
                break
            fed.append((request, ids))
            chunk -= len(ids)
        states = self.step([(request.slot, ids) for request, ids in fed])
        grown = []
        for (request, ids), hidden in zip(fed, states, strict=True):
            del request.pending[: len(ids)]
            if not request.pending:
                grown.append((request, hidden[-1]))
        if not grown:
            return []
        chosen = self.model.ends.logits(torch.stack([last for _, last in grown])).argmax(dim=-1).tolist()
        for (request, _), token in zip(grown, chosen, strict=True):
            request.generated.append(token)
            request.pending.append(token)
        return [request for request, _ in grown]
