"""Identical requests in flight share one call.

`join` is for a scheduler: a request whose twin is under way holds no worker, its completion is handed over when the
twin's comes. `complete` is the same for a thread of one's own, which then waits, outside the limit on calls in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, cast

from query_mutator.llm.client import Client
from query_mutator.llm.keys import is_repeatable, request_key
from query_mutator.types import ChatRequest, Completion

Deliver = Callable[[Completion], None]
Work = Callable[[], None]
_Key = tuple[str, int]


class Joining(Client, Protocol):
    """A client that can tell before a call whether there is one to make."""

    def join(self, request: ChatRequest, deliver: Deliver) -> Work | None:
        """Return the call to make in a worker, or None when there is none to make; `deliver` gets the completion.

        It is called once, in whichever thread has the completion first, perhaps before `join` returns.
        """


def join(client: Client, request: ChatRequest, deliver: Deliver) -> Work | None:
    """Return what `client.join` does; for a client that cannot, the call itself."""
    if hasattr(client, "join"):
        return cast(Joining, client).join(request, deliver)
    return lambda: deliver(client.complete(request))


def complete_by_joining(client: Joining, request: ChatRequest) -> Completion:
    """Return the completion of a joining client, making the call in this thread or waiting for a twin's."""
    arrived = threading.Event()
    replies: list[Completion] = []

    def deliver(completion: Completion) -> None:
        replies.append(completion)
        arrived.set()

    work = client.join(request, deliver)
    if work is not None:
        work()
    arrived.wait()
    return replies[0]


class Coalesce:
    """A client that makes one call for all equal requests that come while it is under way."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[_Key, list[Deliver]] = {}  # request in flight -> who wants its completion beside the caller
        self._lock = threading.Lock()  # guards the above and the counter
        self.shared = 0  # completions that cost no call

    def __repr__(self) -> str:
        return f"Coalesce({self._client!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the inner client's completion, or that of an equal request under way (`attempts` is then 0)."""
        return complete_by_joining(self, request) if is_repeatable(request) else self._client.complete(request)

    def join(self, request: ChatRequest, deliver: Deliver) -> Work | None:
        """Return the call to make, or None when an equal request is under way; `deliver` gets the completion."""
        if not is_repeatable(request):
            return lambda: deliver(self._client.complete(request))
        key = (request_key(request), request.attempt)  # a repeated call shares no first one, nor the reverse
        with self._lock:
            if key in self._waiting:
                self._waiting[key].append(deliver)
                self.shared += 1
                return None
            self._waiting[key] = []
        return lambda: self._lead(key, request, deliver)

    def close(self) -> None:
        """Close the client within, which ends the calls others wait for; idempotent."""
        self._client.close()

    def _lead(self, key: _Key, request: ChatRequest, deliver: Deliver) -> None:
        completion = Completion.failed("cancelled", "the call it shared was given up")
        try:
            completion = self._client.complete(request)
            deliver(completion)  # first, so that a cache has the reply before the next equal request can come
        finally:
            with self._lock:
                followers = self._waiting.pop(key)
            for follower in followers:
                follower(_shared(completion))


def _shared(completion: Completion) -> Completion:
    """Return the completion without what it cost: that is counted where the call was made."""
    return Completion(
        text=completion.text,
        model=completion.model,
        error=completion.error,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        attempts=0,
    )
