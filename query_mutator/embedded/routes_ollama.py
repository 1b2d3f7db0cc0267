"""Ollama's routes and wire formats: https://github.com/ollama/ollama/blob/main/docs/api.md."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from query_mutator.embedded.catalogue import DETAILS, MAX_CONTEXT, Catalogue, Entry
from query_mutator.embedded.engine import Call, Embeddings, Engine, Reply
from query_mutator.embedded.http import TEXT_TYPE, Response
from query_mutator.embedded.runners import Runners
from query_mutator.embedded.wire import (
    ApiError,
    Exchange,
    call_options,
    dumps,
    field,
    json_response,
    model_name,
    parse_keep_alive,
    stamp,
    stamp_in,
    texts_of,
    wrong_type,
)
from query_mutator.version import __version__

__all__ = ["OllamaRoutes", "Route", "last_user_text"]

VERSION = f"{__version__}+embedded"
NDJSON_TYPE = "application/x-ndjson"
EMBED_MISSING = 'model "{}" not found, try pulling it first'

Route = Callable[[Exchange], Awaitable[Response | None]]
Part = Callable[[str], dict[str, Any]]  # a piece of text -> the field that has it


class OllamaRoutes:
    """Handlers of `/` and `/api/...`."""

    def __init__(self, catalogue: Catalogue, runners: Runners, engine: Engine) -> None:
        self._catalogue = catalogue
        self._runners = runners
        self._engine = engine

    def routes(self) -> dict[str, dict[str, Route]]:
        """Return the handlers by path and method."""
        return {
            "/": {"GET": self.root},
            "/api/version": {"GET": self.version},
            "/api/tags": {"GET": self.tags},
            "/api/show": {"POST": self.show},
            "/api/ps": {"GET": self.running},
            "/api/generate": {"POST": self.generate},
            "/api/chat": {"POST": self.chat},
            "/api/embed": {"POST": self.embed},
            "/api/embeddings": {"POST": self.embeddings},
        }

    async def root(self, exchange: Exchange) -> Response:
        """Answer the health check."""
        return Response(200, b"Ollama is running", TEXT_TYPE)

    async def version(self, exchange: Exchange) -> Response:
        """Return the version, which names the embedded server."""
        return json_response({"version": VERSION})

    async def tags(self, exchange: Exchange) -> Response:
        """List the models."""
        models = [
            _summary(entry) | {"modified_at": stamp(entry.modified_at)} for entry in self._catalogue.entries.values()
        ]
        return json_response({"models": models})

    async def running(self, exchange: Exchange) -> Response:
        """List the loaded models."""
        models = [
            _summary(runner.entry)
            | {"expires_at": stamp_in(runner.expires_in_s), "size_vram": 0, "context_length": runner.options["num_ctx"]}
            for runner in self._runners.loaded()
        ]
        return json_response({"models": models})

    async def show(self, exchange: Exchange) -> Response:
        """Describe one model."""
        entry = self._catalogue.find(model_name(exchange.payload))
        info: dict[str, Any] = {
            "general.architecture": "query-mutator",
            "query-mutator.context_length": MAX_CONTEXT,
        }
        if entry.dim:
            info["query-mutator.embedding_length"] = entry.dim
        if entry.operators:
            info["query_mutator.operators"] = list(entry.operators)
        return json_response(
            {
                "modelfile": f"# Part of Query Mutator's embedded server\nFROM {entry.tagged}\n",
                "parameters": "\n".join(f"{name:<30} {value}" for name, value in entry.parameters.items()),
                "template": "{{ .Prompt }}",
                "details": DETAILS,
                "model_info": info,
                "capabilities": entry.capabilities,
                "modified_at": stamp(entry.modified_at),
            }
        )

    async def generate(self, exchange: Exchange) -> Response | None:
        """Answer `prompt`."""
        payload = exchange.payload
        if field(payload, "suffix", str, ""):
            raise ApiError(400, f"{model_name(payload)} does not support insert")
        if field(payload, "images", list, []):
            raise ApiError(400, f"{model_name(payload)} does not support images")
        prompt = field(payload, "prompt", str, "")
        return await self._reply(exchange, "generate", prompt, lambda text: {"response": text})

    async def chat(self, exchange: Exchange) -> Response | None:
        """Answer the last user message."""
        prompt = last_user_text(field(exchange.payload, "messages", list, []))
        return await self._reply(exchange, "chat", prompt, _as_message)

    async def embed(self, exchange: Exchange) -> Response:
        """Return a vector for each text of `input`."""
        texts = texts_of(exchange.payload.get("input"))
        done = await self._embed(exchange, texts, dimensions=field(exchange.payload, "dimensions", int, 0))
        timing = {"total_duration": done.total_ns, "load_duration": done.load_ns, "prompt_eval_count": done.tokens}
        return json_response(
            {"model": model_name(exchange.payload), "embeddings": done.vectors, **(timing if texts else {})}
        )

    async def embeddings(self, exchange: Exchange) -> Response:
        """Return one vector for `prompt`: the older form of `/api/embed`."""
        done = await self._embed(exchange, texts_of(field(exchange.payload, "prompt", str, "")))
        return json_response({"embedding": done.vectors[0] if done.vectors else []})

    async def _embed(self, exchange: Exchange, texts: Sequence[str], *, dimensions: int = 0) -> Embeddings:
        entry = self._catalogue.find(model_name(exchange.payload), missing=EMBED_MISSING)
        return await self._engine.embed(_call(exchange, entry, texts=texts, dimensions=dimensions))

    async def _reply(self, exchange: Exchange, verb: str, prompt: str, part: Part) -> Response | None:
        payload = exchange.payload
        model = model_name(payload)
        entry = self._catalogue.text_model(payload, verb)
        if payload.get("think"):
            raise ApiError(400, f'"{model}" does not support thinking')
        if payload.get("logprobs"):
            raise ApiError(400, f'"{model}" does not support logprobs')
        call = _call(exchange, entry, prompt=prompt, format=_format(payload))
        if not prompt:  # an empty prompt only loads the model
            reason = await self._engine.load(call)
            return json_response(_line(model, part(""), done=True) | {"done_reason": reason})
        if field(payload, "stream", bool, True):
            await self._stream(exchange, call, part)
            return None
        reply = await self._engine.complete(call)
        return json_response(_last(model, part(reply.text), reply))

    async def _stream(self, exchange: Exchange, call: Call, part: Part) -> None:
        model = model_name(exchange.payload)
        stream = exchange.connection.stream(exchange.request, NDJSON_TYPE)

        def write(tokens: Sequence[str]) -> None:
            stream.write(b"".join(dumps(_line(model, part(token), done=False)) + b"\n" for token in tokens))

        reply = await self._engine.complete(call, write)
        last = dumps(_last(model, part(""), reply)) + b"\n"
        stream.write(last[: len(last) // 2] if call.fault == "cut" else last)
        stream.close()


def last_user_text(messages: list[Any]) -> str:
    """Return the text of the last user message, or of the last message if no user wrote one.

    Raises ApiError 400 for messages that are not objects with text.
    """
    texts: dict[str, str] = {}
    for message in messages:
        if not isinstance(message, dict):
            raise wrong_type("messages", message, "api.Message")
        if field(message, "images", list, []):
            raise ApiError(400, "the model does not support images")
        text = field(message, "content", str, "")
        texts |= {"last": text, field(message, "role", str, ""): text}
    return texts.get("user", texts.get("last", ""))


def _call(exchange: Exchange, entry: Entry, **work: Any) -> Call:
    options = field(exchange.payload, "options", dict, {})
    keep_alive_s = _keep_alive_s(exchange.payload.get("keep_alive"))
    limits = call_options(options)
    fits = {name: field(exchange.payload, name, bool, True) for name in ("truncate", "shift")}
    return Call(entry=entry, options=options, keep_alive_s=keep_alive_s, fault=exchange.fault, **limits, **fits, **work)


def _as_message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def _line(model: str, part: dict[str, Any], *, done: bool) -> dict[str, Any]:
    return {"model": model, "created_at": stamp(datetime.now(UTC)), **part, "done": done}


def _last(model: str, part: dict[str, Any], reply: Reply) -> dict[str, Any]:
    reason = {"done_reason": reply.done_reason} if reply.done else {}
    return _line(model, part, done=reply.done) | reason | reply.durations()


def _summary(entry: Entry) -> dict[str, Any]:
    return {"name": entry.tagged, "model": entry.tagged, "size": 0, "digest": entry.digest, "details": DETAILS}


def _format(payload: Mapping[str, Any]) -> str | Mapping[str, Any] | None:
    """Return "json", a schema or None; raises ApiError 400 for anything else."""
    format = payload.get("format")
    if format is None or format in ("", "json") or isinstance(format, dict):
        return format or None
    raise ApiError(400, f'invalid format: {dumps(format).decode()}; expected "json" or a valid JSON Schema object')


def _keep_alive_s(value: Any) -> float | None:
    if isinstance(value, (bool, list, dict)):
        raise wrong_type("keep_alive", value, "api.Duration")
    try:
        return None if value is None else parse_keep_alive(value)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
