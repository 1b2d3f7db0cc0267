"""A model's worker thread: processes all waiting items as one batch."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["BatchWorker"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class BatchWorker(Generic[Item, Result]):
    """Runs `work(items) -> results` (same length and order) in one thread, on all items waiting when it is free.

    The thread starts with the first item. If a batch fails, each item is tried alone, so that only the item at fault
    gets the exception.
    """

    def __init__(self, work: Callable[[Sequence[Item]], Sequence[Result]], *, name: str) -> None:
        self._work = work
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Item, asyncio.Future[Result]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, item: Item) -> asyncio.Future[Result]:
        """Return a future of the result; cancel it before its batch begins to skip the work."""
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
            self._thread.start()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.put((item, future))
        return future

    def close(self) -> None:
        """Finish the batch in progress and join the thread."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while (first := self._waiting.get()) is not None:
            taken = [first]
            closing = False
            while not self._waiting.empty():
                another = self._waiting.get()
                if another is None:
                    closing = True
                    break
                taken.append(another)
            batch = [(item, future) for item, future in taken if not future.cancelled()]
            if batch:
                outcomes = self._outcomes([item for item, _ in batch])
                loop.call_soon_threadsafe(_deliver, [future for _, future in batch], outcomes)
            if closing:
                return

    def _outcomes(self, items: Sequence[Item]) -> Sequence[Result | Exception]:
        try:
            results = self._work(items)
            assert len(results) == len(items), f"{self._name} gave {len(results)} results for {len(items)} items"
        except Exception as error:
            return [self._outcomes([item])[0] for item in items] if len(items) > 1 else [error]
        return results


def _deliver(futures: Sequence[asyncio.Future[Result]], outcomes: Sequence[Result | Exception]) -> None:
    for future, outcome in zip(futures, outcomes, strict=True):
        if future.done():  # its client has left
            continue
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
