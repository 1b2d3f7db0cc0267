"""Ollama's chat, generate and lists of models in front of a server that has OpenAI's API only.

/api/chat, /api/generate -> /v1/chat/completions     whole or as a stream
/api/tags, /api/ps       -> /v1/models
another /api/ path          status 404, with the address that has the server's own API
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import orjson

from query_mutator.apply.proxy.replies import STREAM_TYPES, choice_of, parsed, read_lines, text_of, thought_of
from query_mutator.apply.proxy.upstream import Header, Response, Upstream, UpstreamGone, json_headers, read_object
from query_mutator.types import Json

__all__ = ["BothApis", "openai_body"]

#: Path -> the field of a reply that has its text.
_ASKING = {b"/api/chat": "message", b"/api/generate": "response"}
_LISTS = (b"/api/tags", b"/api/ps")
_LACKING = (404, 405, 501)  # status of a path that a server does not have
#: What the two APIs call alike; OpenAI's has no other of Ollama's options.
_OPTIONS = ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_REFUSED = ("tools", "suffix", "template", "context", "raw")  # fields that mean nothing to the other API


class Made(Response):
    """A reply made from another one."""

    def __init__(self, url: str, status: int, body: AsyncIterator[bytes] | bytes, content_type: bytes) -> None:
        self.url, self.status_code, self._body = url, status, body
        self._upstream, self._max_bytes = url, sys.maxsize  # the reply that it is made from is bounded
        self.headers: list[Header] = [(b"content-type", content_type)]

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        if isinstance(self._body, bytes):
            yield self._body
            return
        async for piece in self._body:
            yield piece


class BothApis(Upstream):
    """A model server that is asked once whether it has Ollama's API; one without it gets OpenAI's requests."""

    has_ollama: bool | None = None  # None: not known yet

    @asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: Iterable[Header], content: AsyncIterator[bytes] | bytes | None
    ) -> AsyncIterator[Response]:
        """Send a request, one to Ollama's API as one to OpenAI's if need be; UpstreamGone if there is no reply."""
        path = target.partition(b"?")[0]
        if not path.startswith(b"/api/") or await self._has_ollama():
            async with super().send(method, target, headers, content) as response:
                yield response
        elif method == "GET" and path in _LISTS:
            async with super().send("GET", b"/v1/models", headers, None) as response:
                yield await self._list(response)
        elif method == "POST" and path in _ASKING and content is not None:
            whole = content if isinstance(content, bytes) else b"".join([piece async for piece in content])
            async with self._asked(path, headers, whole) as response:
                yield response
        else:
            message = f"this server has OpenAI's API only: use /v1/ here, or {self.url} for all that it has"
            yield self._error(404, message)

    async def _has_ollama(self) -> bool:
        """Return whether the server reports an Ollama version; True while it does not say."""
        if self.has_ollama is None:
            async with super().send("GET", b"/api/version", [], None) as response:
                reply = parsed(await response.aread()) or {}
            if response.is_ok or response.status_code in _LACKING:
                self.has_ollama = response.is_ok and "version" in reply
        return self.has_ollama is not False

    @asynccontextmanager
    async def _asked(self, path: bytes, headers: Iterable[Header], content: bytes) -> AsyncIterator[Response]:
        body = parsed(content)
        try:
            asked = openai_body(path, body)
        except ValueError as error:
            yield self._error(400, str(error))
            return
        if not asked["messages"]:  # loads the model, which is loaded
            end = {"done": True, "done_reason": "load"}
            yield self._made(orjson.dumps({**_about(asked["model"]), **_text(path, ""), **end}))
            return
        started = time.monotonic()
        sending = super().send("POST", b"/v1/chat/completions", json_headers(headers), orjson.dumps(asked))
        async with sending as response:
            if not response.is_ok:
                reply = parsed(await response.aread()) or {}
                yield self._error(response.status_code, _message(reply))
            elif asked["stream"]:
                yield self._made(_lines(path, asked["model"], response, started), STREAM_TYPES["ollama_chat"])
            else:
                reply = await read_object(response)
                yield self._made(orjson.dumps(_whole(path, asked["model"], reply, started)))

    async def _list(self, response: Response) -> Response:
        content = await response.aread()
        rows = (parsed(content) or {}).get("data")
        if not response.is_ok or not isinstance(rows, list):
            return self._error(response.status_code if not response.is_ok else 502, "the server lists no models")
        names = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
        return self._made(orjson.dumps({"models": [{"name": name, "model": name} for name in names]}))

    def _made(self, body: AsyncIterator[bytes] | bytes, content_type: bytes = b"application/json") -> Response:
        return Made(self.url, 200, body, content_type)

    def _error(self, status: int, message: str) -> Response:
        return Made(self.url, status, orjson.dumps({"error": message}), b"application/json")


def openai_body(path: bytes, body: Json | None) -> Json:
    """Return the body of /v1/chat/completions for one of Ollama's; ValueError for a field that it has no word for."""
    if body is None or not isinstance(body.get("model"), str):
        raise ValueError("model is required")
    refused = next((name for name in _REFUSED if body.get(name)), None)
    if refused is not None:
        raise ValueError(f"{refused!r} needs a server with Ollama's API; send the request to /v1/chat/completions")
    messages = (body.get("messages") or []) if path == b"/api/chat" else _generate_messages(body)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages must be a list of objects")
    options: Json = given if isinstance(given := body.get("options"), dict) else {}
    made: Json = {"model": body["model"], "messages": [_message_with_images(message) for message in messages]}
    made |= {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    if isinstance(limit := options.get("num_predict"), int) and limit > 0:
        made["max_tokens"] = limit
    if body.get("format") == "json":
        made["response_format"] = {"type": "json_object"}
    elif isinstance(schema := body.get("format"), dict):
        made["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    made["stream"] = bool(body.get("stream", True))
    return made | ({"stream_options": {"include_usage": True}} if made["stream"] else {})


def _generate_messages(body: Json) -> list[Json]:
    """Return the turns of a request to /api/generate; none for one that only loads the model."""
    if not body.get("prompt"):
        return []
    user = {"role": "user", "content": body["prompt"], "images": body.get("images")}
    return [{"role": "system", "content": body["system"]}, user] if body.get("system") else [user]


def _message_with_images(message: Json) -> Json:
    """Return a turn as OpenAI has it: images are parts of its content."""
    if message.get("tool_calls") or message.get("role") == "tool":
        raise ValueError("tool calls need a server with Ollama's API; send the request to /v1/chat/completions")
    kept: Json = {name: message[name] for name in ("role", "content") if name in message}
    if not (images := message.get("images")):
        return kept
    if not isinstance(images, list):
        raise ValueError("images must be a list")
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    return {**kept, "content": [{"type": "text", "text": message.get("content", "")}, *parts]}


# --- replies ---------------------------------------------------------------------------------------------------------


def _about(model: str) -> Json:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def _text(path: bytes, text: str, thought: str = "") -> Json:
    field, thinking = _ASKING[path], {"thinking": thought} if thought else {}
    if field == "message":
        return {field: {"role": "assistant", "content": text, **thinking}}
    return {field: text, **thinking}


def _end(started: float, reason: str | None, usage: object) -> Json:
    """Return the last fields of a reply: why it ended, its tokens, and its time in nanoseconds."""
    counts: Mapping[str, Any] = usage if isinstance(usage, dict) else {}
    return {
        "done": True,
        "done_reason": reason or "stop",
        "total_duration": int((time.monotonic() - started) * 1e9),
        "prompt_eval_count": counts.get("prompt_tokens") or 0,
        "eval_count": counts.get("completion_tokens") or 0,
    }


def _whole(path: bytes, model: str, reply: Json, started: float) -> Json:
    choice = choice_of(reply)
    end = _end(started, choice.get("finish_reason"), reply.get("usage"))
    return {**_about(model), **_text(path, text_of("openai_chat", reply), thought_of(reply)), **end}


async def _events(response: Response) -> AsyncIterator[Json]:
    async for together in read_lines(response):
        for event in filter(None, map(parsed, together)):
            yield event


async def _lines(path: bytes, model: str, response: Response, started: float) -> AsyncIterator[bytes]:
    """Yield the lines of a stream as Ollama writes them; UpstreamGone if it ends without a reason."""
    reason: str | None = None
    usage: object = None
    async for event in _events(response):
        if event.get("error"):
            yield orjson.dumps({"error": _message(event)}) + b"\n"
            return
        choice = choice_of(event)
        reason, usage = choice.get("finish_reason") or reason, event.get("usage") or usage
        text, thought = text_of("openai_chat", event), thought_of(event)
        if text or thought:
            yield orjson.dumps({**_about(model), **_text(path, text, thought), "done": False}) + b"\n"
    if reason is None:
        raise UpstreamGone(f"{response.url}: the stream ended before the reply was complete")
    yield orjson.dumps({**_about(model), **_text(path, ""), **_end(started, reason, usage)}) + b"\n"


def _message(reply: Json) -> str:
    """Return what an error of OpenAI's API says."""
    said = reply.get("error")
    return str(said.get("message", said) if isinstance(said, dict) else said or "the server gives no reason")
