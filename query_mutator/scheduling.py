"""Runs many environments at once without a barrier between their calls.

A *flow* is a generator that yields what it needs (a call, or embeddings) and is sent the result. One thread advances
all flows; a ThreadPoolExecutor of `batch_size` workers carries the calls, one a worker and nothing else. Embeddings
of all flows that wait for some are computed together, in one worker of their own. Waits before a retry are timers,
they hold no worker.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.encoder import Encoder
from query_mutator.llm.client import Client
from query_mutator.types import ChatRequest, Completion, ErrorInfo

FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Call:
    """A flow needs one call; it is sent a Completion (failed for good, or an answer)."""

    request: ChatRequest


@dataclass(frozen=True, slots=True)
class Encode:
    """A flow needs embeddings of texts [n]; it is sent an array [n, D]."""

    texts: tuple[str, ...]


Need = Call | Encode
Flow = Generator[Need, Any, Any]


class RetryDelay(Protocol):
    """Says how long to wait before trying again, or None when the failure is final."""

    def __call__(self, error: ErrorInfo, attempt: int, *, key: str) -> float | None: ...


class Scheduler(Protocol):
    """Runs flows to their end; `batch_size` is the bound on calls in flight."""

    batch_size: int

    @property
    def in_progress(self) -> int:
        """Return how many flows were started and not yet returned by `finished`."""

    def start(self, key: Hashable, flow: Flow) -> None:
        """Begin a flow under a key of the caller's."""

    def finished(self, *, deadline_s: float | None = None) -> tuple[Hashable, Any]:
        """Return key and result of the next flow that ends; what a flow raises is raised here.

        `deadline_s` is a time of `time.monotonic()` after which it is a TimeoutError (0: only what is there already).
        """

    def close(self) -> None:
        """Stop the workers; idempotent."""


def run_flow(flow: Flow, *, client: Client, encoder: Encoder, retry_delay_s: RetryDelay) -> Any:
    """Run one flow to its end in the calling thread, one call at a time, and return its result."""
    result: Any = None
    while True:
        try:
            need = flow.send(result)
        except StopIteration as stop:
            return stop.value
        if isinstance(need, Encode):
            result = encoder.encode(need.texts)
        else:
            result = _call_with_retries(need.request, client, retry_delay_s)


def _call_with_retries(request: ChatRequest, client: Client, retry_delay_s: RetryDelay) -> Completion:
    for attempt in itertools.count(1):
        completion = replace(client.complete(request), attempts=attempt)
        delay_s = None
        if completion.error is not None:
            delay_s = retry_delay_s(completion.error, attempt, key=request.messages[-1].content)
        if delay_s is None:
            return completion
        time.sleep(delay_s)
    raise AssertionError("unreachable")


class SequentialScheduler:
    """One call at a time, in the order of `start`: what `--no-batching` uses."""

    batch_size = 1

    def __init__(self, *, client: Client, encoder: Encoder, retry_delay_s: RetryDelay) -> None:
        self._run: Callable[[Flow], Any] = lambda flow: run_flow(
            flow, client=client, encoder=encoder, retry_delay_s=retry_delay_s
        )
        self._waiting: deque[tuple[Hashable, Flow]] = deque()

    def start(self, key: Hashable, flow: Flow) -> None:
        """Put a flow at the end of the line."""
        self._waiting.append((key, flow))

    @property
    def in_progress(self) -> int:
        """Return how many flows wait in line."""
        return len(self._waiting)

    def finished(self, *, deadline_s: float | None = None) -> tuple[Hashable, Any]:
        """Run the first flow in line and return its key and result; nothing is ever there already."""
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise TimeoutError
        key, flow = self._waiting.popleft()
        return key, self._run(flow)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Running:
    """A flow on its way, and how often its present call was tried."""

    key: Hashable
    flow: Flow
    request: ChatRequest | None = None
    attempt: int = 0


_Event = tuple[Sequence[_Running], Any]  # the flows concerned; a Completion, embeddings per flow, or an exception


class PooledScheduler:
    """At most `batch_size` calls in flight; every flow goes on as soon as its own result is there."""

    def __init__(self, *, client: Client, encoder: Encoder, retry_delay_s: RetryDelay, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self.batch_size = batch_size
        self._client = client
        self._encoder = encoder
        self._retry_delay_s = retry_delay_s
        self._callers = ThreadPoolExecutor(max_workers=batch_size, thread_name_prefix="qm-call")
        self._encode_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qm-encode")
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._to_encode: list[tuple[_Running, Encode]] = []
        self._encoding = False
        self._timers: list[tuple[float, int, _Running]] = []
        self._timer_ids = itertools.count()
        self._done: deque[tuple[Hashable, Any]] = deque()
        self._in_progress = 0

    def start(self, key: Hashable, flow: Flow) -> None:
        """Begin a flow; it advances up to its first need at once."""
        self._in_progress += 1
        self._advance(_Running(key, flow), None)

    @property
    def in_progress(self) -> int:
        """Return how many flows are under way or ended and not yet fetched."""
        return self._in_progress + len(self._done)

    def finished(self, *, deadline_s: float | None = None) -> tuple[Hashable, Any]:
        """Return the next flow that ends, advancing the others meanwhile; IndexError when none is under way."""
        while not self._done:
            if not self._in_progress:
                raise IndexError("no flow is under way")
            if not self._handle_event(deadline_s) and deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimeoutError
        return self._done.popleft()

    def close(self) -> None:
        """Drop what waits and end the workers; calls in flight must have been cancelled through the client."""
        self._callers.shutdown(wait=True, cancel_futures=True)
        self._encode_worker.shutdown(wait=True, cancel_futures=True)

    def _advance(self, running: _Running, result: Any) -> None:
        try:
            need = running.flow.send(result)
        except StopIteration as stop:
            self._in_progress -= 1
            self._done.append((running.key, stop.value))
            return
        if isinstance(need, Encode):
            self._to_encode.append((running, need))
            self._encode_pending()
        else:
            running.request, running.attempt = need.request, 0
            self._call(running)

    def _call(self, running: _Running) -> None:
        assert running.request is not None
        running.attempt += 1
        future = self._callers.submit(self._client.complete, running.request)
        future.add_done_callback(lambda done: self._events.put(((running,), _outcome(done))))

    def _encode_pending(self) -> None:
        """Hand all waiting texts to the encoder worker, unless it is busy: then they gather for the next round."""
        if self._encoding or not self._to_encode:
            return
        self._encoding = True
        batch, self._to_encode = self._to_encode, []
        future = self._encode_worker.submit(_encode_batch, self._encoder, [need.texts for _, need in batch])
        flows = [running for running, _ in batch]
        future.add_done_callback(lambda done: self._events.put((flows, _outcome(done))))

    def _handle_event(self, deadline_s: float | None) -> bool:
        """Take one event and advance the flows it concerns; False when none came before a timer or the deadline."""
        self._fire_timers()
        try:
            flows, outcome = self._events.get(timeout=self._patience_s(deadline_s))
        except queue.Empty:
            return False
        if isinstance(outcome, BaseException):
            raise outcome
        if isinstance(outcome, Completion):
            self._take_completion(flows[0], outcome)
            return True
        self._encoding = False
        for running, vectors in zip(flows, outcome, strict=True):
            self._advance(running, vectors)
        self._encode_pending()
        return True

    def _take_completion(self, running: _Running, completion: Completion) -> None:
        completion = replace(completion, attempts=running.attempt)
        assert running.request is not None
        delay_s = None
        if completion.error is not None:
            key = running.request.messages[-1].content
            delay_s = self._retry_delay_s(completion.error, running.attempt, key=key)
        if delay_s is None:
            self._advance(running, completion)
        else:
            heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_ids), running))

    def _patience_s(self, deadline_s: float | None) -> float | None:
        times = [moment for moment in (deadline_s, self._timers[0][0] if self._timers else None) if moment is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _fire_timers(self) -> None:
        while self._timers and self._timers[0][0] <= time.monotonic():
            self._call(heapq.heappop(self._timers)[2])


def _outcome(future: Future[Any]) -> Any:
    if future.cancelled():  # dropped by `close`; asking it for more would raise in the callback
        return CancelledError()
    return future.exception() or future.result()


def _encode_batch(encoder: Encoder, groups: Sequence[tuple[str, ...]]) -> list[FloatArray]:
    vectors = encoder.encode([text for texts in groups for text in texts])
    stops = np.cumsum([len(texts) for texts in groups])
    return [vectors[stop - len(texts) : stop] for texts, stop in zip(groups, stops, strict=True)]
