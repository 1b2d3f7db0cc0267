"""The backend for servers that speak Ollama's own routes: /api/chat, /api/embed, /api/tags, /api/version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from query_mutator.errors import BackendError, ModelMissingError, ServerDownError
from query_mutator.llm.address import DEFAULT_URL
from query_mutator.llm.transport import Json, Transport
from query_mutator.registry import nearest
from query_mutator.types import ChatRequest, Completion, ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]

_INFO_TIMEOUT_S = 10.0  # version and list of models come from the server's memory


class OllamaBackend:
    """A Client for one Ollama server; `pool_size` should be the number of calls in flight at once.

    `timeout_s` bounds one call from connecting to the last byte; `keep_alive` is how long the server keeps a model
    loaded after a call, in Ollama's notation.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 120.0,
        pool_size: int = 8,
        keep_alive: str = "30m",
        trust_env: bool = True,
    ) -> None:
        self._transport = Transport(url, pool_size=pool_size, timeout_s=timeout_s, trust_env=trust_env)
        self.url = self._transport.url
        self.keep_alive = keep_alive

    def __repr__(self) -> str:
        return f"Ollama({self.url!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply to a chat request, or a Completion that carries the error."""
        started = time.perf_counter()
        reply = self._transport.post("/api/chat", chat_payload(request, keep_alive=self.keep_alive))
        return _completion(reply).after(latency_s=time.perf_counter() - started)

    def close(self) -> None:
        """End calls in flight and close the connections; idempotent."""
        self._transport.close()

    def version(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> str:
        """Return the server's version; ServerDownError when nothing answers there."""
        return str(self._info("/api/version", timeout_s=timeout_s).get("version") or "unknown")

    def models(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> tuple[str, ...]:
        """Return the names of the installed models, with their tags."""
        rows = self._info("/api/tags", timeout_s=timeout_s).get("models") or []
        return tuple(str(row.get("name") or row.get("model")) for row in rows)

    def require_model(self, name: str) -> str:
        """Return the installed model's full name; ModelMissingError with the command that fetches it."""
        installed = self.models()
        if with_tag(name) in installed:
            return with_tag(name)
        close = nearest(with_tag(name), installed)
        hint = f", or did you mean {close}?" if close else ""
        known = ", ".join(installed) or "none"
        raise ModelMissingError(
            f"{self.url} has no model {name!r}: run `ollama pull {name}`{hint} (installed: {known})"
        )

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the embeddings of texts [n, dim] (zeros for an empty text), or why there are none."""
        payload: Json = {"model": model, "input": list(texts), "keep_alive": self.keep_alive}
        reply = self._transport.post("/api/embed", payload)
        return reply if isinstance(reply, ErrorInfo) else _vectors(reply, len(texts))

    def _info(self, path: str, *, timeout_s: float) -> Json:
        reply = self._transport.get(path, timeout_s=timeout_s)
        if not isinstance(reply, ErrorInfo):
            return reply
        if reply.kind in ("connect", "timeout"):
            raise ServerDownError(
                f"nothing answers at {self.url}: start it with `ollama serve`, or give --ollama-url, "
                f"or --backend embedded ({reply.message})"
            )
        raise BackendError(f"{self.url} does not answer as Ollama does ({path}: {reply})")


def with_tag(model: str) -> str:
    """Return a model's name with its tag; without one it means `:latest`."""
    return model if ":" in model.rsplit("/", maxsplit=1)[-1] else f"{model}:latest"


def chat_payload(request: ChatRequest, *, keep_alive: str) -> Json:
    """Return the body of /api/chat for one whole, unthinking reply."""
    options: dict[str, Any] = {"temperature": request.temperature, "num_predict": request.max_tokens}
    if request.seed is not None:
        options["seed"] = request.seed
    return {
        "model": request.model,
        "messages": [{"role": message.role, "content": message.content} for message in request.messages],
        "stream": False,
        "think": False,
        "options": {**options, **request.options},
        "keep_alive": keep_alive,
    }


def _completion(reply: Json | ErrorInfo) -> Completion:
    if isinstance(reply, ErrorInfo):
        return Completion(error=reply)
    try:
        return Completion.from_ollama(reply)
    except (AttributeError, TypeError, ValueError) as error:
        return Completion.failed("malformed", f"the reply's fields are not those of a chat reply: {error}")


def _vectors(reply: Json, count: int) -> FloatArray | ErrorInfo:
    import numpy as np  # late: most runs embed here, not on a server

    rows = reply.get("embeddings")
    if not isinstance(rows, list) or len(rows) != count:
        return ErrorInfo(kind="malformed", message=f"the reply does not hold {count} embeddings")
    dim = max((len(row) for row in rows), default=0)
    if count and not dim:
        return ErrorInfo(kind="empty", message="the server's embeddings are empty")
    try:
        return np.array([row or [0.0] * dim for row in rows], dtype=np.float32).reshape(count, dim)
    except (TypeError, ValueError) as error:
        return ErrorInfo(kind="malformed", message=f"the embeddings are not rows of numbers: {error}")
