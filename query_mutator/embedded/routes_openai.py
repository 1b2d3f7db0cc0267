"""OpenAI's routes and wire formats, as far as Ollama offers them: models, chat completions, embeddings."""

from __future__ import annotations

import base64
import itertools
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from query_mutator.embedded.catalogue import Catalogue, Entry
from query_mutator.embedded.engine import Call, Engine, Reply
from query_mutator.embedded.http import Response
from query_mutator.embedded.routes_ollama import Route, last_user_text
from query_mutator.embedded.wire import (
    ApiError,
    Exchange,
    call_options,
    dumps,
    field,
    json_response,
    model_name,
    texts_of,
)

__all__ = ["OpenAIRoutes", "openai_error"]

SSE_TYPE = "text/event-stream"
CODINGS = ("float", "base64")  # of embeddings

#: Fields that would change the reply but are not implemented, with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "prediction": (),
}
_ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error"}


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return OpenAI's body of an error."""
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": None}}


class OpenAIRoutes:
    """Handlers of `/v1/...`."""

    def __init__(self, catalogue: Catalogue, engine: Engine) -> None:
        self._catalogue = catalogue
        self._engine = engine
        self._numbers = itertools.count(1)

    def routes(self) -> dict[str, dict[str, Route]]:
        """Return the handlers by path and method."""
        return {
            "/v1/models": {"GET": self.models},
            "/v1/models/*": {"GET": self.model},
            "/v1/chat/completions": {"POST": self.chat},
            "/v1/embeddings": {"POST": self.embeddings},
        }

    async def models(self, exchange: Exchange) -> Response:
        """List the models."""
        return json_response({"object": "list", "data": [_listed(e) for e in self._catalogue.entries.values()]})

    async def model(self, exchange: Exchange) -> Response:
        """Describe one model."""
        return json_response(_listed(self._catalogue.find(exchange.request.path.removeprefix("/v1/models/"))))

    async def chat(self, exchange: Exchange) -> Response | None:
        """Answer the last user message."""
        payload = exchange.payload
        messages = field(payload, "messages", list, [])
        if not messages:
            raise ApiError(400, "[] is too short - 'messages'")
        _refuse_unsupported(payload)
        call = Call(
            entry=self._catalogue.text_model(payload, "chat"),
            prompt=last_user_text([_plain(message) for message in messages]),
            format=_format(payload),
            fault=exchange.fault,
            **call_options(_options(payload)),
        )
        about = {
            "id": f"chatcmpl-{next(self._numbers)}",
            "created": int(time.time()),
            "model": model_name(payload),
            "system_fingerprint": "fp_query_mutator",
        }
        if field(payload, "stream", bool, False):
            options = field(payload, "stream_options", dict, {})
            await self._stream(exchange, call, about, with_usage=field(options, "include_usage", bool, False))
            return None
        reply = await self._engine.complete(call)
        message = {"role": "assistant", "content": reply.text}
        choice = {"index": 0, "message": message, "finish_reason": reply.done_reason if reply.done else None}
        return json_response({"object": "chat.completion", **about, "choices": [choice], "usage": _usage(reply)})

    async def embeddings(self, exchange: Exchange) -> Response:
        """Return a vector for each text of `input`, as numbers or in base64."""
        payload = exchange.payload
        name = model_name(payload)
        entry = self._catalogue.find(name)
        coding = field(payload, "encoding_format", str, "float").lower()
        if coding not in CODINGS:
            raise ApiError(400, f"Invalid value for 'encoding_format' = {coding}. Supported values: {list(CODINGS)}.")
        texts = [""] if payload.get("input") == "" else texts_of(payload.get("input"))
        if not texts:
            raise ApiError(400, "invalid input")
        dimensions = field(payload, "dimensions", int, 0)
        done = await self._engine.embed(Call(entry=entry, texts=texts, dimensions=dimensions, fault=exchange.fault))
        data = [
            {"object": "embedding", "embedding": _base64(vector) if coding == "base64" else vector, "index": i}
            for i, vector in enumerate(done.vectors)
        ]
        usage = {"prompt_tokens": done.tokens, "total_tokens": done.tokens}
        return json_response({"object": "list", "data": data, "model": name, "usage": usage})

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


def _refuse_unsupported(payload: Mapping[str, Any]) -> None:
    """Raise ApiError 400 for a field that this server would ignore although it changes the reply."""
    for name, neutral in _UNSUPPORTED.items():
        value = payload.get(name)
        if value is not None and value not in neutral:
            usual = f"; leave it out or send {dumps(neutral[0]).decode()}" if neutral else "; leave it out"
            raise ApiError(400, f"{name}={dumps(value)[:80].decode()} is not supported{usual}")
    for name in ("max_tokens", "max_completion_tokens"):
        if (limit := field(payload, name, int)) is not None and limit < 1:
            raise ApiError(400, f"{name}={limit} must be at least 1; leave it out for a reply of any length")


def _options(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ollama's options for OpenAI's fields."""
    stop = payload.get("stop")
    names = {"max_tokens": "num_predict", "max_completion_tokens": "num_predict"}
    names |= {name: name for name in ("seed", "temperature", "top_p")}
    options = {ours: payload[theirs] for theirs, ours in names.items() if payload.get(theirs) is not None}
    return options | {"stop": [stop] if isinstance(stop, str) else stop or []}


def _format(payload: Mapping[str, Any]) -> Any:
    wanted = field(payload, "response_format", dict, {})
    if wanted.get("type") == "json_object":
        return "json"
    if wanted.get("type") == "json_schema":
        return field(field(wanted, "json_schema", dict, {}), "schema", dict)
    return None


def _delta(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish_reason}


def _usage(reply: Reply) -> dict[str, int]:
    prompt, completion = reply.prompt_tokens, reply.reply_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
