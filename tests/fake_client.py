"""A client that answers with a function, for tests of what is around a call."""

from __future__ import annotations

from collections.abc import Callable

from query_mutator.types import ChatRequest, Completion


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

    def __repr__(self) -> str:
        return "FakeClient()"

    def prompts(self, purpose: str) -> list[str]:
        """Return the last messages of the requests for a purpose."""
        return [request.messages[-1].content for request in self.requests if request.purpose == purpose]

    @property
    def purposes(self) -> list[str]:
        """Return the purpose of each request."""
        return [request.purpose for request in self.requests]

    def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        return Completion.failed(self.kind, "broken for good") if self.fails(request) else self.answer(request)

    def close(self) -> None:
        """Nothing is held."""
