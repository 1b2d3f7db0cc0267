"""The backend for servers that speak OpenAI's routes: vLLM, llama-server, LM Studio, hosted ones.

The key comes from the environment and goes into one header; no message, log or repr shows it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from query_mutator.errors import BackendError, ModelMissingError, ServerDownError, UsageError
from query_mutator.llm.address import server_url
from query_mutator.llm.streaming import StreamedText
from query_mutator.llm.transport import Json, Transport
from query_mutator.registry import nearest
from query_mutator.types import ChatRequest, Completion, ErrorInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float32]

KEY_VARIABLE = "OPENAI_API_KEY"
_INFO_TIMEOUT_S = 10.0
_HIDDEN = "***"
#: Hosts whose newer models refuse the older name of this field; the other servers know the older one only.
_NEW_TOKEN_FIELD = {"api.openai.com": "max_completion_tokens"}


class OpenAIBackend:
    """A Client for one server; `url` ends before `/chat/completions`, and in `/v1` unless it names another path.

    `timeout_s` bounds one call from connecting to the last byte. Raises UsageError for a key that is no header value.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 120.0,
        pool_size: int = 8,
        trust_env: bool = True,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._key = environ.get(KEY_VARIABLE, "").strip()
        if not (self._key.isascii() and (self._key.isprintable() or not self._key)):
            raise UsageError(f"{KEY_VARIABLE} holds signs that no key has; set it again")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._transport = Transport(
            base_url(url), pool_size=pool_size, timeout_s=timeout_s, trust_env=trust_env, headers=headers
        )
        self.url = self._transport.url
        self._token_field = _NEW_TOKEN_FIELD.get(urlsplit(self.url).hostname or "", "max_tokens")

    def __repr__(self) -> str:
        return f"OpenAI({self.url!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply to a chat request, or a Completion that carries the error."""
        started = time.perf_counter()
        reply = self._post(
            "/chat/completions",
            chat_payload(request, token_field=self._token_field),
            retry_count=request.attempt - 1,
        )
        return _completion(reply, latency_s=time.perf_counter() - started)

    def complete_until(self, request: ChatRequest, is_enough: Callable[[str], bool]) -> Completion:
        """Return the reply, or its beginning once `is_enough` is true of it: then the connection is closed."""
        reply = _Streamed(is_enough)
        payload = chat_payload(request, token_field=self._token_field)
        payload |= {"stream": True, "stream_options": {"include_usage": True}}
        error = self._transport.stream("/chat/completions", payload, reply.take, retry_count=request.attempt - 1)
        if reply.was_cut:
            return reply.beginning(model=request.model).after(latency_s=reply.elapsed_s)
        return _completion(self._without_key(error or reply.error or reply.whole()), latency_s=reply.elapsed_s)

    def embed(self, model: str, texts: Sequence[str]) -> FloatArray | ErrorInfo:
        """Return the embeddings of texts [n, dim], or why there are none."""
        payload: Json = {"model": model, "input": list(texts), "encoding_format": "float"}
        reply = self._post("/embeddings", payload)
        return reply if isinstance(reply, ErrorInfo) else _vectors(reply, len(texts))

    def close(self) -> None:
        """End calls in flight and close the connections; idempotent."""
        self._transport.close()

    def version(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> str:
        """Return "unknown", as these servers do not say; ServerDownError when nothing answers."""
        self.models(timeout_s=timeout_s)
        return "unknown"

    def models(self, *, timeout_s: float = _INFO_TIMEOUT_S) -> tuple[str, ...]:
        """Return the names of the models on offer."""
        reply = self._without_key(self._transport.get("/models", timeout_s=timeout_s))
        if not isinstance(reply, ErrorInfo):
            return tuple(str(row.get("id")) for row in reply.get("data") or [])
        if reply.kind in ("connect", "timeout"):
            raise ServerDownError(f"nothing answers at {self.url}: check --openai-url ({reply.message})")
        hint = f"; {KEY_VARIABLE} holds the key" if reply.status in (401, 403) else ""
        raise BackendError(f"{self.url} does not list its models ({reply}){hint}")

    def require_model(self, name: str) -> str:
        """Return the model's name as the server lists it; ModelMissingError with what it does have."""
        offered = self.models()
        for known in (name, f"{name}:latest"):
            if known in offered:
                return known
        close = nearest(name, offered)
        hint = f"did you mean {close}? " if close else ""
        raise ModelMissingError(f"{self.url} has no model {name!r}: {hint}it offers {', '.join(offered) or 'none'}")

    def digest(self, model: str) -> str:
        """Return "", as these servers do not tell the digest of a model's weights; ModelMissingError without it."""
        self.require_model(model)
        return ""

    def _post(self, path: str, payload: Json, *, retry_count: int | None = None) -> Json | ErrorInfo:
        return self._without_key(self._transport.post(path, payload, retry_count=retry_count))

    def _without_key(self, reply: Json | ErrorInfo) -> Json | ErrorInfo:
        """Blot the key out of an error: some servers repeat what they were sent."""
        if not isinstance(reply, ErrorInfo) or not self._key:
            return reply
        return replace(reply, message=reply.message.replace(self._key, _HIDDEN))


def base_url(text: str) -> str:
    """Return the address that routes such as `/models` are appended to; without a path it is that of `/v1`."""
    url = server_url(text)
    return url if urlsplit(url).path else f"{url}/v1"


def chat_payload(request: ChatRequest, *, token_field: str = "max_tokens") -> Json:
    """Return the body of /chat/completions for one whole reply; `ChatRequest.options` become fields of their own."""
    payload: Json = {
        "model": request.model,
        "messages": [{"role": message.role, "content": message.content} for message in request.messages],
        "temperature": request.temperature,
        token_field: request.max_tokens,
        **request.options,
    }
    if request.seed is not None:
        payload["seed"] = request.seed
    return payload


class _Streamed(StreamedText):
    """Reads server-sent events, each with a piece of the text; usage and the reason for the end come last."""

    def __init__(self, is_enough: Callable[[str], bool]) -> None:
        super().__init__(is_enough)
        self._about: Json = {}
        self._finish_reason: str | None = None

    def take(self, line: bytes) -> bool:
        """Take one line; False when no more is wanted."""
        if not line.startswith(b"data:"):  # comments, event names
            return True
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return True
        try:
            event = json.loads(data)
            self._about |= {name: event[name] for name in ("error", "model", "usage", "timings") if event.get(name)}
            choice = (event.get("choices") or [{}])[0]
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            piece = str((choice.get("delta") or {}).get("content") or "")
        except (ValueError, AttributeError, TypeError, LookupError):
            return self.fail("malformed", f"an event of the reply is not a JSON object: {data[:80]!r}")
        return self.add(piece)

    def whole(self) -> Json:
        """Return the reply as it would have come in one piece."""
        choice = {"message": {"content": self.text}, "finish_reason": self._finish_reason}
        return {**self._about, "choices": [choice]}


def _completion(reply: Json | ErrorInfo, *, latency_s: float) -> Completion:
    if isinstance(reply, ErrorInfo):
        return Completion(error=reply, latency_s=latency_s)
    try:
        return completion_of(reply, latency_s=latency_s)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        message = f"the reply's fields are not those of a chat completion: {error!r}"
        return Completion.failed("malformed", message, latency_s=latency_s)


def completion_of(payload: Mapping[str, Any], *, latency_s: float = 0.0) -> Completion:
    """Return the record of one chat completion; its times are known where a server adds `timings` (llama-server)."""
    if payload.get("error"):
        said = payload["error"]
        return Completion.failed("server", str(said.get("message", said) if isinstance(said, dict) else said))
    choice = payload["choices"][0]
    message, usage, timings = choice["message"], payload.get("usage") or {}, payload.get("timings") or {}
    text = str(message.get("content") or message.get("refusal") or "").strip()
    error = None
    if not choice.get("finish_reason"):
        error = ErrorInfo(kind="incomplete", message="the reply stopped before it was done")
    elif not text:
        error = ErrorInfo(kind="empty", message="the reply has no text")
    return Completion(
        text=text if error is None else "",
        model=str(payload.get("model") or ""),
        error=error,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        total_s=latency_s if timings else 0.0,
        prompt_eval_s=float(timings.get("prompt_ms") or 0) / 1000,
        eval_s=float(timings.get("predicted_ms") or 0) / 1000,
        latency_s=latency_s,
    )


def _vectors(reply: Json, count: int) -> FloatArray | ErrorInfo:
    import numpy as np  # late: most runs embed here, not on a server

    try:
        rows = {int(row["index"]): row["embedding"] for row in reply["data"]}
        return np.array([rows[index] for index in range(count)], dtype=np.float32).reshape(count, -1)
    except (KeyError, TypeError, ValueError) as error:
        return ErrorInfo(kind="malformed", message=f"the reply does not hold {count} rows of numbers: {error!r}")
