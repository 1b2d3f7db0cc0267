"""Which server a run uses, and the client composed for it: `Retry(Limit(Ollama('http://…')))`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from query_mutator.errors import BackendError, UsageError
from query_mutator.llm.address import DEFAULT_URL, server_url
from query_mutator.llm.limits import Limit
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.retry import DEFAULT_MAX_RETRIES, Retry
from query_mutator.types import ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]

PROBE_TIMEOUT_S = 1.0  # a server on this machine answers in milliseconds

BackendName = Literal["auto", "embedded", "ollama"]


@dataclass(frozen=True, slots=True)
class ClientStack:
    """The client for one server, layer by layer; all kinds of calls share the one bound of `limit`."""

    backend: OllamaBackend
    limit: Limit  # one attempt a call: for a scheduler that waits before retries itself
    retry: Retry  # tries again in the calling thread

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray:
        """Return embeddings of texts [n, dim] from the server; BackendError when it fails for good."""
        reply, _ = self.retry.call(lambda: self._embed_once(model, texts), error_of=_error_of, key=model)
        if isinstance(reply, ErrorInfo):
            raise BackendError(f"{self.backend.url} gave no embeddings from {model!r} ({reply})")
        return reply

    def close(self) -> None:
        """End calls in flight and close the connections; idempotent."""
        self.retry.close()

    def _embed_once(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        with self.limit.slot():
            return self.backend.embed(model, texts)


def build_client(
    url: str,
    *,
    batch_size: int = 8,
    timeout_s: float = 120.0,
    max_retries: int = DEFAULT_MAX_RETRIES,
    keep_alive: str = "30m",
) -> ClientStack:
    """Return the composed client for an Ollama server, with as many connections as calls in flight."""
    backend = OllamaBackend(url, timeout_s=timeout_s, pool_size=batch_size, keep_alive=keep_alive)
    limit = Limit(backend, limit=batch_size)
    return ClientStack(backend, limit, Retry(limit, max_retries=max_retries))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """What answers a run's calls; `url` is None for the embedded server, which the command line starts itself."""

    kind: Literal["embedded", "ollama"]
    url: str | None
    reason: str  # one line for the user
    is_embedded: bool  # our own assistant answers, be it behind an address: tables and pictures must say so


def resolve_backend(
    backend: BackendName = "auto",
    *,
    url: str | None = None,
    target_model: str | None = None,
    mutator_model: str | None = None,
    environ: Mapping[str, str] = os.environ,
    probe_timeout_s: float = PROBE_TIMEOUT_S,
) -> BackendChoice:
    """Return which backend a run uses, after asking the server whether it is there and has the models.

    `auto` falls back to the embedded server when none answers; `ollama`, a `url` or a `target_model` never does. Raises
    ServerDownError, ModelMissingError, or UsageError (with the installed models) when no target model is named.
    """
    if backend == "embedded":
        if url:
            raise UsageError("--ollama-url names a server, --backend embedded uses none; leave one of them out")
        return _embedded("backend: embedded, as asked for")
    server = OllamaBackend(ollama_url(url, environ=environ))
    try:
        version = server.version(timeout_s=probe_timeout_s)
        if target_model is None:
            raise UsageError(_name_a_model(server))
        for model in (target_model, mutator_model):
            if model is not None:
                server.require_model(model)
        reason = f"backend: Ollama {version} at {server.url}"
        is_embedded = version.endswith("+embedded")
        return BackendChoice(kind="ollama", url=server.url, reason=reason, is_embedded=is_embedded)
    except BackendError:
        if backend == "ollama" or url or target_model:
            raise
        return _embedded(f"backend: embedded, because no Ollama server answers at {server.url}")
    finally:
        server.close()


def ollama_url(url: str | None = None, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return the server's address: the one given, that of OLLAMA_HOST, or Ollama's own default."""
    return server_url(url or environ.get("OLLAMA_HOST", "").strip() or DEFAULT_URL)


def _embedded(reason: str) -> BackendChoice:
    return BackendChoice(kind="embedded", url=None, reason=reason, is_embedded=True)


def _name_a_model(server: OllamaBackend) -> str:
    installed = server.models()
    if not installed:
        return f"the server at {server.url} has no models: run `ollama pull qwen2.5:3b`, or give --backend embedded"
    return f"which model should answer? Give --target-model, one of: {', '.join(installed)}; or --backend embedded"


def _error_of(reply: FloatArray | ErrorInfo) -> ErrorInfo | None:
    return reply if isinstance(reply, ErrorInfo) else None
