"""Ollama's routes and wire formats: https://github.com/ollama/ollama/blob/main/docs/api.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from query_mutator import __version__
from query_mutator.embedded.catalogue import CONTEXT_LENGTH, Catalogue, Entry
from query_mutator.embedded.durations import now_stamp, parse_keep_alive, stamp, stamp_in
from query_mutator.embedded.embedding import texts_of, vectors_of
from query_mutator.embedded.engine import Call, Engine, Reply
from query_mutator.embedded.http import TEXT_TYPE, Response
from query_mutator.embedded.options import call_options
from query_mutator.embedded.routing import Exchange, Routes
from query_mutator.embedded.runners import Runners
from query_mutator.embedded.wire import (
    ApiError,
    dumps,
    field,
    json_response,
    maybe_cut,
    model_name,
    read_body,
    wrong_type,
)

VERSION = f"{__version__}+embedded"
NDJSON_TYPE = "application/x-ndjson"
EMBED_MISSING = 'model "{}" not found, try pulling it first'

Part = Callable[[str], dict[str, Any]]  # a piece of text -> the field that carries it


def error_reply(error: ApiError) -> Response:
    """Return Ollama's form of an error."""
    return json_response({"error": str(error)}, status=error.status)


class OllamaRoutes:
    """Handlers of `/` and `/api/...`."""

    def __init__(self, catalogue: Catalogue, runners: Runners, engine: Engine) -> None:
        self._catalogue = catalogue
        self._runners = runners
        self._engine = engine

    def routes(self) -> Routes:
        """Return the table of routes."""
        handlers = {
            ("GET", "/"): self.root,
            ("GET", "/api/version"): self.version,
            ("GET", "/api/tags"): self.tags,
            ("POST", "/api/show"): self.show,
            ("GET", "/api/ps"): self.running,
            ("POST", "/api/generate"): self.generate,
            ("POST", "/api/chat"): self.chat,
            ("POST", "/api/embed"): self.embed,
            ("POST", "/api/embeddings"): self.embeddings,
        }
        struck = frozenset({"/api/generate", "/api/chat", "/api/embed", "/api/embeddings"})
        return Routes(handlers=handlers, error_reply=error_reply, struck=struck)

    async def root(self, exchange: Exchange) -> Response:
        """Say that the server runs."""
        return Response(200, b"Ollama is running", TEXT_TYPE)

    async def version(self, exchange: Exchange) -> Response:
        """Return the version, which names the embedded server."""
        return json_response({"version": VERSION})

    async def tags(self, exchange: Exchange) -> Response:
        """List the models."""
        return json_response({"models": [_listed(entry) for entry in self._catalogue.entries.values()]})

    async def show(self, exchange: Exchange) -> Response:
        """Describe one model."""
        entry = self._catalogue.find(model_name(read_body(exchange.request.body)))
        info: dict[str, Any] = {"general.architecture": "query-mutator", "query-mutator.context_length": CONTEXT_LENGTH}
        if entry.dim:
            info["query-mutator.embedding_length"] = entry.dim
        if entry.operators:
            info["query_mutator.operators"] = list(entry.operators)
        return json_response(
            {
                "modelfile": f"# Part of Query Mutator's embedded server\nFROM {entry.tagged}\n",
                "parameters": "",
                "template": "{{ .Prompt }}",
                "details": entry.details(),
                "model_info": info,
                "capabilities": entry.capabilities,
                "modified_at": stamp(entry.modified_at),
            }
        )

    async def running(self, exchange: Exchange) -> Response:
        """List the loaded models."""
        models = [
            {
                "name": runner.entry.tagged,
                "model": runner.entry.tagged,
                "size": 0,
                "digest": runner.entry.digest,
                "details": runner.entry.details(),
                "expires_at": stamp_in(runner.expires_in_s),
                "size_vram": 0,
                "context_length": runner.options["num_ctx"],
            }
            for runner in self._runners.loaded()
        ]
        return json_response({"models": models})

    async def generate(self, exchange: Exchange) -> Response | None:
        """Answer `prompt`."""
        payload = read_body(exchange.request.body)
        entry = self._text_model(payload, "generate")
        if field(payload, "suffix", str, ""):
            raise ApiError(400, f"{entry.tagged} does not support insert")
        prompt = field(payload, "prompt", str, "")
        return await self._reply(exchange, payload, entry, prompt, lambda text: {"response": text})

    async def chat(self, exchange: Exchange) -> Response | None:
        """Answer the last user message."""
        payload = read_body(exchange.request.body)
        entry = self._text_model(payload, "chat")
        if field(payload, "tools", list):
            raise ApiError(400, f"{entry.tagged} does not support tools")
        prompt = last_user_text(field(payload, "messages", list, []))
        return await self._reply(exchange, payload, entry, prompt, _as_message)

    async def embed(self, exchange: Exchange) -> Response:
        """Return a vector for each text of `input`."""
        payload = read_body(exchange.request.body)
        entry = self._catalogue.find(model_name(payload), missing=EMBED_MISSING)
        texts = texts_of(payload.get("input"))
        options, keep_alive_s = field(payload, "options", dict, {}), _keep_alive(payload)
        dimensions = field(payload, "dimensions", int, 0)
        done = await vectors_of(
            self._engine,
            entry,
            texts,
            options,
            keep_alive_s=keep_alive_s,
            dimensions=dimensions,
            fault=exchange.fault,
        )
        timing = {"total_duration": done.total_ns, "load_duration": done.load_ns, "prompt_eval_count": done.tokens}
        told = {"model": payload["model"], "embeddings": done.vectors, **(timing if texts else {})}
        return maybe_cut(json_response(told), exchange.fault)

    async def embeddings(self, exchange: Exchange) -> Response:
        """Return one vector for `prompt`: the older form of `/api/embed`."""
        payload = read_body(exchange.request.body)
        entry = self._catalogue.find(model_name(payload), missing=EMBED_MISSING)
        texts = texts_of(field(payload, "prompt", str, ""))
        options, keep_alive_s = field(payload, "options", dict, {}), _keep_alive(payload)
        done = await vectors_of(self._engine, entry, texts, options, keep_alive_s=keep_alive_s, fault=exchange.fault)
        return maybe_cut(json_response({"embedding": done.vectors[0] if texts else []}), exchange.fault)

    def _text_model(self, payload: Mapping[str, Any], verb: str) -> Entry:
        name = model_name(dict(payload))
        entry = self._catalogue.find(name)
        if entry.replies is None:
            raise ApiError(400, f'"{name}" does not support {verb}')
        if payload.get("think"):
            raise ApiError(400, f'"{name}" does not support thinking')
        return entry

    async def _reply(
        self, exchange: Exchange, payload: dict[str, Any], entry: Entry, prompt: str, part: Part
    ) -> Response | None:
        options, keep_alive_s = field(payload, "options", dict, {}), _keep_alive(payload)
        limits = call_options(options)
        if not prompt:
            reason = await self._engine.load(entry, options, keep_alive_s=keep_alive_s)
            return json_response(_line(payload["model"], part(""), done=True) | {"done_reason": reason})
        call = Call(
            entry=entry,
            prompt=prompt,
            format=_format(payload),
            options=options,
            keep_alive_s=keep_alive_s,
            fault=exchange.fault,
            **limits,
        )
        if field(payload, "stream", bool, True):
            await self._stream(exchange, call, payload["model"], part)
            return None
        reply = await self._engine.complete(call)
        return maybe_cut(json_response(_last(payload["model"], part(reply.text), reply)), call.fault)

    async def _stream(self, exchange: Exchange, call: Call, model: str, part: Part) -> None:
        stream = exchange.connection.stream(exchange.request, NDJSON_TYPE)

        def write(tokens: Sequence[str]) -> None:
            stream.write(b"".join(dumps(_line(model, part(token), done=False)) + b"\n" for token in tokens))

        reply = await self._engine.complete(call, write)
        last = dumps(_last(model, part(""), reply)) + b"\n"
        stream.write(last[: len(last) // 2] if call.fault == "cut" else last)
        stream.close()


def last_user_text(messages: list[Any]) -> str:
    """Return the text of the last user message, or of the last message when none is a user's.

    Raises ApiError 400 for messages that are no objects with text.
    """
    texts: dict[str, str] = {}
    for message in messages:
        if not isinstance(message, dict):
            raise wrong_type("messages", message, "api.Message")
        text = field(message, "content", str, "")
        texts |= {"last": text, field(message, "role", str, ""): text}
    return texts.get("user", texts.get("last", ""))


def _as_message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def _line(model: str, part: dict[str, Any], *, done: bool) -> dict[str, Any]:
    return {"model": model, "created_at": now_stamp(), **part, "done": done}


def _last(model: str, part: dict[str, Any], reply: Reply) -> dict[str, Any]:
    line = _line(model, part, done=reply.done)
    return line | {"done_reason": reply.done_reason} | reply.durations() if reply.done else line | reply.durations()


def _listed(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.tagged,
        "model": entry.tagged,
        "modified_at": stamp(entry.modified_at),
        "size": 0,
        "digest": entry.digest,
        "details": entry.details(),
    }


def _format(payload: dict[str, Any]) -> str | Mapping[str, Any] | None:
    """Return "json", a schema or None; raises ApiError 400 for anything else."""
    format = payload.get("format")
    if format is None or format in ("", "json") or isinstance(format, dict):
        return format or None
    raise ApiError(400, f'invalid format: {dumps(format).decode()}; expected "json" or a valid JSON Schema object')


def _keep_alive(payload: dict[str, Any]) -> float | None:
    value = payload.get("keep_alive")
    if isinstance(value, (bool, list, dict)):
        raise wrong_type("keep_alive", value, "api.Duration")
    try:
        return None if value is None else parse_keep_alive(value)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
