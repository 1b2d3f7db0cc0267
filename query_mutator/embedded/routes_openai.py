"""OpenAI's routes and wire formats, as far as Ollama offers them: models, chat completions, embeddings."""

from __future__ import annotations

import base64
import itertools
import struct
import time
from collections.abc import Sequence
from typing import Any

from query_mutator.embedded.catalogue import Catalogue, Entry
from query_mutator.embedded.embedding import texts_of, vectors_of
from query_mutator.embedded.engine import Call, Engine, Reply
from query_mutator.embedded.http import Response
from query_mutator.embedded.options import call_options
from query_mutator.embedded.routes_ollama import last_user_text
from query_mutator.embedded.routing import Exchange, Routes
from query_mutator.embedded.wire import ApiError, dumps, field, json_response, maybe_cut, model_name, read_body

SSE_TYPE = "text/event-stream"

_ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error"}


def error_reply(error: ApiError) -> Response:
    """Return OpenAI's form of an error."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    about = {"message": str(error), "type": kind, "param": None, "code": None}
    return json_response({"error": about}, status=error.status)


class OpenAIRoutes:
    """Handlers of `/v1/...`."""

    def __init__(self, catalogue: Catalogue, engine: Engine) -> None:
        self._catalogue = catalogue
        self._engine = engine
        self._numbers = itertools.count(1)

    def routes(self) -> Routes:
        """Return the table of routes."""
        handlers = {
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/models/*"): self.model,
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/v1/embeddings"): self.embeddings,
        }
        return Routes(
            handlers=handlers, error_reply=error_reply, struck=frozenset({"/v1/chat/completions", "/v1/embeddings"})
        )

    async def models(self, exchange: Exchange) -> Response:
        """List the models."""
        return json_response({"object": "list", "data": [_listed(e) for e in self._catalogue.entries.values()]})

    async def model(self, exchange: Exchange) -> Response:
        """Describe one model."""
        return json_response(_listed(self._catalogue.find(exchange.request.path.removeprefix("/v1/models/"))))

    async def chat(self, exchange: Exchange) -> Response | None:
        """Answer the last user message."""
        payload = read_body(exchange.request.body)
        messages = field(payload, "messages", list, [])
        if not messages:
            raise ApiError(400, "[] is too short - 'messages'")
        name = model_name(payload)
        call = Call(
            entry=self._text_model(name, payload),
            prompt=last_user_text([_plain(message) for message in messages]),
            format=_format(payload),
            fault=exchange.fault,
            **call_options(_options(payload)),
        )
        about = {
            "id": f"chatcmpl-{next(self._numbers)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": "fp_query_mutator",
        }
        if field(payload, "stream", bool, False):
            options = field(payload, "stream_options", dict, {})
            await self._stream(exchange, call, about, with_usage=field(options, "include_usage", bool, False))
            return None
        reply = await self._engine.complete(call)
        message = {"role": "assistant", "content": reply.text}
        choice = {"index": 0, "message": message, "finish_reason": reply.done_reason if reply.done else None}
        told = {"object": "chat.completion", **about, "choices": [choice], "usage": _usage(reply)}
        return maybe_cut(json_response(told), call.fault)

    def _text_model(self, name: str, payload: dict[str, Any]) -> Entry:
        entry = self._catalogue.find(name)
        if entry.replies is None:
            raise ApiError(400, f'"{name}" does not support chat')
        if field(payload, "tools", list):
            raise ApiError(400, f"{entry.tagged} does not support tools")
        return entry

    async def _stream(self, exchange: Exchange, call: Call, about: dict[str, Any], *, with_usage: bool) -> None:
        stream = exchange.connection.stream(exchange.request, SSE_TYPE)

        def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
            return b"data: " + dumps({"object": "chat.completion.chunk", **about, "choices": choices, **more}) + b"\n\n"

        def write(tokens: Sequence[str]) -> None:
            stream.write(b"".join(event([_delta(token, None)]) for token in tokens))

        reply = await self._engine.complete(call, write)
        if reply.done:
            last = event([_delta("", reply.done_reason)])
            last += event([], usage=_usage(reply)) if with_usage else b""
            stream.write(last[: len(last) // 2] if call.fault == "cut" else last + b"data: [DONE]\n\n")
        stream.close()

    async def embeddings(self, exchange: Exchange) -> Response:
        """Return a vector for each text of `input`, as numbers or in base64."""
        payload = read_body(exchange.request.body)
        name = model_name(payload)
        entry = self._catalogue.find(name)
        coding = field(payload, "encoding_format", str, "float").lower()
        if coding not in ("float", "base64"):
            raise ApiError(
                400, f"Invalid value for 'encoding_format' = {coding}. Supported values: ['float', 'base64']."
            )
        texts = [""] if payload.get("input") == "" else texts_of(payload.get("input"))
        if not texts:
            raise ApiError(400, "invalid input")
        dimensions = field(payload, "dimensions", int, 0)
        done = await vectors_of(self._engine, entry, texts, {}, dimensions=dimensions, fault=exchange.fault)
        data = [
            {"object": "embedding", "embedding": _base64(vector) if coding == "base64" else vector, "index": i}
            for i, vector in enumerate(done.vectors)
        ]
        usage = {"prompt_tokens": done.tokens, "total_tokens": done.tokens}
        told = {"object": "list", "data": data, "model": name, "usage": usage}
        return maybe_cut(json_response(told), exchange.fault)


def _listed(entry: Entry) -> dict[str, Any]:
    created = int(entry.modified_at.timestamp())
    return {"id": entry.tagged, "object": "model", "created": created, "owned_by": "library"}


def _plain(message: Any) -> Any:
    """Return the message with a list of text parts joined into one text; raises ApiError 400 for other parts."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = message["content"]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ApiError(400, "invalid message format")
    return message | {"content": "\n".join(part["text"] for part in parts)}


def _options(payload: dict[str, Any]) -> dict[str, Any]:
    """Return Ollama's options for OpenAI's fields."""
    stop = payload.get("stop")
    names = {"max_tokens": "num_predict", "max_completion_tokens": "num_predict"}
    names |= {name: name for name in ("seed", "temperature", "top_p")}
    options = {ours: payload[theirs] for theirs, ours in names.items() if payload.get(theirs) is not None}
    return options | {"stop": [stop] if isinstance(stop, str) else stop or []}


def _format(payload: dict[str, Any]) -> Any:
    wanted = field(payload, "response_format", dict, {})
    if wanted.get("type") == "json_object":
        return "json"
    if wanted.get("type") == "json_schema":
        return field(field(wanted, "json_schema", dict, {}), "schema", dict)
    return None


def _delta(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish_reason}


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.reply_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.reply_tokens,
        "total_tokens": total,
    }


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
