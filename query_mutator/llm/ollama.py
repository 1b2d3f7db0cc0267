"""The backend for servers with Ollama's own routes: /api/chat, /api/tags, /api/version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from query_mutator.llm.client import DEFAULT_URL, INFO_TIMEOUT_S
from query_mutator.llm.http_server import HttpServer, names_in, rows_in
from query_mutator.types import ChatRequest, Completion, ErrorInfo, Json, wire_text

_SHORT_CHARS = 100  # of a version or digest
_MAX_CAPABILITIES = 20


class OllamaBackend(HttpServer):
    """One Ollama server.

    `runner_options` (`num_ctx` and similar) are the same in every call and override those of a request, because Ollama
    reloads a model when they change.
    """

    title = "Ollama"
    url_flag = "ollama_url"
    url_variable = "OLLAMA_HOST"
    default_url = DEFAULT_URL
    has_runner_options = True
    reports_queue = True
    more_models = "run `ollama pull qwen2.5:3b`"
    fetch_model = "run `ollama pull {name}`"
    more_slots = "OLLAMA_NUM_PARALLEL={slots} ollama serve"
    more_loaded = "OLLAMA_MAX_LOADED_MODELS=2 ollama serve, if there is memory for both"
    more_context = "give a larger --num-ctx"
    start_advice = "start it with `ollama serve`, or give --ollama-url, --openai-url or --gguf FILE (smollm2 to try)"
    key_advice = "for a server that needs a token see docs/how-to/extend.md"
    completion = staticmethod(Completion.from_ollama)
    chat_path = "/api/chat"

    def version(self, *, timeout_s: float = INFO_TIMEOUT_S) -> str:
        """Return the server's version; ServerDownError when nothing answers there."""
        return self.info("/api/version", lambda reply: _short(reply.get("version")) or "unknown", timeout_s=timeout_s)

    def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> tuple[str, ...]:
        """Return the names of the installed models, with their tags."""
        return names_in(self._listed("/api/tags", timeout_s=timeout_s), "name", "model")

    def writes_text(self, model: str) -> bool | None:
        """Return whether a model has the capability "completion"; None from servers that report none."""
        capabilities = self._show(model).get("capabilities")
        return "completion" in capabilities if isinstance(capabilities, list) and capabilities else None

    def digest(self, model: str) -> str:
        """Return the digest of an installed model's weights; ModelMissingError when it is not there."""
        name = self.require_model(model)
        return next((_short(row.get("digest")) for row in self._listed("/api/tags") if row.get("name") == name), "")

    def model_info(self, model: str) -> Mapping[str, Any]:
        """Return the figures the server gives for an installed model, as "llama.block_count"; {} without any."""
        found = self._show(model).get("model_info")
        return found if isinstance(found, dict) else {}

    def context(self, model: str) -> int | None:
        """Return the context of a call: `num_ctx` as far as the model has it, else that of the loaded model.

        Models made from the same weights share a runner, which is listed under the name of the first one: then the
        `num_ctx` of the model's file, if there is one.
        """
        requested = self.runner_options.get("num_ctx")
        if requested is None:
            rows = self._listed("/api/ps")
            loaded = next((row.get("context_length") for row in rows if row.get("name") == with_tag(model)), None)
            return loaded if isinstance(loaded, int) else _parameter(self._show(model), "num_ctx")
        lengths = (value for key, value in self.model_info(model).items() if key.endswith(".context_length"))
        return min([int(requested), *(length for length in lengths if isinstance(length, int) and length > 0)])

    def describe_model(self, model: str) -> str:
        """Return digest and capabilities of an installed model."""
        found = self._show(model).get("capabilities")
        capabilities = ", ".join(map(_short, found[:_MAX_CAPABILITIES])) if isinstance(found, list) else ""
        return f"installed, {self.digest(model)[:12]}, {capabilities or 'capabilities unknown'}"

    def chat_body(self, request: ChatRequest) -> Json:
        """Return the body of /api/chat for one whole reply, without thinking unless `think` asks for it.

        `truncate` and `shift` have a server such as 0.24 refuse a prompt that does not fit the context, and end a reply
        there; one such as 0.9 ignores both and drops the beginning of the prompt.
        """
        seed = {} if request.seed is None else {"seed": request.seed}
        options = {"temperature": request.temperature, "num_predict": request.max_tokens, **seed}
        body = {
            "model": request.model,
            "messages": [{"role": message.role, "content": message.content} for message in request.messages],
            "stream": False,
            "think": {"auto": False, "off": False, "on": True}.get(request.think, request.think),
            "truncate": False,
            "shift": False,
            "options": {**options, **request.options, **self.runner_options},
            "keep_alive": self.keep_alive,
        }
        return body if request.json_schema is None else {**body, "format": request.json_schema}

    def _listed(self, path: str, *, timeout_s: float = INFO_TIMEOUT_S) -> list[Json]:
        return self.info(path, lambda reply: rows_in(reply, "models"), timeout_s=timeout_s)

    def _show(self, model: str) -> Json:
        reply = self._transport.post("/api/show", {"model": model}, timeout_s=INFO_TIMEOUT_S)
        return {} if isinstance(reply, ErrorInfo) else reply


def _short(value: object) -> str:
    """Return a version, digest or name that a server sent, without what cannot belong to one."""
    return wire_text(value)[:_SHORT_CHARS] if isinstance(value, str) else ""


def with_tag(model: str) -> str:
    """Return a model's name with its tag; without one it means `:latest`."""
    return model if ":" in model.rsplit("/", maxsplit=1)[-1] else f"{model}:latest"


def _parameter(shown: Json, name: str) -> int | None:
    """Return a whole number from the lines `name value` of a model's file."""
    found = re.search(rf"^{name}\s+(\d{{1,9}})\s*$", str(shown.get("parameters") or ""), re.MULTILINE)
    return int(found[1]) if found else None
