"""Equal requests in flight share one call.

`join` is for a scheduler: a request whose twin is in flight holds no worker, it gets the twin's completion. `complete`
does the same for a thread, which then waits, outside the limit on calls in flight. `request_key` says which are equal.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import cast

from query_mutator.llm.cancellation import current_cancellation
from query_mutator.llm.client import Client, ClientWrapper
from query_mutator.types import ChatRequest, Completion

Deliver = Callable[[Completion], None]
Work = Callable[[], None]
_Key = tuple[str, int, bool]

_LEFT = "the call that was shared was cancelled by its caller"  # the others try again


_encode = json.JSONEncoder(sort_keys=True).encode


def is_repeatable(request: ChatRequest) -> bool:
    """Return whether two equal requests mean one reply: not if it is sampled at random and no draw is named."""
    return request.temperature == 0 or request.seed is not None or request.sample is not None


def request_key(request: ChatRequest, *, identity: str = "") -> str:
    """Return a sha256 of everything that decides a reply; `identity` stands for the model's weights and how they run.

    The purpose of a call is not part of it: mutator and target may share a reply.
    """
    if identity:
        return _key(request, identity)
    if not request.known_key:  # two threads that get here at once write the same
        object.__setattr__(request, "known_key", _key(request, request.model))
    return request.known_key


def _key(request: ChatRequest, identity: str) -> str:
    """Return the sha256 of a JSON list; the numbers are the same from call to call and encoded once."""
    messages = ", ".join([f"[{quoted(message.role)}, {quoted(message.content)}]" for message in request.messages])
    numbers = _encoded(request.max_tokens, request.temperature, request.seed, request.sample)
    options = _encode(dict(request.options)) if request.options else "{}"
    form = ""
    if request.json_schema is not None or request.think or request.choices or request.logprobs:
        form = f", {_encode([request.json_schema, request.think, request.choices, request.logprobs])}"
    return hashlib.sha256(f"[{quoted(identity)}, [{messages}], {numbers}, {options}{form}]".encode()).hexdigest()


@lru_cache(maxsize=256, typed=True)  # typed: 0 and 0.0 are written differently
def _encoded(*values: float | None) -> str:
    return _encode(values)[1:-1]


def join(client: Client, request: ChatRequest, deliver: Deliver) -> Work | None:
    """Return what `client.join` returns; for a client without it, the call itself."""
    if hasattr(client, "join"):
        return cast(JoiningClient, client).join(request, deliver)
    return lambda: deliver(client.complete(request))


def abandon(work: Work) -> None:
    """Let who waits for a call that will not be made try again."""
    if isinstance(work, _Lead):
        work.abandon()


class JoiningClient(ClientWrapper):
    """A wrapper that knows before a call whether there is one to make."""

    def join(self, request: ChatRequest, deliver: Deliver) -> Work | None:
        """Return the call to make in a worker, or None when there is none to make; `deliver` gets the completion.

        `deliver` is called once, in the thread that has the completion first, perhaps before `join` returns.
        """
        return join(self._client, request, deliver)

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
            if reply.error is None or reply.error.message != _LEFT:
                return reply


class Coalesce(JoiningClient):
    """A client that makes one call for all equal requests that arrive while it is in flight."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._waiting: dict[_Key, list[Deliver]] = {}  # request in flight -> who else wants its completion
        self._lock = threading.Lock()  # guards the above and the counter
        self.shared = 0  # completions that cost no call

    def join(self, request: ChatRequest, deliver: Deliver) -> Work | None:
        """Return the call to make, or None when an equal request is in flight, whose completion costs no attempt."""
        if not is_repeatable(request):
            return super().join(request, deliver)
        # A retry never shares a first attempt, nor the reverse; a deadline may end a call that others could wait for.
        key = (request_key(request), request.attempt, request.deadline is not None)
        with self._lock:
            if key in self._waiting:
                self._waiting[key].append(deliver)
                self.shared += 1
                return None
            self._waiting[key] = []
        return _Lead(lambda: self._lead(key, request, deliver), lambda: self._share(key, _left()))

    def _lead(self, key: _Key, request: ChatRequest, deliver: Deliver) -> None:
        """Make the call and deliver its completion to all who wait for it."""

        cancellation = current_cancellation()

        def share(completion: Completion) -> None:
            try:
                deliver(completion)  # first, so that a cache has the reply before the next equal request arrives
            finally:
                is_ours = cancellation is not None and cancellation.is_set and not completion.ok
                self._share(key, _left() if is_ours else completion)

        try:
            work = join(self._client, request, share)
            if work is not None:
                work()
        except BaseException:
            self._share(key, Completion.failed("cancelled", "the shared call was cancelled"))
            raise

    def _share(self, key: _Key, completion: Completion) -> None:
        with self._lock:
            followers = self._waiting.pop(key, ())
        for follower in followers:
            follower(_shared(completion))


@dataclass(frozen=True, slots=True)
class _Lead:
    """The call that others wait for, and what is done where it is not made."""

    call: Work
    abandon: Work

    def __call__(self) -> None:
        self.call()


def _left() -> Completion:
    return Completion.failed("incomplete", _LEFT)


def _shared(completion: Completion) -> Completion:
    """Return the completion as one that cost nothing: the call is counted where it was made."""
    return replace(completion, attempts=0)
