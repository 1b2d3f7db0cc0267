"""The client that a run calls: equal requests cost one call, and what was paid is counted and written.

A request is looked for in the stores first. One whose twin is in flight gets the twin's completion; any other is a
call. `join` is for a scheduler: a request that needs no call of its own holds no worker. `complete` does the same for a
thread, which then waits, outside the limit on calls in flight. `request_key` says which requests are equal.
"""

from __future__ import annotations

import hashlib
import operator
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from query_mutator.errors import BackendError
from query_mutator.files import encode
from query_mutator.llm.client import CANCELLATION, Client, ClientWrapper
from query_mutator.llm.store import Store
from query_mutator.types import ChatRequest, Completion

Deliver = Callable[[Completion], None]
Work = Callable[[], None]
_Twins = tuple[str, int, bool]

_LEFT = Completion.failed("incomplete", "the call that was shared was cancelled by its caller")  # the others try again


def is_repeatable(request: ChatRequest) -> bool:
    """Return whether two equal requests mean one reply: not if it is sampled at random and no draw is named."""
    return request.temperature == 0 or request.seed is not None or request.sample is not None


def request_key(request: ChatRequest, *, identity: str = "") -> str:
    """Return a sha256 of everything that decides a reply; `identity` stands for the model's weights and how they run.

    The purpose of a call is not part of it: mutator and target may share a reply.
    """
    decides = [
        identity or request.model,
        [[message.role, message.content] for message in request.messages],
        [request.max_tokens, request.temperature, request.seed, request.sample],
        dict(request.options),
        [request.json_schema, request.logprobs, request.think],
    ]
    return hashlib.sha256(encode(decides, sort_keys=True)).hexdigest()


def join(client: Client, request: ChatRequest, deliver: Deliver) -> Work | None:
    """Return the call to make in a worker, or None when there is none to make; `deliver` gets the completion.

    `deliver` is called once, in the thread that has the completion first, perhaps before `join` returns.
    """
    if hasattr(client, "join"):
        return cast("Cache", client).join(request, deliver)
    return lambda: deliver(client.complete(request))


def abandon(work: Work) -> None:
    """Let who waits for a call that will not be made try again."""
    if isinstance(work, _Lead):
        work.share(_LEFT)


class CallTotals(NamedTuple):
    """Sums over completed calls; times in seconds."""

    calls: int = 0
    failed: int = 0
    retries: int = 0  # calls after a failed attempt
    latency_s: float = 0.0  # what the client waited
    queue_wait_s: float = 0.0  # of that, what the server queued the calls
    service_s: float = 0.0  # and what it worked on them
    tokens: int = 0  # prompts and replies together
    reply_tokens: int = 0  # those of the replies
    cut_replies: int = 0  # that ended at the token limit

    @property
    def cut_share(self) -> float:
        """Return the share of the replies that ended at the token limit."""
        return self.cut_replies / max(1, self.calls - self.failed)

    def __add__(self, other: CallTotals) -> CallTotals:  # type: ignore[override]
        """Return the sums over both."""
        return CallTotals(*map(operator.add, self, other))

    def __sub__(self, earlier: CallTotals) -> CallTotals:
        """Return what was added since `earlier`."""
        return CallTotals(*map(operator.sub, self, earlier))


class Cache(ClientWrapper):
    """A client that makes one call for equal requests; every call and attempt is in `totals`.

    `run` is the store of a run, `shared` that of all runs; `identity(model)` names the weights for them. A stored or
    shared reply has the times of its call, and `attempts` 0, unless a rollout that is played again had paid for it.
    """

    def __init__(
        self,
        client: Client,
        *,
        identity: Callable[[str], str] = str,
        run: Store | None = None,
        shared: Store | None = None,
    ) -> None:
        super().__init__(client)
        self.run, self._shared, self._identity = run, shared, identity
        self._waiting: dict[_Twins, list[Deliver]] = {}  # request in flight -> who else wants its completion
        self._lock = threading.Lock()  # guards the above and the counters
        self.totals = CallTotals()
        self.error_kinds: Counter[str] = Counter()
        self.hits = 0  # replies that were stored before
        self.shared_calls = 0  # replies that were those of an equal request in flight

    def join(self, request: ChatRequest, deliver: Deliver) -> Work | None:
        """Return the call to make, or None when its reply is stored or an equal request is in flight."""
        if self.is_instant or not is_repeatable(request):
            return lambda: self._paid(request, self._client.complete(request), deliver)
        key = self._stored_key(request)
        if key is not None:
            found = self._find(key, request)
            if found is not None:
                self.hits += 1
                deliver(found)
                return None
        after = self._after(request, deliver)
        if key is not None:
            deliver = self._keeping(key, request, deliver)
        # A retry never shares a first attempt, nor the reverse; a deadline may end a call that others could wait for.
        how = request.attempt, request.deadline is not None
        waits = {(key or request_key(request), *how): deliver}
        if request.samples > 1:  # one sample is asked for alone: the others may come with it
            waits[request_key(replace(request, sample=None)), *how] = after
        with self._lock:
            for place, wait in waits.items():
                if place in self._waiting:
                    self._waiting[place].append(wait)
                    self.shared_calls += wait is not after
                    return None
            self._waiting |= {place: [] for place in waits}
        lead = _Lead(self, (*waits,), request, deliver)
        # The reply of an equal call may have been stored since it was looked for above.
        found = None if key is None else self._find(key, request)
        if found is None:
            return lead
        self.hits += 1
        deliver(found)
        lead.share(found)
        return None

    def complete(self, request: ChatRequest) -> Completion:
        """Return the completion, making the call in this thread or waiting for a twin, at most until the deadline."""
        while True:
            replies: queue.SimpleQueue[Completion] = queue.SimpleQueue()
            work = self.join(request, replies.put)
            if work is not None:
                work()
            left_s = None if request.deadline is None else max(0.0, request.deadline - time.monotonic())
            try:
                reply = replies.get(timeout=left_s)
            except queue.Empty:
                return Completion.failed("timeout", "the deadline passed while an equal call was in flight")
            if reply.error != _LEFT.error:
                return reply

    def add(self, totals: CallTotals, error_kinds: Mapping[str, int]) -> None:
        """Count calls that were made, here or in another process."""
        with self._lock:
            self.totals += totals
            self.error_kinds.update(error_kinds)

    def close(self) -> None:
        """Close the inner client and the shared store; idempotent."""
        super().close()
        if self._shared is not None:
            self._shared.close()

    def _stored_key(self, request: ChatRequest) -> str | None:
        """Return the key of a request in the stores; None without any, or where nobody can name the weights."""
        if self.run is None and self._shared is None:
            return None
        try:
            return request_key(request, identity=self._identity(request.model))
        except BackendError:  # the call itself reports what is wrong
            return None

    def _find(self, key: str, request: ChatRequest) -> Completion | None:
        found = None if self.run is None else self.run.find(key, request)
        if found is not None:
            reply, is_paid = found
            if not is_paid:
                return replace(reply, attempts=0)
            self._count(request, reply)
            error = reply.error and replace(reply.error, retry_after_s=None)
            return replace(reply, error=error)
        found = None if self._shared is None else self._shared.find(key, request)
        if found is None:
            return None
        reply = replace(found[0], attempts=0)
        if self.run is not None:
            self.run.put(key, request, reply)
        return reply

    def _keeping(self, key: str, request: ChatRequest, deliver: Deliver) -> Deliver:
        """Return `deliver` for a completion that is written first."""

        def keep(reply: Completion) -> None:
            if self.run is not None and (reply.attempts or not reply.ok):  # 0: a shared call, which its leader stores
                self.run.put(key, request, reply)
            if self._shared is not None and reply.attempts:
                self._shared.put(key, request, reply)
            deliver(reply)

        return keep

    def _after(self, request: ChatRequest, deliver: Deliver) -> Deliver:
        """Return what has a further sample delivered once the first is there: as it came with it, or by a call."""

        def after(first: Completion) -> None:
            if not first.ok:
                deliver(first)
            elif work := self.join(replace(request, samples=1), deliver):
                work()

        return after

    def _keep_others(self, request: ChatRequest, reply: Completion) -> None:
        """Write the samples that came with a reply under the numbers that follow its own."""
        for number, other in enumerate(reply.others):
            one = replace(request, sample=((request.sample or 0) + 1 + number) % request.samples)
            self.add(CallTotals(tokens=other.completion_tokens, reply_tokens=other.completion_tokens), {})
            key = self._stored_key(one) if other.ok else None
            if key is not None and self._find(key, one) is None:
                self._keeping(key, one, lambda kept: None)(other)

    def _paid(self, request: ChatRequest, reply: Completion, deliver: Deliver) -> None:
        self._count(request, reply)
        deliver(reply)

    def _count(self, request: ChatRequest, reply: Completion) -> None:
        if not reply.attempts:  # another cache below this one had it
            self.shared_calls += 1
            return
        totals = CallTotals(
            calls=1,
            failed=int(not reply.ok),
            retries=int(request.attempt > 1),
            latency_s=reply.latency_s,
            queue_wait_s=reply.queue_wait_s,
            service_s=reply.prompt_eval_s + reply.eval_s,
            tokens=reply.prompt_tokens + reply.completion_tokens,
            reply_tokens=reply.completion_tokens,
            cut_replies=int(reply.ok and reply.hit_limit),
        )
        self.add(totals, {} if reply.error is None else {reply.error.kind: 1})


@dataclass(frozen=True, slots=True)
class _Lead:
    """A call whose completion others may wait for."""

    cache: Cache
    twins: tuple[_Twins, ...]  # equal requests, and further samples
    request: ChatRequest
    deliver: Deliver

    def __call__(self) -> None:
        """Make the call and deliver its completion to all who wait for it."""
        cancellation = CANCELLATION.get()
        reply = Completion.failed("cancelled", "the shared call was cancelled")
        try:
            reply = self.cache._client.complete(self.request)
            self.cache._keep_others(self.request, reply)
            reply = replace(reply, others=())
            # First, so that a store has the reply before the next equal request arrives.
            self.cache._paid(self.request, reply, self.deliver)
        finally:
            self.share(_LEFT if cancellation.is_set and not reply.ok else reply)

    def share(self, reply: Completion) -> None:
        """Deliver a completion to the others, as one that cost nothing: the call is counted where it was made."""
        with self.cache._lock:
            others = [one for place in self.twins for one in self.cache._waiting.pop(place, ())]
        for deliver in others:
            deliver(replace(reply, attempts=0))
