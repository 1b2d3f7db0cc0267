"""The backend for servers with OpenAI's routes: vLLM, llama-server, LM Studio, hosted ones.

The key comes from the environment and goes into one header; no message, log or repr shows it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any, ClassVar
from urllib.parse import urlsplit

from query_mutator.errors import BackendError, ModelMissingError, ServerDownError, UsageError
from query_mutator.llm.client import INFO_TIMEOUT_S, server_url
from query_mutator.llm.http_server import HttpServer, names_in, rows_in, samples_of
from query_mutator.llm.transport import Transport
from query_mutator.types import ChatRequest, ErrorInfo, Json

#: How a request says whether to think: by the template of vLLM, SGLang and llama-server, or as OpenAI has it.
_THINKING: Mapping[str, Json] = {
    "auto": {},
    "off": {"chat_template_kwargs": {"enable_thinking": False}},
    "on": {"chat_template_kwargs": {"enable_thinking": True}},
    **{level: {"reasoning_effort": level} for level in ("low", "medium", "high")},
}


KEYS_VARIABLE = "QM_KEYS"  # address=key address=key ..., of several servers
_HOME_URL = "https://api.openai.com"  # whose key OPENAI_API_KEY is unless OPENAI_BASE_URL names another server


def key_of(url: str, environ: Mapping[str, str]) -> str:
    """Return the key for an address, "" without one: that which QM_KEYS has for its scheme, host and port.

    OPENAI_API_KEY is only for the address of OPENAI_BASE_URL, by default that of OpenAI.
    """
    pairs = (pair.rpartition("=") for pair in environ.get(KEYS_VARIABLE, "").split())
    home, own = environ.get("OPENAI_BASE_URL") or _HOME_URL, environ.get("OPENAI_API_KEY", "").strip()
    known = {_origin(home): own} | {_origin(address): key for address, _, key in pairs if address}
    return known.get(_origin(url), "")


def _origin(url: str) -> str:
    """Return scheme, host and port of an address."""
    parts = urlsplit(server_url(url))
    return f"{parts.scheme}://{parts.hostname}:{parts.port}"


class OpenAIBackend(HttpServer):
    """One server; `url` ends before `/chat/completions`, and in `/v1` unless it names another path.

    A subclass may name another `key_variable`. UsageError for a key that cannot be a header value. `num_ctx` is not
    sent: it is the context that the server was started with, for servers that do not report it.
    """

    title = "an OpenAI-compatible server"
    url_flag = "openai_url"
    api_root = "/v1"
    url_variable = "OPENAI_BASE_URL"  # what the openai package reads
    key_variable: ClassVar[str] = "OPENAI_API_KEY"
    more_slots = "start it with {slots} slots (vLLM --max-num-seqs, llama-server --parallel)"
    more_context = "start it with a larger context (vLLM --max-model-len, llama-server --ctx-size)"
    start_advice = "check --openai-url"
    completion = staticmethod(samples_of)
    chat_path = "/chat/completions"

    def __init__(
        self,
        url: str,
        *,
        environ: Mapping[str, str] = os.environ,
        runner_options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        options = dict(runner_options or {})
        self._num_ctx = _positive(options.pop("num_ctx", None))
        has_keys = environ.get(KEYS_VARIABLE) and self.key_variable == OpenAIBackend.key_variable
        key = key_of(url, environ) if has_keys else environ.get(self.key_variable, "").strip()
        if not (key.isascii() and (key.isprintable() or not key)):
            raise UsageError(f"{self.key_variable} has characters that cannot be in a key; set it again")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.key_advice = f"the server refuses the key in {self.key_variable}" if key else f"set {self.key_variable}"
        url = server_url(url)
        url = url if urlsplit(url).path else f"{url}/v1"
        super().__init__(url, headers=self._headers, runner_options=options, **settings)

    def http_headers(self, model: str) -> Mapping[str, str]:
        """Return the header with the key."""
        return self._headers

    def version(self, *, timeout_s: float = INFO_TIMEOUT_S) -> str:
        """Return "", as these servers do not report one; ServerDownError when nothing answers.

        BackendError while the server loads its model: llama-server lists it then already.
        """
        self._listed(timeout_s=timeout_s)
        health = self._at_root("/health", timeout_s=timeout_s)
        if isinstance(health, ErrorInfo) and health.kind == "busy":
            raise BackendError(f"{self.url} is not ready ({health}); wait until it is", kind="busy")
        return ""

    def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> tuple[str, ...]:
        """Return the names of the available models."""
        return self.info("/models", lambda reply: names_in(rows_in(reply, "data"), "id"), timeout_s=timeout_s)

    def require_model(self, name: str) -> str:
        """Return the model's full name; a server that lists no models is asked for a reply of one token."""
        if names_in(self._listed(), "id"):
            return super().require_model(name)
        error = self.complete(ChatRequest.user("Hello", model=name, max_tokens=1)).error
        if error is None or error.kind == "empty":
            return name
        if error.kind == "model_missing":
            raise ModelMissingError(f"{self.url} has no model {name!r} and lists none ({error.message})")
        raise BackendError(f"{self.url} lists no models, and {name!r} gives no reply ({error}); check --openai-url")

    def slots(self, model: str) -> int | None:
        """Return the number of slots that llama-server reports."""
        reply = self._at_root("/props")
        return None if isinstance(reply, ErrorInfo) else _positive(reply.get("total_slots"))

    def context(self, model: str) -> int | None:
        """Return `num_ctx` or what the list of models reports: vLLM's `max_model_len`, llama-server's `n_ctx`."""
        row = next((row for row in self._listed() if row.get("id") == model), {})
        meta = row.get("meta")
        reported = row.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
        return min(filter(None, (_positive(reported), self._num_ctx)), default=None)

    def chat_body(self, request: ChatRequest) -> Json:
        """Return the body of /chat/completions for one whole reply; `ChatRequest.options` become top-level fields."""
        body: Json = {
            "model": request.model,
            "messages": [{"role": message.role, "content": message.content} for message in request.messages],
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,  # `HttpServer` renames it where a server refuses the older name
            **_THINKING[request.think],
            **request.options,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if request.samples > 1:
            body["n"] = request.samples
        if request.json_schema is not None:
            schema = {"name": "reply", "strict": True, "schema": request.json_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _listed(self, *, timeout_s: float = INFO_TIMEOUT_S) -> list[Json]:
        """Return the list of models, [] from a server that has none; ServerDownError when nothing answers."""
        try:
            return self.info("/models", lambda reply: rows_in(reply, "data"), timeout_s=timeout_s)
        except ServerDownError:
            raise
        except BackendError:
            return []

    def _at_root(self, path: str, *, timeout_s: float = INFO_TIMEOUT_S) -> Json | ErrorInfo:
        """Return what the server says at a path outside `/v1`."""
        with closing(Transport(self.url.removesuffix("/v1"), pool_size=1, headers=self._headers)) as root:
            return root.get(path, timeout_s=timeout_s)


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
