"""The backend for servers that speak Ollama's own routes: /api/chat, /api/embed, /api/tags, /api/version."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from query_mutator.errors import BackendError, ModelMissingError, ServerDownError
from query_mutator.llm.address import DEFAULT_URL
from query_mutator.llm.streaming import StreamedText
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
    loaded after a call, in Ollama's notation. `runner_options` (`num_ctx` and the like) are the same in every call,
    whatever a request says, because a change of them makes the server load the model anew.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout_s: float = 120.0,
        pool_size: int = 8,
        keep_alive: str = "30m",
        runner_options: Mapping[str, Any] | None = None,
        trust_env: bool = True,
    ) -> None:
        self._transport = Transport(url, pool_size=pool_size, timeout_s=timeout_s, trust_env=trust_env)
        self.url = self._transport.url
        self.keep_alive = keep_alive
        self.runner_options = dict(runner_options or {})

    def __repr__(self) -> str:
        return f"Ollama({self.url!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply to a chat request, or a Completion that carries the error."""
        started = time.perf_counter()
        reply = self._transport.post("/api/chat", self._chat(request), retry_count=request.attempt - 1)
        return _completion(reply, latency_s=time.perf_counter() - started)

    def complete_until(self, request: ChatRequest, is_enough: Callable[[str], bool]) -> Completion:
        """Return the reply, or its beginning once `is_enough` is true of it: then the connection is closed."""
        reply = _Streamed(is_enough)
        payload = {**self._chat(request), "stream": True}
        error = self._transport.stream("/api/chat", payload, reply.take, retry_count=request.attempt - 1)
        if reply.was_cut:
            return reply.beginning(model=request.model).after(latency_s=reply.elapsed_s)
        return _completion(error or reply.error or reply.last, latency_s=reply.elapsed_s)

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

    def digest(self, model: str) -> str:
        """Return the digest of an installed model's weights; ModelMissingError when it is not there."""
        name = self.require_model(model)
        rows = self._info("/api/tags", timeout_s=_INFO_TIMEOUT_S).get("models") or []
        return next((str(row.get("digest") or "") for row in rows if row.get("name") == name), "")

    def capabilities(self, model: str) -> tuple[str, ...]:
        """Return what the server says an installed model can do, as "completion", "embedding", "thinking"."""
        reply = self._transport.post("/api/show", {"model": model}, timeout_s=_INFO_TIMEOUT_S)
        return () if isinstance(reply, ErrorInfo) else tuple(map(str, reply.get("capabilities") or ()))

    def model_info(self, model: str) -> Json:
        """Return the figures the server gives of an installed model, as "llama.block_count"; {} when it gives none."""
        reply = self._transport.post("/api/show", {"model": model}, timeout_s=_INFO_TIMEOUT_S)
        return {} if isinstance(reply, ErrorInfo) else dict(reply.get("model_info") or {})

    def loaded_context(self, model: str) -> int | None:
        """Return the context length a loaded model has, or None when it is not loaded or the server does not say."""
        rows = self._info("/api/ps", timeout_s=_INFO_TIMEOUT_S).get("models") or []
        return next((row.get("context_length") for row in rows if row.get("name") == with_tag(model)), None)

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
        if self.runner_options:
            payload["options"] = self.runner_options
        reply = self._transport.post("/api/embed", payload)
        return reply if isinstance(reply, ErrorInfo) else _vectors(reply, len(texts))

    def _chat(self, request: ChatRequest) -> Json:
        return chat_payload(request, keep_alive=self.keep_alive, runner_options=self.runner_options)

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


def chat_payload(request: ChatRequest, *, keep_alive: str, runner_options: Mapping[str, Any] | None = None) -> Json:
    """Return the body of /api/chat for one whole, unthinking reply."""
    options: dict[str, Any] = {"temperature": request.temperature, "num_predict": request.max_tokens}
    if request.seed is not None:
        options["seed"] = request.seed
    return {
        "model": request.model,
        "messages": [{"role": message.role, "content": message.content} for message in request.messages],
        "stream": False,
        "think": False,
        "options": {**options, **request.options, **(runner_options or {})},
        "keep_alive": keep_alive,
    }


class _Streamed(StreamedText):
    """Reads lines of JSON, each with a piece of the text; the last one has the counts and times."""

    last: Json

    def __init__(self, is_enough: Callable[[str], bool]) -> None:
        super().__init__(is_enough)
        self.last = {}

    def take(self, line: bytes) -> bool:
        """Take one line; False when no more is wanted."""
        try:
            self.last = json.loads(line)
            message = self.last.get("message") or {}
            self.last["message"] = {**message, "content": self.text + str(message.get("content") or "")}
        except (ValueError, AttributeError, TypeError):
            return self.fail("malformed", f"a line of the reply is not a JSON object: {line[:80]!r}")
        return self.add(str(message.get("content") or "")) or self.last.get("done") is True


def _completion(reply: Json | ErrorInfo, *, latency_s: float) -> Completion:
    if isinstance(reply, ErrorInfo):
        return Completion(error=reply, latency_s=latency_s)
    try:
        return Completion.from_ollama(reply, latency_s=latency_s)
    except (AttributeError, TypeError, ValueError) as error:
        return Completion.failed(
            "malformed", f"the reply's fields are not those of a chat reply: {error}", latency_s=latency_s
        )


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
