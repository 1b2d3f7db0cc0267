"""Which server a run uses, and the client composed for it by wrapping:

    Cache(Coalesce(Retry(Limit(Pool([Ollama('http://…'), Ollama('http://…')])))))

Its repr prints that nesting; a layer that nobody asked for is left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.adaptive import AdaptiveLimit
from query_mutator.llm.address import DEFAULT_URL, server_url
from query_mutator.llm.beside import Beside
from query_mutator.llm.cache import Cache, ReplyStore, default_cache_path
from query_mutator.llm.client import Backend, Client
from query_mutator.llm.coalesce import Coalesce
from query_mutator.llm.counted import Counted
from query_mutator.llm.early_stop import EarlyStop
from query_mutator.llm.hf import HfModel
from query_mutator.llm.limits import Limit
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.pool import Pool
from query_mutator.llm.retry import DEFAULT_MAX_RETRIES, Retry, RetryPolicy
from query_mutator.llm.same_models import Identity, ModelServer
from query_mutator.llm.stack import ClientStack

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.0  # a server on this machine answers in milliseconds
OPENAI_URL_VARIABLE = "OPENAI_BASE_URL"  # what the openai package reads

BackendName = Literal["auto", "embedded", "ollama", "openai"]
CacheMode = Literal["off", "eval", "all"]


def build_client(
    urls: str | Sequence[str],
    *,
    kind: Literal["ollama", "openai"] = "ollama",
    batch_size: int = 8,
    adaptive: bool = False,
    timeout_s: float = 120.0,
    deadline_s: float | None = None,
    max_retries: int = DEFAULT_MAX_RETRIES,
    cache: CacheMode = "off",
    cache_path: Path | str | None = None,
    is_refusal: Callable[[str], bool] | None = None,
    keep_alive: str = "30m",
    runner_options: Mapping[str, Any] | None = None,
    allow_mixed: bool = False,
    local: Sequence[HfModel] = (),
) -> ClientStack:
    """Return the composed client for one server or several, with as many connections to each as calls in flight.

    `local` models answer the requests that name them. With `is_refusal` target replies that begin with a refusal are
    cut. A default `cache_path` that cannot be used costs a warning and the cache, one that was named is a UsageError.
    """
    servers = _servers(kind, urls, timeout_s, batch_size, keep_alive, runner_options or {})
    early_stops = tuple(EarlyStop(server, is_refusal=is_refusal) for server in servers) if is_refusal else ()
    edges: Sequence[Backend] = early_stops or servers
    backend = edges[0] if len(edges) == 1 else Pool(edges)
    backend = Beside(backend, local) if local else backend
    limit = AdaptiveLimit(backend, highest=batch_size) if adaptive else Limit(backend, limit=batch_size)
    counted, eval_counted = Counted(limit), Counted(limit)
    retry = Retry(limit, RetryPolicy(max_retries=max_retries, deadline_s=deadline_s))
    store = None if cache == "off" else _open_store(cache_path)
    identity = Identity(servers, extra=f"{sorted((runner_options or {}).items())} early-stop={bool(early_stops)}")
    identity.know({model.name: model.digest for model in local})
    shared, eval_shared, patient = Coalesce(counted), Coalesce(eval_counted), Coalesce(retry)
    return ClientStack(
        servers=servers,
        early_stops=early_stops,
        backend=backend,
        limit=limit,
        retry=retry,
        whole=_remembering(patient, store, identity),
        client=_remembering(shared, store, identity) if cache == "all" else shared,
        eval_client=_remembering(eval_shared, store, identity),
        counted=counted,
        eval_counted=eval_counted,
        coalesced=(shared, eval_shared, patient),
        store=store,
        allow_mixed=allow_mixed,
    )


def _servers(
    kind: str,
    urls: str | Sequence[str],
    timeout_s: float,
    pool_size: int,
    keep_alive: str,
    runner_options: Mapping[str, Any],
) -> tuple[ModelServer, ...]:
    several = [urls] if isinstance(urls, str) else urls
    if kind == "openai":
        return tuple(OpenAIBackend(url, timeout_s=timeout_s, pool_size=pool_size) for url in several)
    return tuple(
        OllamaBackend(
            url, timeout_s=timeout_s, pool_size=pool_size, keep_alive=keep_alive, runner_options=runner_options
        )
        for url in several
    )


def _open_store(path: Path | str | None) -> ReplyStore | None:
    try:
        return ReplyStore(path or default_cache_path())
    except UsageError as error:
        if path is not None:
            raise
        logger.warning("%s; going on without a cache", error)
        return None


def _remembering(client: Client, store: ReplyStore | None, identity: Identity) -> Client:
    return client if store is None else Cache(client, store, identity=identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """What answers a run's calls; no `urls` for the embedded server, which the command line starts itself."""

    kind: Literal["embedded", "ollama", "openai"]
    urls: tuple[str, ...]
    reason: str  # one line for the user
    is_embedded: bool  # our own assistant answers, be it behind an address: tables and pictures must say so

    @property
    def url(self) -> str | None:
        """Return the first server's address, or None for the embedded one."""
        return self.urls[0] if self.urls else None


def resolve_backend(
    backend: BackendName = "auto",
    *,
    url: str | Sequence[str] | None = None,
    openai_url: str | None = None,
    target_model: str | None = None,
    mutator_model: str | None = None,
    environ: Mapping[str, str] = os.environ,
    probe_timeout_s: float = PROBE_TIMEOUT_S,
) -> BackendChoice:
    """Return which backend a run uses, after asking the servers whether they are there and have the models.

    `auto` falls back to the embedded server when none answers; `ollama`, a `url` or a `target_model` never does; an
    `openai_url` means `openai`. Raises ServerDownError, ModelMissingError, or UsageError (with the installed models)
    when no target model is named.
    """
    urls = tuple(dict.fromkeys([url] if isinstance(url, str) else url or ()))
    _refuse_contradictions(backend, urls, openai_url)
    models = [model for model in (target_model, mutator_model) if model is not None]
    if backend == "embedded":
        return _embedded("backend: embedded, as asked for")
    if backend == "openai" or openai_url:
        server = OpenAIBackend(openai_server_url(openai_url, environ=environ), environ=environ)
        reason, _ = _check([server], models, has_target=target_model is not None, probe_timeout_s=probe_timeout_s)
        return BackendChoice(kind="openai", urls=(server.url,), reason=reason, is_embedded=False)
    servers = [OllamaBackend(ollama_url(each, environ=environ)) for each in urls or (None,)]
    try:
        reason, version = _check(servers, models, has_target=target_model is not None, probe_timeout_s=probe_timeout_s)
    except BackendError:
        if backend == "ollama" or urls or target_model:
            raise
        return _embedded(f"backend: embedded, because no Ollama server answers at {servers[0].url}")
    return BackendChoice(
        kind="ollama",
        urls=tuple(server.url for server in servers),
        reason=reason,
        is_embedded=version.endswith("+embedded"),
    )


def ollama_url(url: str | None = None, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the server's address: the one given, that of OLLAMA_HOST, or Ollama's own default."""
    return server_url(url or environ.get("OLLAMA_HOST", "").strip() or DEFAULT_URL)


def openai_server_url(url: str | None = None, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address given, or that of OPENAI_BASE_URL; UsageError without either."""
    found = url or environ.get(OPENAI_URL_VARIABLE, "").strip()
    if not found:
        raise UsageError("--backend openai needs the server's address: --openai-url http://127.0.0.1:8000/v1")
    return found


def _refuse_contradictions(backend: BackendName, urls: Sequence[str], openai_url: str | None) -> None:
    for flag, given, fitting in (("--ollama-url", urls, "ollama"), ("--openai-url", openai_url, "openai")):
        if given and backend not in ("auto", fitting):
            uses = "uses none" if backend == "embedded" else "another kind of server"
            raise UsageError(f"{flag} names a server, --backend {backend} {uses}; leave one of them out")
    if urls and openai_url:
        raise UsageError("--ollama-url and --openai-url name servers of two kinds; leave one of them out")


def _check(
    servers: Sequence[ModelServer], models: Sequence[str], *, has_target: bool, probe_timeout_s: float
) -> tuple[str, str]:
    """Return the line for the user and the version, after asking each server for the models; closes the servers."""
    try:
        versions = [server.version(timeout_s=probe_timeout_s) for server in servers]
        if not has_target:
            raise UsageError(_name_a_model(servers[0]))
        for server in servers:
            for model in models:
                server.require_model(model)
        return _reason(servers, versions), versions[0]
    finally:
        for server in servers:
            server.close()


def _reason(servers: Sequence[ModelServer], versions: Sequence[str]) -> str:
    if isinstance(servers[0], OpenAIBackend):
        return f"backend: OpenAI-compatible server at {servers[0].url}"
    told = [f"Ollama {version} at {server.url}" for server, version in zip(servers, versions, strict=True)]
    return "backend: " + ", ".join(told)


def _embedded(reason: str) -> BackendChoice:
    return BackendChoice(kind="embedded", urls=(), reason=reason, is_embedded=True)


def _name_a_model(server: ModelServer) -> str:
    installed = server.models()
    if not installed:
        return f"the server at {server.url} has no models: run `ollama pull qwen2.5:3b`, or give --backend embedded"
    return f"which model should answer? Give --target-model, one of: {', '.join(installed)}; or --backend embedded"
