"""The client of a run, layer by layer, each with what a caller may want to ask it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from query_mutator.errors import BackendError
from query_mutator.llm.cache import ReplyStore
from query_mutator.llm.client import Backend, Client
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.counted import Counted
from query_mutator.llm.early_stop import EarlyStop
from query_mutator.llm.limits import Limit
from query_mutator.llm.retry import Retry
from query_mutator.llm.same_models import ModelServer, require_same_models
from query_mutator.types import ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStack:
    """The layers around one server or several; all kinds of calls share the one bound of `limit`."""

    servers: tuple[ModelServer, ...]
    early_stops: tuple[EarlyStop, ...]  # one a server, none without early stopping
    backend: Backend  # the server, or the pool of all
    limit: Limit  # one attempt a call; its `limit` moves where it is adaptive
    retry: Retry  # tries again in the calling thread
    whole: Client  # all layers, for callers that wait for one call
    client: Client  # all but Retry, for a scheduler that waits before retries itself
    eval_client: Client  # the same for evaluation, which may have the cache to itself
    counted: Counted  # what the calls of `client` cost; shared and remembered replies cost nothing
    eval_counted: Counted  # those of `eval_client`
    coalesced: tuple[Coalesce, ...]
    store: ReplyStore | None  # what the cache remembers, and how often it was asked
    allow_mixed: bool = False

    @property
    def tokens_saved(self) -> int:
        """Return the estimate of tokens that early stopping kept from being written."""
        return sum(stop.tokens_saved for stop in self.early_stops)

    @property
    def shared_calls(self) -> int:
        """Return how many replies were those of an equal request in flight."""
        return sum(layer.shared for layer in self.coalesced)

    @property
    def cache_hits(self) -> int:
        """Return how many replies were remembered."""
        return self.store.hits if self.store is not None else 0

    def require_models(self, models: Sequence[str]) -> None:
        """Raise ModelMissingError unless every server has all models, UsageError when their weights differ."""
        require_same_models(self.servers, models, allow_mixed=self.allow_mixed)

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray:
        """Return embeddings of texts [n, dim] from a server; BackendError when it fails for good."""
        reply, _ = self.retry.call(lambda _: self._embed_once(model, texts), error_of=_error_of, key=model)
        if isinstance(reply, ErrorInfo):
            raise BackendError(f"{self.backend.url} gave no embeddings from {model!r} ({reply})")
        return reply

    def close(self) -> None:
        """End calls in flight and close connections and cache; idempotent."""
        self.retry.close()
        if self.store is not None:
            self.store.close()

    def _embed_once(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        with self.limit.slot():
            return self.backend.embed(model, texts)


def _error_of(reply: FloatArray | ErrorInfo) -> ErrorInfo | None:
    return reply if isinstance(reply, ErrorInfo) else None
