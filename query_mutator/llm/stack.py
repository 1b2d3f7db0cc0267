"""The client of a run, composed by wrapping; its repr prints the nesting:

    Cache(Coalesce(Counted(Limit(WaitForServer(Pool([Ollama('http://…'), Ollama('http://…')]))))))

A layer that was not requested is left out.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.away import WaitForServer
from query_mutator.llm.backends import DEFAULT_BACKEND, open_servers
from query_mutator.llm.client import Backend, Client, ModelServer
from query_mutator.llm.coalesce import Coalesce, Deliver, JoiningClient, Work
from query_mutator.llm.limit import AdaptiveLimit, Limit
from query_mutator.llm.pool import Pool, error_of, require_same_models
from query_mutator.llm.retry import Retry, RetryPolicy
from query_mutator.llm.store import Cache, Identity, Store, default_cache_path
from query_mutator.settings.calls import DIRECT, Calls
from query_mutator.types import ChatRequest, Completion, ErrorInfo, FloatArray

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTotals:
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

    @classmethod
    def of(cls, completion: Completion) -> CallTotals:
        """Return the sums over one call."""
        return cls(
            calls=1,
            failed=int(not completion.ok),
            latency_s=completion.latency_s,
            queue_wait_s=completion.queue_wait_s,
            service_s=completion.prompt_eval_s + completion.eval_s,
            tokens=completion.prompt_tokens + completion.completion_tokens,
            reply_tokens=completion.completion_tokens,
            cut_replies=int(completion.ok and completion.hit_limit),
        )

    @property
    def cut_share(self) -> float:
        """Return the share of the replies that ended at the token limit."""
        return self.cut_replies / max(1, self.calls - self.failed)

    def __add__(self, other: CallTotals) -> CallTotals:
        """Return the sums over both."""
        return CallTotals(**{name: getattr(self, name) + getattr(other, name) for name in _TOTALS})

    def __sub__(self, earlier: CallTotals) -> CallTotals:
        """Return what was added since `earlier`."""
        return CallTotals(**{name: getattr(self, name) - getattr(earlier, name) for name in _TOTALS})


_TOTALS = tuple(field.name for field in fields(CallTotals))


class Counted(JoiningClient):
    """A client that keeps totals of the inner client's calls; every attempt counts as one."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.totals = CallTotals()
        self.error_kinds: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the two above

    def join(self, request: ChatRequest, deliver: Deliver) -> Work | None:
        """Return the call to make; `deliver` gets the completion once it is counted."""

        def count(completion: Completion) -> None:
            self.add(completion, attempt=request.attempt)
            deliver(completion)

        return super().join(request, count)

    def add(self, completion: Completion, *, attempt: int = 1) -> None:
        """Count a call that was made."""
        one = replace(CallTotals.of(completion), retries=int(attempt > 1))
        with self._lock:
            self.totals += one
            if completion.error is not None:
                self.error_kinds[completion.error.kind] += 1

    def add_all(self, totals: CallTotals, error_kinds: Mapping[str, int]) -> None:
        """Count calls that another process made."""
        with self._lock:
            self.totals += totals
            self.error_kinds.update(error_kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStack:
    """The layers around one server or several; all kinds of calls share the one bound of `limit`.

    The servers are of one backend and have the same models, so what one says of a model holds for all.
    """

    servers: tuple[ModelServer, ...]
    backend: Backend  # the server, or the pool of all
    limit: Limit  # one attempt per call; its `limit` moves where it is adaptive
    retry: Retry  # retries in the calling thread
    client: Cache  # all but Retry, for a scheduler that waits before retries itself
    eval_client: Cache  # the same for evaluation, which may have the cache to itself
    counted: Counted  # the cost of the calls of `client`; shared and stored replies cost nothing
    eval_counted: Counted  # that of `eval_client`
    coalesced: tuple[Coalesce, ...]
    identity: Identity  # of the models, for the store
    cache: Store | None  # replies that all runs share
    away: WaitForServer | None  # waits while no server answers
    allow_mixed: bool

    @property
    def backend_class(self) -> type[ModelServer]:
        """Return the class of the servers, which holds what they report and what advice to give about them."""
        return type(self.servers[0])

    @property
    def shared_calls(self) -> int:
        """Return how many replies were those of an equal request in flight."""
        return sum(layer.shared for layer in self.coalesced)

    @property
    def cache_hits(self) -> int:
        """Return how many replies were stored before."""
        return self.client.hits + self.eval_client.hits

    def keep(self, run: Store) -> None:
        """Look into the store of a run first from now on, and write every reply there."""
        self.client.run = self.eval_client.run = run

    def require_models(self, models: Sequence[str]) -> None:
        """Raise ModelMissingError unless every server has all models, UsageError when their weights differ."""
        require_same_models(self.servers, models, allow_mixed=self.allow_mixed)
        for model in models:
            self.identity(model)  # now, so that stored replies are found while no server answers
        if self.away is not None:
            self.away.answered()

    def embed(
        self, model: str, texts: Sequence[str], keep: Callable[[FloatArray], None] = lambda rows: None
    ) -> FloatArray:
        """Return embeddings of texts [n, dim] from a server; BackendError when it fails for good.

        `keep` is called with them before the call gives up its place among those in flight.
        """
        reply, _ = self.retry.call(lambda _: self._embed_once(model, texts, keep), error_of=error_of, key=model)
        if isinstance(reply, ErrorInfo):
            about = _longest(texts) if reply.kind == "prompt_too_long" else ""
            raise BackendError(
                f"{self.backend.url} gave no embeddings from {model!r} ({about}{reply})", kind=reply.kind
            )
        return reply

    def _embed_once(
        self, model: str, texts: Sequence[str], keep: Callable[[FloatArray], None]
    ) -> FloatArray | ErrorInfo:
        with self.limit:
            reply = self.backend.embed(model, texts)
            if not isinstance(reply, ErrorInfo):
                keep(reply)
            return reply

    def close(self) -> None:
        """Cancel calls in flight and close connections and cache; idempotent."""
        self.retry.close()
        if self.cache is not None:
            self.cache.close()


def build_client(
    urls: str | Sequence[str],
    settings: Calls = DIRECT,
    *,
    backend: str = DEFAULT_BACKEND,
    show: Callable[[str], None] = lambda line: None,
    **changes: Any,
) -> ClientStack:
    """Return the composed client for one server or several; `changes` are fields of `settings`.

    `cache="auto"` is `all` here. `show` is called
    with a line while no server answers (`wait_for_server_s`). A default `cache_path` that cannot be used costs a
    warning and the cache, a named one is a UsageError.
    """
    settings = replace(settings, **changes) if changes else settings
    options = {} if settings.num_ctx is None else {"num_ctx": settings.num_ctx}
    servers = open_servers(
        backend,
        [urls] if isinstance(urls, str) else urls,
        timeout_s=settings.timeout_s,
        pool_size=settings.calls_in_flight,
        keep_alive=settings.keep_alive,
        runner_options=options,
        max_reply_mb=settings.max_reply_mb,
    )
    pool: Backend = servers[0] if len(servers) == 1 else Pool(servers)
    wait_s, size = settings.wait_for_server_s, settings.calls_in_flight
    away = WaitForServer(pool, servers, wait_s=wait_s, show=show) if wait_s else None
    edge = away or pool
    limit = AdaptiveLimit(edge, highest=size) if settings.adaptive else Limit(edge, limit=size)
    cache = None if settings.cache == "off" else _open_cache(settings.cache_path)
    identity = Identity(servers, extra=str(sorted(options.items())))
    counted, eval_counted = Counted(limit), Counted(limit)
    shared, eval_shared = Coalesce(counted), Coalesce(eval_counted)
    return ClientStack(
        servers=servers,
        backend=edge,
        limit=limit,
        retry=Retry(limit, RetryPolicy(max_retries=settings.max_retries, deadline_s=settings.deadline_s)),
        client=Cache(shared, identity=identity, shared=None if settings.cache == "eval" else cache, count=counted.add),
        eval_client=Cache(eval_shared, identity=identity, shared=cache, count=eval_counted.add),
        counted=counted,
        eval_counted=eval_counted,
        coalesced=(shared, eval_shared),
        identity=identity,
        cache=cache,
        away=away,
        allow_mixed=settings.allow_mixed,
    )


def _longest(texts: Sequence[str]) -> str:
    longest = max(texts, key=len)
    return f"the longest of {len(texts)} texts has {len(longest)} characters: {longest[:_SHOWN_CHARS]!r}; "


def _open_cache(path: Path | str | None) -> Store | None:
    try:
        return Store(path or default_cache_path(), is_cache=True)
    except UsageError as error:
        if path is not None:
            raise
        logger.warning("%s; continuing without a cache", error)
        return None
