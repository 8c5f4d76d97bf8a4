"""What threads that write one shard share: the order of its blocks, and the first failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Failed(Exception):
    """Another worker failed; its exception is the one to report."""


class Order:
    """Lets threads through one at a time, in the order of their tickets."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self.failed = False

    def wait(self, ticket: int) -> None:
        """Wait for the turn of `ticket`; Failed when there will be none."""
        with self._condition:
            self._condition.wait_for(lambda: self._turn == ticket or self.failed)
            if self.failed:
                raise Failed

    def done(self) -> None:
        """Give the turn to the next ticket."""
        with self._condition:
            self._turn += 1
            self._condition.notify_all()

    def fail(self) -> None:
        """Let all who wait know that a turn will never end."""
        with self._condition:
            self.failed = True
            self._condition.notify_all()


def run(work: Callable[[], None], workers: int, order: Order) -> None:
    """Run `work` in so many threads. The exception of the first that fails is raised here, after all have ended."""

    def guarded() -> None:
        try:
            work()
        except Failed:
            return
        except BaseException:
            order.fail()
            raise

    with ThreadPoolExecutor(max_workers=workers) as pool:
        tasks = [pool.submit(guarded) for _ in range(workers)]
        try:
            for task in tasks:
                task.result()
        except BaseException:  # Ctrl-C included: the pool would otherwise wait for the whole shard
            order.fail()
            raise
