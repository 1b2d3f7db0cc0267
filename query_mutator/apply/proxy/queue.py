"""Calls at the upstream and waiting, by model. Clients come first: a call in the background never makes one wait."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from query_mutator.llm.ollama import with_tag

__all__ = ["Counts", "NoSlotError", "Place", "Queue"]

Place = Callable[[str], AbstractAsyncContextManager[None]]  # holds a slot of a model
Counts = Mapping[str, Mapping[str, int]]  # calls in_flight and waiting, by model

PATIENCE_S = 60.0  # for which a call in the background waits for a slot that no client needs
OTHER = "other"  # label of the calls of models that no server lists, whose names clients choose


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
            with self._counted(self.waiting, model):
                await limit.acquire()
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

    @property
    def is_used(self) -> bool:
        """Return whether there is any call now."""
        return bool(self.in_flight or self.waiting)

    def counts(self, listed: Container[str]) -> Counts:
        """Return the calls now, by model; those of names that are not `listed` (names with their tag) together."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: {"in_flight": 0, "waiting": 0})
        for kind, calls in (("in_flight", self.in_flight), ("waiting", self.waiting)):
            for model, count in calls.items():
                found[model if with_tag(model) in listed else OTHER][kind] += count
        return dict(sorted(found.items()))

    @asynccontextmanager
    async def _held(self, model: str, limit: asyncio.Semaphore | None) -> AsyncIterator[None]:
        if limit is not None:
            self._limits[model] = limit  # which left with the last call that waited
        try:
            with self._counted(self.in_flight, model):
                yield
        finally:
            if limit is not None:
                limit.release()
            self._freed.set()
            self._freed = asyncio.Event()

    @contextmanager
    def _counted(self, calls: Counter[str], model: str) -> Iterator[None]:
        """Count a call; a model without calls leaves, as clients choose the names."""
        calls[model] += 1
        try:
            yield
        finally:
            calls[model] -= 1
            if not calls[model]:
                del calls[model]
            if not self.in_flight[model] and not self.waiting[model]:
                self._limits.pop(model, None)

    def _limit(self, model: str) -> asyncio.Semaphore | None:
        return self._limits.setdefault(model, asyncio.Semaphore(self._slots)) if self._slots else None

    def _is_spare(self, model: str) -> bool:
        if not self._slots:
            return not self.in_flight
        limit = self._limits.get(model)
        return limit is None or not limit.locked()

    def _cancel_background(self, model: str) -> None:
        """Cancel one call in the background that holds a slot of a model; of any model without a bound."""
        found = next((task for task, of in self._background.items() if of == model or not self._slots), None)
        if found is not None:
            del self._background[found]
            found.cancel()
