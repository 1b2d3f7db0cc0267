"""Which models are loaded, with which options, and which calls wait for a load: Ollama's scheduler in small.

A loaded model has its own slots, and any number of calls may wait for them. Only a load has a bounded queue: while one
is pending every other request waits behind it, and requests beyond `max_queue` get status 503.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from query_mutator.embedded.catalogue import CONTEXT_LENGTH, MAX_CONTEXT, Entry
from query_mutator.embedded.stats import Stats
from query_mutator.embedded.wire import DEFAULT_KEEP_ALIVE_S, ApiError

__all__ = ["BUSY", "Runner", "Runners"]

#: Options of the loaded model rather than of one call, with their defaults; another value means a reload.
RUNNER_OPTIONS: Mapping[str, Any] = {
    "num_ctx": CONTEXT_LENGTH,
    "num_batch": 512,
    "num_gpu": -1,
    "main_gpu": 0,
    "num_thread": 0,
    "use_mmap": None,
}
MIN_CONTEXT = 4  # tokens; Ollama raises a smaller num_ctx to it
BUSY = "server busy, please try again.  maximum pending requests exceeded"


class Runner:
    """One loaded model: its options, its slots (first come, first served), and how many calls use it."""

    def __init__(self, entry: Entry, options: dict[str, Any], *, num_parallel: int) -> None:
        self.entry = entry
        self.options = options
        self.slots = asyncio.Semaphore(num_parallel)
        self.users = 0
        self.keep_alive_s = DEFAULT_KEEP_ALIVE_S
        self.idle = asyncio.Event()
        self._idle_since_s = time.monotonic()

    @property
    def expires_in_s(self) -> float:
        """Return for how long the model stays loaded without further calls."""
        idle_s = 0.0 if self.users else time.monotonic() - self._idle_since_s
        return self.keep_alive_s - idle_s

    @property
    def expired(self) -> bool:
        """Return whether the model's keep-alive has passed."""
        return not self.users and self.expires_in_s <= 0

    def fits(self, options: dict[str, Any]) -> bool:
        """Return whether a call with these options can use the model as loaded; a negative num_gpu always can."""
        if options["num_gpu"] is not None and options["num_gpu"] < 0:
            options = options | {"num_gpu": self.options["num_gpu"]}
        return options == self.options

    def leave(self) -> None:
        """Count a call that has finished with the model."""
        self.users -= 1
        if self.users == 0:
            self._idle_since_s = time.monotonic()
            self.idle.set()


class Runners:
    """The loaded models of one server."""

    def __init__(self, *, num_parallel: int, max_queue: int, load_s: float, stats: Stats) -> None:
        self._num_parallel = num_parallel
        self._max_queue = max_queue
        self._load_s = load_s
        self._stats = stats
        self._loaded: dict[str, Runner] = {}
        self._load_lock = asyncio.Lock()

    async def enter(self, entry: Entry, options: Mapping[str, Any], *, keep_alive_s: float | None) -> Runner:
        """Return the loaded model with this call counted as a user; load the model first if necessary.

        Raises ApiError 503 when a load is pending and its queue is full.
        """
        given = {**entry.parameters, **options}
        wanted = {name: given.get(name, default) for name, default in RUNNER_OPTIONS.items()}
        wanted["num_ctx"] = min(max(MIN_CONTEXT, int(wanted["num_ctx"] or CONTEXT_LENGTH)), MAX_CONTEXT)
        runner = None if self._load_lock.locked() else self._usable(entry, wanted)
        if runner is None:
            runner = await self._wait_for_load(entry, wanted)
        runner.users += 1
        runner.idle.clear()
        if keep_alive_s is not None:
            runner.keep_alive_s = keep_alive_s
        return runner

    def loaded(self) -> list[Runner]:
        """Return the loaded models, the one that stays longest first."""
        self._loaded = {name: runner for name, runner in self._loaded.items() if not runner.expired}
        return sorted(self._loaded.values(), key=lambda runner: runner.expires_in_s, reverse=True)

    def unload(self, entry: Entry) -> None:
        """Unload the model as soon as no call uses it."""
        runner = self._loaded.get(entry.weights)
        if runner is not None:
            runner.keep_alive_s = 0.0

    async def _wait_for_load(self, entry: Entry, wanted: dict[str, Any]) -> Runner:
        # One of the pending requests holds the lock, so the queue behind it is one shorter.
        if self._stats.pending_loads > self._max_queue:
            raise ApiError(503, BUSY)
        self._stats.pending_loads += 1
        try:
            async with self._load_lock:
                return self._usable(entry, wanted) or await self._load(entry, wanted)
        finally:
            self._stats.pending_loads -= 1

    def _usable(self, entry: Entry, wanted: dict[str, Any]) -> Runner | None:
        runner = self._loaded.get(entry.weights)
        return runner if runner is not None and not runner.expired and runner.fits(wanted) else None

    async def _load(self, entry: Entry, wanted: dict[str, Any]) -> Runner:
        before = self._loaded.get(entry.weights)
        if before is not None and before.users:
            await before.idle.wait()
        self._loaded.pop(entry.weights, None)
        if self._load_s:
            await asyncio.sleep(self._load_s)
        self._stats.loads += 1
        runner = self._loaded[entry.weights] = Runner(entry, wanted, num_parallel=self._num_parallel)
        return runner
