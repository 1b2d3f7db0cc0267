"""Flows, and the scheduler that runs those of many environments at once without a barrier between their calls.

A *flow* is a generator that yields what a step needs, a model call or embeddings, and is sent the result. The same one
runs in one thread or among hundreds.

One thread advances all flows. A ThreadPoolExecutor of `batch_size` workers carries the calls, one per worker and
nothing else. Where more calls wait than there are workers, those of the flows that are furthest behind go first: then
all flows end at about the same time, and no slot waits for a straggler at the end of a rollout. Embeddings of all
waiting flows are computed together, in separate workers. Waits before a retry are timers and hold no worker.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import queue
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from query_mutator.encoder import CachedEncoder, Encoder
from query_mutator.llm.cache import Work, abandon, join
from query_mutator.llm.client import Attempts, Client, Retry, RetryPolicy
from query_mutator.types import ChatRequest, Completion, FloatArray

ENCODE_WORKERS = 2  # a pass uses one core, and most cores are idle while calls are in flight


def run_flow(flow: Flow, *, client: Client, encoder: Encoder, retry_policy: RetryPolicy) -> Any:
    """Run one flow in the calling thread, one call at a time, and return its result."""
    result: Any = None
    while True:
        try:
            need = flow.send(result)
        except StopIteration as stop:
            return stop.value
        if isinstance(need, Encode):
            result = encoder.encode(need.texts)
        else:
            result = Retry(client, retry_policy).complete(need.request)


@dataclass(frozen=True, slots=True)
class Call:
    """Request one model call; the flow is sent a Completion."""

    request: ChatRequest


@dataclass(frozen=True, slots=True)
class Encode:
    """Request embeddings of texts [n]; the flow is sent an array [n, D]."""

    texts: tuple[str, ...]


Need = Call | Encode
Flow = Generator[Need, Any, Any]


def map_needs(flow: Flow, map_need: Callable[[Need], Flow]) -> Flow:
    """Yield what `map_need(need)` yields for each need of `flow` and send it the result; return the flow's result."""
    result: Any = None
    while True:
        try:
            need = flow.send(result)
        except StopIteration as stop:
            return stop.value
        result = yield from map_need(need)


@dataclass(slots=True)
class _Running:
    """A flow in progress and its present call."""

    key: Hashable
    flow: Flow
    done: int = 0  # its progress: the lowest has priority
    tries: Attempts | None = None


_Event = tuple[Sequence[_Running], Any]  # flows; a Completion, embeddings per flow, or an exception


class PooledScheduler:
    """At most `batch_size` calls in flight; every flow continues as soon as its own result arrives."""

    def __init__(self, *, client: Client, encoder: CachedEncoder, retry_policy: RetryPolicy, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self._client, self._encoder, self._retry_policy = client, encoder, retry_policy
        self.batch_size = batch_size
        self._is_instant = getattr(client, "is_instant", False)  # then calls are made in this thread
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._callers = ThreadPoolExecutor(max_workers=batch_size, thread_name_prefix="qm-call")
        self._waiting_calls: queue.PriorityQueue[tuple[int, int, Work]] = queue.PriorityQueue()
        self._call_ids = itertools.count()  # among calls of equal priority the first comes first
        self._encoders = ThreadPoolExecutor(max_workers=ENCODE_WORKERS, thread_name_prefix="qm-encode")
        self._to_encode: list[tuple[_Running, tuple[str, ...]]] = []
        self._encoding = 0  # batches of texts in flight
        self._timers: list[tuple[float, int, _Running]] = []
        self._timer_ids = itertools.count()
        self._done: deque[tuple[Hashable, Any]] = deque()
        self._in_progress = 0

    def start(self, key: Hashable, flow: Flow, *, done: int = 0) -> None:
        """Start a flow under a key, which advances to its first need; where calls wait, the lowest `done` is first."""
        self._in_progress += 1
        self._advance(_Running(key, flow, done), None)

    @property
    def in_progress(self) -> int:
        """Return the number of flows in progress, or finished and not yet returned."""
        return self._in_progress + len(self._done)

    def finished(self, *, waits: bool = True) -> tuple[Hashable, Any]:
        """Return key and result of the next flow that finishes; errors of flows are raised here.

        TimeoutError when none has finished and it `waits` for none, IndexError when no flow is in progress.
        """
        while not self._done:
            if not self._in_progress:
                raise IndexError("no flow is in progress")
            if not self._handle_event(waits) and not waits:
                raise TimeoutError
        return self._done.popleft()

    def close(self) -> None:
        """Drop waiting calls and stop the workers; calls in flight must have been cancelled through the client."""
        self._callers.shutdown(wait=True, cancel_futures=True)
        while not self._waiting_calls.empty():
            *_, work = self._waiting_calls.get_nowait()
            abandon(work)
        self._encoders.shutdown(wait=True, cancel_futures=True)

    def _advance(self, running: _Running, result: Any) -> None:
        while True:
            try:
                need = running.flow.send(result)
            except StopIteration as stop:
                self._in_progress -= 1
                self._done.append((running.key, stop.value))
                return
            except BaseException:
                self._in_progress -= 1
                raise
            if isinstance(need, Call):
                running.tries = Attempts(need.request, self._retry_policy)
                self._call(running)
                return
            result = self._encoder.get(need.texts)
            if result is None:
                self._to_encode.append((running, need.texts))
                self._encode_pending()
                return

    def _call(self, running: _Running) -> None:
        """Start the next attempt; a worker is used only if there is a call to make."""
        assert running.tries is not None
        work = join(self._client, running.tries.next(), lambda reply: self._events.put(((running,), reply)))
        if work is not None and self._is_instant:
            work()
        elif work is not None:
            self._waiting_calls.put((running.done, next(self._call_ids), work))
            self._callers.submit(self._carry_call)

    def _carry_call(self) -> None:
        """Run in a worker: make the waiting call with the highest priority, whichever flow this was submitted for."""
        *_, work = self._waiting_calls.get_nowait()  # one is waiting for each submission
        try:
            work()
        except BaseException as error:
            self._events.put(((), error))

    def _encode_pending(self) -> None:
        """Submit all waiting texts to an encoder worker; while all workers are busy, texts gather."""
        if self._encoding == ENCODE_WORKERS or not self._to_encode:
            return
        self._encoding += 1
        batch, self._to_encode = self._to_encode, []
        future = self._encoders.submit(_encode_batch, self._encoder, [texts for _, texts in batch])
        flows = [running for running, _ in batch]
        future.add_done_callback(lambda done: self._events.put((flows, _outcome(done))))

    def _handle_event(self, waits: bool) -> bool:
        """Handle one event and advance its flows; return False if none came, where it waits until the next timer."""
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._call(heapq.heappop(self._timers)[2])
        patience_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
        try:
            flows, outcome = self._events.get(timeout=patience_s if waits else 0.0)
        except queue.Empty:
            return False
        if isinstance(outcome, BaseException):
            raise outcome
        if isinstance(outcome, Completion):
            (running,) = flows
            assert running.tries is not None
            delay_s = running.tries.delay_s(outcome.error)
            if delay_s is None:
                self._advance(running, running.tries.result(outcome))
            else:
                heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_ids), running))
            return True
        self._encoding -= 1
        for running, vectors in zip(flows, outcome, strict=True):
            self._advance(running, vectors)
        self._encode_pending()
        return True


def _outcome(future: Future[Any]) -> Any:
    if future.cancelled():  # by `close`; asking for its result would raise in the callback
        return CancelledError()
    return future.exception() or future.result()


def _encode_batch(encoder: Encoder, groups: Sequence[tuple[str, ...]]) -> list[FloatArray]:
    vectors = encoder.encode([text for texts in groups for text in texts])
    stops = np.cumsum([len(texts) for texts in groups])
    return [vectors[stop - len(texts) : stop] for texts, stop in zip(groups, stops, strict=True)]


async def run_flow_async(
    flow: Flow,
    *,
    complete: Callable[[ChatRequest], Awaitable[Completion]],
    encoder: Encoder,
    retry_policy: RetryPolicy,
) -> Any:
    """Run one flow and return its result; `complete` makes a call, and failed ones are retried by the policy.

    A cancelled task closes the flow; whether its call in flight ends at once is up to `complete`.
    """
    result: Any = None
    try:
        while True:
            try:
                need = flow.send(result)
            except StopIteration as stop:
                return stop.value
            if isinstance(need, Encode):
                result = await asyncio.to_thread(encoder.encode, need.texts)
            else:
                attempts = Attempts(need.request, retry_policy)
                reply = await complete(attempts.next())
                while (delay_s := attempts.delay_s(reply.error)) is not None:
                    await asyncio.sleep(delay_s)
                    reply = await complete(attempts.next())
                result = attempts.result(reply)
    finally:
        flow.close()
