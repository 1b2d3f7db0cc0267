"""Calls at the upstream and waiting, by model. Clients come first: a call in the background never makes one wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

__all__ = ["NoSlotError", "Place", "Queue"]

Place = Callable[[str], AbstractAsyncContextManager[None]]  # holds a slot of a model

PATIENCE_S = 60.0  # for which a call in the background waits for a slot that no client needs


class NoSlotError(Exception):
    """No slot was spare for a call in the background."""


class Queue:
    """Calls at the upstream and waiting, by model; with `slots`, no more than that many are at the upstream at once."""

    def __init__(self, slots: int = 0, *, patience_s: float = PATIENCE_S) -> None:
        self._slots, self._patience_s = slots, patience_s
        self._limits: dict[str, asyncio.Semaphore] = {}
        self._background: dict[asyncio.Task[object], str] = {}  # tasks with a call now, and its model
        self._freed = asyncio.Event()  # replaced after it is set
        self.in_flight: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def place(self, model: str) -> AsyncIterator[None]:
        """Hold a slot of a model for a client; a call in the background that is in its way is cancelled."""
        limit = self._limit(model)
        if limit is None or limit.locked():
            self._cancel_background(model)
        if limit is not None:
            self.waiting[model] += 1
            try:
                await limit.acquire()
            finally:
                self.waiting[model] -= 1
        async with self._held(model, limit):
            yield

    @asynccontextmanager
    async def spare(self, model: str) -> AsyncIterator[None]:
        """Hold a slot that no client needs; the task is cancelled as soon as one does. NoSlotError if none is spare.

        Without a bound on the slots that is while nothing else is in flight.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._is_spare(model):
                    await self._freed.wait()
        except TimeoutError:
            raise NoSlotError(model) from None
        limit, task = self._limit(model), asyncio.current_task()
        assert task is not None
        if limit is not None:
            await limit.acquire()  # at once: it is not locked
        self._background[task] = model
        try:
            async with self._held(model, limit):
                yield
        finally:
            self._background.pop(task, None)

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the counts of every model that has been called."""
        models = sorted({*self.in_flight, *self.waiting})
        return {model: {"in_flight": self.in_flight[model], "waiting": self.waiting[model]} for model in models}

    @asynccontextmanager
    async def _held(self, model: str, limit: asyncio.Semaphore | None) -> AsyncIterator[None]:
        self.in_flight[model] += 1
        try:
            yield
        finally:
            self.in_flight[model] -= 1
            if limit is not None:
                limit.release()
            self._freed.set()
            self._freed = asyncio.Event()

    def _limit(self, model: str) -> asyncio.Semaphore | None:
        return self._limits.setdefault(model, asyncio.Semaphore(self._slots)) if self._slots else None

    def _is_spare(self, model: str) -> bool:
        limit = self._limit(model)
        return self.in_flight.total() == 0 if limit is None else not limit.locked()

    def _cancel_background(self, model: str) -> None:
        """Cancel one call in the background that holds a slot of a model; of any model without a bound."""
        found = next((task for task, of in self._background.items() if of == model or not self._slots), None)
        if found is not None:
            del self._background[found]
            found.cancel()
