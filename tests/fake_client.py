"""A client that answers with a function, for tests of what is around a call."""

from __future__ import annotations

import threading
from collections.abc import Callable

from query_mutator.types import ChatRequest, Completion


def kind_of(completion: Completion) -> str | None:
    """Return the kind of the error of a reply, if it is one."""
    return completion.error and completion.error.kind


class FakeClient:
    """Notes the requests, fails those of which `fails` is true, and answers the others."""

    def __init__(
        self,
        answer: Callable[[ChatRequest], Completion],
        *,
        fails: Callable[[ChatRequest], bool] = lambda request: False,
        kind: str = "server",
    ) -> None:
        self.answer, self.fails, self.kind = answer, fails, kind
        self.requests: list[ChatRequest] = []
        self.closed = False

    def __repr__(self) -> str:
        return "FakeClient()"

    def prompts(self, purpose: str) -> list[str]:
        """Return the last messages of the requests for a purpose."""
        return [request.messages[-1].content for request in self.requests if request.purpose == purpose]

    @property
    def calls(self) -> int:
        """Return the number of requests."""
        return len(self.requests)

    @property
    def purposes(self) -> list[str]:
        """Return the purpose of each request."""
        return [request.purpose for request in self.requests]

    def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        return Completion.failed(self.kind, "broken for good") if self.fails(request) else self.answer(request)

    def close(self) -> None:
        self.closed = True


def script(*replies: Completion) -> FakeClient:
    """Return a client that plays replies back, the last one again and again."""
    left = list(replies)
    return FakeClient(lambda request: left.pop(0) if len(left) > 1 else left[0])


class Gate(FakeClient):
    """A client whose calls wait at a gate, which `close` opens."""

    def __init__(self, reply: Completion | None = None) -> None:
        super().__init__(self._wait)
        self.reply = reply or Completion(text="ok")
        self.entered, self.open = threading.Semaphore(0), threading.Event()

    def _wait(self, request: ChatRequest) -> Completion:
        self.entered.release()
        self.open.wait(10)
        return self.reply

    def close(self) -> None:
        self.open.set()
