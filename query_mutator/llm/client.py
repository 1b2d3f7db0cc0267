"""The one seam between the product and its models: everything that answers a ChatRequest is a Client."""

from __future__ import annotations

from typing import Protocol

from query_mutator.types import ChatRequest, Completion


class Client(Protocol):
    """Answers requests, from many threads at once; wrappers (`Retry`, `Limit`) are clients around a client."""

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply; a call that failed comes back with `Completion.error` set and is never raised."""

    def close(self) -> None:
        """End the calls in flight at once with error kind "cancelled" and free the connections; idempotent."""
