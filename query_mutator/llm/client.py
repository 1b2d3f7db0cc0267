"""The seams between the product and its models: everything that answers a ChatRequest is a Client.

Client                    Retry, Limit, Coalesce, Cache, ...: wrappers around a client
└── Backend               at a server's edge, embeddings too: Ollama, OpenAI; Pool, EarlyStop: wrappers around those
    └── StreamingBackend  can end a reply early
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from query_mutator.types import ChatRequest, Completion, ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]


class Client(Protocol):
    """Answers requests, from many threads at once; wrappers (`Retry`, `Limit`) are clients around a client."""

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply; a call that failed comes back with `Completion.error` set and is never raised."""

    def close(self) -> None:
        """End the calls in flight at once with error kind "cancelled" and free the connections; idempotent."""


class Backend(Client, Protocol):
    """A client at a server's edge, which makes embeddings too."""

    @property
    def url(self) -> str:
        """Where the server is."""

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the embeddings of texts [n, dim] (zeros for an empty text), or why there are none."""


class StreamingBackend(Backend, Protocol):
    """A backend that reads a reply as it is written and may leave before its end."""

    def complete_until(self, request: ChatRequest, is_enough: Callable[[str], bool]) -> Completion:
        """Return the reply, or its beginning once `is_enough` is true of it: then the connection is closed.

        A beginning has counts of what came (a piece is a token) and no times: the server reports them at the end.
        """
