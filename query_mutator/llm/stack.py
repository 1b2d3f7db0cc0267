"""The client of a run, composed by wrapping; its repr prints the nesting:

Cache(Limit(Pool([Ollama('http://…'), Ollama('http://…')])))
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from query_mutator.errors import UsageError
from query_mutator.llm.backends import BACKENDS, DEFAULT_BACKEND, backend_for
from query_mutator.llm.cache import Cache
from query_mutator.llm.client import Client, ClientWrapper, ModelServer
from query_mutator.llm.limit import Limit
from query_mutator.llm.openai import OpenAIBackend, key_of
from query_mutator.llm.pool import Pool
from query_mutator.llm.retry import Retry, RetryPolicy
from query_mutator.llm.store import Store, default_cache_path
from query_mutator.settings import DIRECT, Calls, flag_of
from query_mutator.types import ChatRequest, Completion

MAX_FILES = 65_536
OTHER_FILES = 28  # of a trainer, in addition to its connections; 20 were seen

logger = logging.getLogger(__name__)

_SHOWN_CHARS = 12  # of a digest, as in `ollama list`


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStack:
    """The layers around one server or several; all calls share the one bound of `limit`.

    The servers are of one backend and have the same models, so what one says of a model holds for all.
    """

    servers: tuple[ModelServer, ...]
    pool: Pool
    limit: Limit  # one attempt per call; its `limit` moves where it is adaptive
    retry: Retry  # retries in the calling thread
    client: Cache  # without retries, for a scheduler that waits before them itself; counts what its calls cost
    eval_client: Cache  # the same for evaluation, which may have the store of all runs to itself
    identity: Callable[[str], str]  # of the models, for the store
    elsewhere: Mapping[str, ModelServer]  # models that another server has

    def server_of(self, model: str) -> ModelServer:
        """Return a server that has a model."""
        return self.elsewhere.get(model, self.servers[0])

    @property
    def backend_class(self) -> type[ModelServer]:
        """Return the class of the servers, which holds what they report and what advice to give about them."""
        return type(self.servers[0])

    @property
    def shared_calls(self) -> int:
        """Return how many replies were those of an equal request in flight."""
        return self.client.shared_calls + self.eval_client.shared_calls

    @property
    def cache_hits(self) -> int:
        """Return how many replies were stored before."""
        return self.client.hits + self.eval_client.hits

    def keep(self, run: Store) -> None:
        """Look into the store of a run first from now on, and write every reply there."""
        self.client.run = self.eval_client.run = run

    def require_models(self, models: Sequence[str]) -> None:
        """Raise ModelMissingError unless every server has all models, UsageError when their weights differ."""
        for model in models:
            self.identity(model)  # now, so that stored replies are found while no server answers
        self.pool.has_answered = True

    def close(self) -> None:
        """Cancel calls in flight and close connections and cache; idempotent."""
        self.retry.close()
        self.eval_client.close()


def build_client(
    urls: str | Sequence[str],
    settings: Calls = DIRECT,
    *,
    backend: str = DEFAULT_BACKEND,
    show: Callable[[str], None] = lambda line: None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    **changes: Any,
) -> ClientStack:
    """Return the composed client for one server or several; `changes` are fields of `settings`.

    Calls to a model that is `elsewhere` go to the address there alone.
    `cache="auto"` is `all` here. `show` is called with a line while no server answers (`wait_for_server_s`). A default
    `cache_path` that cannot be used costs a warning and the cache, a named one is a UsageError.
    """
    settings = replace(settings, **changes) if changes else settings
    options = {} if settings.num_ctx is None else {"num_ctx": settings.num_ctx}
    how: dict[str, Any] = {
        "timeout_s": settings.timeout_s,
        "pool_size": settings.calls_in_flight,
        "keep_alive": settings.keep_alive,
        "runner_options": options,
        "max_reply_mb": settings.max_reply_mb,
    }
    servers = BACKENDS.get(backend).open([urls] if isinstance(urls, str) else urls, **how)
    others = {model: open_elsewhere(url, **how) for model, url in elsewhere.items()}
    _allow_open_files(settings, servers=len(servers) + len(others))
    wait: dict[str, Any] = {"wait_s": settings.wait_for_server_s, "show": show}
    pool = Pool(servers, **wait)
    routes = ByModel(pool, {model: Pool([server], **wait) for model, server in others.items()})
    limit = Limit(routes if others else pool, limit=settings.calls_in_flight, is_adaptive=settings.adaptive)
    cache = None if settings.cache == "off" else _open_cache(settings.cache_path)

    @functools.cache
    def identity(model: str) -> str:
        return identity_of(model, [others[model]] if model in others else servers, num_ctx=settings.num_ctx)

    return ClientStack(
        servers=servers,
        pool=pool,
        limit=limit,
        retry=Retry(limit, RetryPolicy(max_retries=settings.max_retries)),
        client=Cache(limit, identity=identity, shared=None if settings.cache == "eval" else cache),
        eval_client=Cache(limit, identity=identity, shared=cache),
        identity=identity,
        elsewhere=others,
    )


def _allow_open_files(settings: Calls, *, servers: int) -> None:
    """Raise the limit of open files as far as it may; UsageError if a connection for each call in flight exceeds it.

    A request to `qm serve` takes another one.
    """
    with suppress(ImportError):
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        each = max(1, servers)
        needed = OTHER_FILES + each * settings.calls_in_flight
        if needed > files:
            raise UsageError(
                f"--batch-size {settings.batch_size} needs about {needed} open files, and {files} are allowed; allow "
                f"more with `ulimit -n {needed}`, or give --batch-size {max(1, (files - OTHER_FILES) // each)}"
            )


class ByModel(ClientWrapper):
    """A client whose calls to some models go to clients of their own."""

    def __init__(self, client: Client, others: Mapping[str, Client]) -> None:
        super().__init__(client)
        self._others = others
        self.is_instant = self.is_instant and not others

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of the client that has the request's model."""
        return self._others.get(request.model, self._client).complete(request)

    def close(self) -> None:
        """Close all clients; idempotent."""
        for client in (self._client, *self._others.values()):
            client.close()


def open_elsewhere(url: str, **how: Any) -> ModelServer:
    """Return the server at an address that comes with a model's name; a key goes only where it belongs."""
    flag = flag_of(url)
    backend = BACKENDS.get(backend_for(flag))
    if flag == "openai_url":
        how = how | {"environ": {OpenAIBackend.key_variable: key_of(url, os.environ)}}
    return backend.open([url], **how)[0]


def identity_of(model: str, servers: Sequence[ModelServer], *, num_ctx: int | None) -> str:
    """Return what names the weights behind a model's name and how they run, after asking the servers.

    That is the model's digest, or its name and server where there is none, and the context. BackendError when a server
    does not answer, or does not have the model; UsageError when digests differ: a reply would depend on which server
    was free.
    """
    digests = {server.url: server.digest(model) for server in servers}
    if len(set(filter(None, digests.values()))) > 1:
        found = ", ".join(f"{url} has {digest[:_SHOWN_CHARS]}" for url, digest in digests.items())
        raise UsageError(f"{model} is not the same on all servers ({found}): install the same weights on each")
    names = sorted({digest or f"{model} at {url}" for url, digest in digests.items()})
    return f"{' '.join(names)} {num_ctx}"


def _open_cache(path: Path | str | None) -> Store | None:
    try:
        return Store(path or default_cache_path(), is_cache=True)
    except UsageError as error:
        if path is not None:
            raise
        logger.warning("%s; continuing without a cache", error)
        return None
