"""Calls at the upstream and waiting, by model, and what the proxy counts for Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from query_mutator.types import MAX_NAME_CHARS

Place = Callable[[str], AbstractAsyncContextManager[None]]  # holds a slot of a model

PATIENCE_S = 60.0  # for which a call in the background waits for a slot that no client needs
#: Upper bounds of the histograms, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BOUNDS = (*((bound, str(bound)) for bound in BUCKETS), (float("inf"), "+Inf"))
_HELP: Mapping[str, tuple[str, str]] = {
    "qm_requests_total": ("counter", "Requests by route and status code."),
    "qm_decisions_total": ("counter", "Requests to virtual models by decision and reason."),
    "qm_calls_total": ("counter", "Calls to models by purpose."),
    "qm_rewrites_total": ("counter", "Rewrites asked in the place of the question, by operator."),
    "qm_rejected_rewrites_total": ("counter", "Rewrites that were not used, by operator and guard."),
    "qm_shadow_total": ("counter", "Questions that were to be answered both ways, by outcome."),
    "qm_in_flight": ("gauge", "Calls at the upstream, by model."),
    "qm_waiting": ("gauge", "Calls waiting for a slot, by model."),
    "qm_request_seconds": ("histogram", "Seconds until the reply of a virtual model is complete, by mode."),
    "qm_first_byte_seconds": ("histogram", "Seconds until its first byte, by mode."),
}


class NoSlotError(Exception):
    """No slot was spare for a call in the background."""


class Queue:
    """Calls at the upstream and waiting, by model; with `slots`, no more than that many are at the upstream at once.

    Clients come first: a call in the background never makes one wait.
    """

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
        model = model[:MAX_NAME_CHARS]  # clients choose it
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
        model = model[:MAX_NAME_CHARS]
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

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the calls in_flight and waiting now, by model."""
        models = sorted({*self.in_flight, *self.waiting})
        return {model: {"in_flight": self.in_flight[model], "waiting": self.waiting[model]} for model in models}

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


Labels = tuple[tuple[str, str], ...]


class Status:
    """The counters of one proxy."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(int))

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter."""
        self._counters[name][tuple(labels.items())] += amount

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add a duration to a histogram."""
        buckets, key = self._counters[f"{name}_bucket"], tuple(labels.items())
        for bound, written in _BOUNDS:
            buckets[*key, ("le", written)] += int(seconds <= bound)
        self.count(f"{name}_sum", seconds, **labels)
        self.count(f"{name}_count", **labels)

    def prometheus(self) -> str:
        """Return the text exposition format, version 0.0.4."""
        calls, lines = self.queue.counts(), list[str]()
        for name, (kind, text) in _HELP.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            for series in (name, f"{name}_bucket", f"{name}_sum", f"{name}_count"):
                lines += [f"{series}{_written(labels)} {value}" for labels, value in self._counters[series].items()]
            if (gauge := name.removeprefix("qm_")) in ("in_flight", "waiting"):
                lines += [f"{name}{_written([('model', model)])} {one[gauge]}" for model, one in calls.items()]
        return "\n".join([*lines, ""])


def _written(labels: Iterable[tuple[str, str]]) -> str:
    pairs = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(labels))
    return "{" + ",".join(pairs) + "}"
