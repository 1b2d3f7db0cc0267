"""Ollama's and OpenAI's routes and wire formats on the test server's calls.

https://github.com/ollama/ollama/blob/main/docs/api.md; of OpenAI's models and chat.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from query_mutator.errors import UsageError
from query_mutator.files import decode_object, encode
from query_mutator.testing.calls import (
    BUSY,
    MAX_CONTEXT,
    Answer,
    Call,
    Calls,
    Echo,
    FaultPlan,
    Outcome,
    PromptError,
    Served,
    ServerSettings,
    TextModel,
    text_model,
    user_text,
)
from query_mutator.types import ChatRequest, Message
from query_mutator.version import __version__

_DETAILS = {"format": "python", "family": "query-mutator", "families": ["query-mutator"], "parameter_size": ""}
_SAMPLING = ("temperature", "num_predict", "seed")  # options that are fields of a ChatRequest
_ANY_JSON = {"type": "object", "properties": {"response": {"type": "string"}}}
_OPENAI_OPTIONS = {
    "max_tokens": "num_predict", "max_completion_tokens": "num_predict", "seed": "seed", "temperature": "temperature",
    "stop": "stop",
}  # fmt: skip

_HOST = "127.0.0.1"
_BACKLOG = 2048  # clients that connect within one turn of the event loop; more than that have to try again
_TURNS = 5  # of the loop


class Routes:
    """Handlers of all routes; faults strike only those that call a model."""

    def __init__(self, models: Sequence[Served], calls: Calls, *, faults: FaultPlan | None) -> None:
        self._models = {model.name.lower(): model for model in models}
        self._calls = calls
        self._faults = faults
        self._numbers = itertools.count(1)

    def application(self) -> web.Application:
        """Return the application that serves them."""
        app = web.Application(middlewares=[self._middleware], client_max_size=2**26)
        gets = {
            "/": self._about, "/api/version": self._about, "/api/tags": self._tags, "/api/ps": self._running,
            "/v1/models": self._openai_models, "/v1/models/{model:.+}": self._openai_models,
            "/debug/stats": self._show_stats,
        }  # fmt: skip
        posts = {
            "/api/show": self._show, "/api/generate": self._ollama_text, "/api/chat": self._ollama_text,
            "/v1/chat/completions": self._openai_text,
        }  # fmt: skip
        app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.delete("/debug/stats", self._show_stats)])
        return app

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Count the request, and give an error the body of the interface that it belongs to."""
        try:
            response: web.StreamResponse = await handler(request)
        except PromptError as error:
            response = _error(request.path, error.status, str(error))
        except web.HTTPException as error:
            response = _error(request.path, error.status, f"{request.method} {request.path}: {error.reason}")
        except asyncio.CancelledError:
            self._calls.stats.cancelled += 1
            raise
        resource = request.match_info.route.resource
        self._calls.stats.routes[resource.canonical if resource else "other"] += 1
        return response

    async def _call(self, request: web.Request) -> tuple[dict[str, Any], str | None]:
        """Return what a client sent, and the fault that its call is to have where that does not end it here."""
        payload = await _payload(request)
        attempt = request.headers.get("X-Stainless-Retry-Count", "")
        number = int(attempt) if attempt.isdecimal() else None
        fault = self._faults.pick(await request.read(), attempt=number) if self._faults else None
        if fault:
            self._calls.stats.faults[fault] += 1
        if fault == "500":
            raise PromptError("an error was encountered while running the model: scripted fault", status=500)
        if fault == "503":
            raise PromptError(BUSY, status=503)
        if fault == "reset" and request.transport is not None:
            connection = request.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.transport.abort()
            await asyncio.Event().wait()  # until the lost connection cancels this
        return payload, fault

    def _find(self, payload: Mapping[str, Any]) -> Served:
        """Return the model of a request, with or without `:latest`; PromptError for none."""
        name = payload.get("model") or payload.get("name")
        if not isinstance(name, str):
            raise PromptError("model is required")
        found = self._models.get(name.lower().removesuffix(":latest"))
        if found is None:
            raise PromptError(f"model '{name}' not found", status=404)
        return found

    def _text_call(
        self, payload: Mapping[str, Any], messages: Sequence[Any], options: Any, format: Any, fault: str | None
    ) -> Call:
        """Return the call for a text; PromptError for a model or request that cannot have one."""
        name, model = payload.get("model", ""), self._find(payload)
        if payload.get("tools") or payload.get("think"):
            what = "tools" if payload.get("tools") else "thinking"
            raise PromptError(f'"{name}" does not support {what}')
        rest = {key: value for key, value in options.items() if key not in _SAMPLING}
        request = ChatRequest(
            model=name,
            messages=tuple(map(_message, messages)),
            max_tokens=options.get("num_predict") or -1,
            temperature=options.get("temperature") or 0.0,
            seed=options.get("seed"),
            options=rest,
            json_schema=_ANY_JSON if format == "json" else format,
            logprobs=bool(payload.get("logprobs")),
        )
        return Call(model=model, request=request, fault=fault, **_limits(payload))

    async def _about(self, request: web.Request) -> web.Response:
        if request.path == "/":
            return web.Response(text="Ollama is running")
        return _json({"version": f"{__version__}+testing"})

    async def _tags(self, request: web.Request) -> web.Response:
        return _json({"models": [_summary(model) for model in self._models.values()]})

    async def _running(self, request: web.Request) -> web.Response:
        loaded = self._calls.loaded.values()
        rows = [_summary(runner.model) | {"context_length": runner.options["num_ctx"]} for runner in loaded]
        return _json({"models": rows})

    async def _show(self, request: web.Request) -> web.Response:
        model = self._find(await _payload(request))
        shown = {
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in model.parameters.items()),
            "template": "{{ .Prompt }}",
            "details": _DETAILS,
            "model_info": {"general.architecture": "stub", "stub.context_length": MAX_CONTEXT},
            "capabilities": ["completion"],
        }
        return _json(shown)

    async def _ollama_text(self, request: web.Request) -> web.StreamResponse:
        payload, fault = await self._call(request)
        is_chat, options = request.path == "/api/chat", payload.get("options") or {}
        prompt = [{"role": "user", "content": payload.get("prompt")}]
        messages = payload.get("messages") or [] if is_chat else prompt
        call = self._text_call(payload, messages, options, payload.get("format") or None, fault)

        def line(text: str, *, done: bool = False, **more: Any) -> bytes:
            part = {"message": _said(text)} if is_chat else {"response": text}
            stamp = datetime.now(UTC).isoformat(timespec="microseconds")[:26] + "Z"
            row = {"model": call.request.model, "created_at": stamp, **part, "done": done}
            return encode(row | more) + b"\n"

        def last(text: str, outcome: Outcome) -> bytes:
            reason = {"done_reason": outcome.done_reason} if outcome.done else {}
            logprobs = {"logprobs": outcome.logprobs} if outcome.logprobs else {}
            return line(text, done=outcome.done, **reason, **outcome.durations(), **logprobs)

        async def write(tokens: Sequence[str]) -> None:
            await stream.write(b"".join(map(line, tokens)))

        if not user_text(call.request):  # an empty prompt only loads the model
            await self._calls.load(call)
            return _reply(line("", done=True, done_reason="load"))
        if payload.get("stream") is False:
            outcome = await self._calls.complete(call)
            return _reply(last(outcome.text, outcome), fault)
        stream = _Stream(request, "application/x-ndjson")
        return await stream.end(last("", await self._calls.complete(call, write)), fault)

    async def _openai_models(self, request: web.Request) -> web.Response:
        about = {"object": "model", "created": 0, "owned_by": "library"}
        if request.match_info:
            return _json({"id": self._find(request.match_info).tagged, **about})
        return _json({"object": "list", "data": [{"id": model.tagged, **about} for model in self._models.values()]})

    async def _openai_text(self, request: web.Request) -> web.StreamResponse:
        payload, fault = await self._call(request)
        if not payload.get("messages"):
            raise PromptError("[] is too short - 'messages'")
        options = {ours: payload[theirs] for theirs, ours in _OPENAI_OPTIONS.items() if payload.get(theirs) is not None}
        if isinstance(options.get("stop"), str):
            options["stop"] = [options["stop"]]
        wanted = payload.get("response_format") or {}
        schema = (wanted.get("json_schema") or {}).get("schema")
        format = "json" if wanted.get("type") == "json_object" else schema
        call = self._text_call(payload, payload["messages"], options, format, fault)
        about = {"id": f"chatcmpl-{next(self._numbers)}", "created": int(time.time()), "model": call.request.model}

        def event(delta: str | None, reason: str | None = None, **more: Any) -> bytes:
            choices = [] if delta is None else [{"index": 0, "delta": _said(delta), "finish_reason": reason}]
            return (
                b"data: " + encode({"object": "chat.completion.chunk", **about, "choices": choices, **more}) + b"\n\n"
            )

        async def write(tokens: Sequence[str]) -> None:
            await stream.write(b"".join(map(event, tokens)))

        if payload.get("stream"):
            stream = _Stream(request, "text/event-stream")
            outcome = await self._calls.complete(call, write)
            has_usage = (payload.get("stream_options") or {}).get("include_usage")
            usage = event(None, usage=_usage(outcome)) if has_usage else b""
            end = event("", outcome.done_reason) + (b"" if fault == "cut" else usage + b"data: [DONE]\n\n")
            return await stream.end(end if outcome.done else b"", fault)
        choices, reply_tokens = [], 0
        for index in range(payload.get("n") or 1):
            seed = call.request.seed and call.request.seed + index
            outcome = await self._calls.complete(replace(call, request=replace(call.request, seed=seed)))
            reason = outcome.done_reason if outcome.done else "abort"
            logprobs = {"content": outcome.logprobs} if outcome.logprobs else None
            message = {"index": index, "message": _said(outcome.text), "finish_reason": reason, "logprobs": logprobs}
            choices.append(message)
            reply_tokens += outcome.reply_tokens
        counts = _usage(replace(outcome, reply_tokens=reply_tokens))
        return _json({"object": "chat.completion", **about, "choices": choices, "usage": counts}, fault)

    async def _show_stats(self, request: web.Request) -> web.Response:
        counted = self._calls.stats.snapshot()
        if request.method == "DELETE":
            self._calls.stats = self._calls.stats.cleared()
        return _json(counted)


class _Stream:
    """A streamed reply, which begins with its first piece: an earlier error has an error status."""

    def __init__(self, request: web.Request, content_type: str) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"Content-Type": content_type})

    async def write(self, piece: bytes) -> None:
        """Send a piece."""
        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(piece)

    async def end(self, last: bytes, fault: str | None) -> web.StreamResponse:
        """Send the last piece, half of it for the fault "cut", and end the reply."""
        await self.write(last[: len(last) // 2] if fault == "cut" else last)
        await self._response.write_eof()
        return self._response


def _json(payload: Any, fault: str | None = None, *, status: int = 200) -> web.Response:
    return _reply(encode(payload), fault, status=status)


def _reply(body: bytes, fault: str | None = None, *, status: int = 200) -> web.Response:
    body = body[: len(body) // 2] if fault == "cut" else body
    return web.Response(status=status, body=body, content_type="application/json")


def _error(path: str, status: int, message: str) -> web.Response:
    """Return an error in the form of the interface that `path` belongs to."""
    about = {"message": message, "type": "api_error", "param": None, "code": None}
    return _json({"error": about if path.startswith("/v1/") else message}, status=status)


async def _payload(request: web.Request) -> dict[str, Any]:
    try:
        return decode_object(await request.read())
    except ValueError as error:
        raise PromptError(str(error)) from None


def _message(message: Mapping[str, Any]) -> Message:
    """Return a message of a chat, a list of text parts as one text; PromptError for another one."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content)
    if not isinstance(content, str):
        raise PromptError("invalid message format")
    return Message(role=message.get("role", "user"), content=content)


def _limits(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request says about its context."""
    return {name: payload[name] is not False for name in ("truncate", "shift") if name in payload}


def _summary(model: Served) -> dict[str, Any]:
    return {"name": model.tagged, "model": model.tagged, "size": 0, "digest": model.digest, "details": _DETAILS}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _usage(outcome: Outcome) -> dict[str, int]:
    prompt, reply = outcome.prompt_tokens, outcome.reply_tokens
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


class StubServer(AbstractContextManager["StubServer"]):
    """A running server; `url` and `port` say where, `close()` stops it and leaves no thread and no socket."""

    def __init__(self, models: Iterable[Served], settings: ServerSettings, faults: FaultPlan | None = None) -> None:
        self._models = tuple(models)
        self._calls = Calls(settings)
        self._faults = faults
        self._loop = asyncio.SelectorEventLoop()  # whatever loop the process prefers: a Ray worker's is uvloop's
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-server", daemon=True)
        self._thread.start()
        try:
            self._runner = asyncio.run_coroutine_threadsafe(self._start(settings.port), self._loop).result()
        except (OSError, OverflowError) as error:
            self._end()
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot listen on {_HOST}:{settings.port} ({why}); choose another --port") from None
        self.port: int = self._runner.addresses[0][1]
        self.url = f"http://{_HOST}:{self.port}"

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Return the counters of `GET /debug/stats`."""
        return self._calls.stats.snapshot()

    def close(self) -> None:
        """Cancel all calls, close all sockets and join all threads; idempotent."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._end()

    async def _start(self, port: int) -> web.AppRunner:
        routes = Routes(self._models, self._calls, faults=self._faults)
        runner = web.AppRunner(routes.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        self._listening = socket.create_server((_HOST, port), backlog=_BACKLOG)
        await web.SockSite(runner, self._listening, backlog=_BACKLOG).start()
        return runner

    async def _stop(self) -> None:
        self._loop.remove_reader(self._listening)
        for _ in range(_TURNS):  # one that asyncio has just accepted is no connection yet, and would stay open
            await asyncio.sleep(0)
        for connection in self._runner.server.connections if self._runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()  # which cancels its call
        await self._runner.cleanup()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for model in self._models:
            if model.threads is not None:
                model.threads.shutdown()


def start_server(
    models: Mapping[str, TextModel | Answer] | Iterable[TextModel],
    *,
    faults: FaultPlan | None = None,
    **settings: Any,
) -> StubServer:
    """Start a server with these models and `echo`; `settings` are ServerSettings.

    UsageError for a setting out of range or a port that is not available.
    """
    try:
        checked = ServerSettings(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from None
    named = dict(models) if isinstance(models, Mapping) else {model.name: model for model in models}
    named.setdefault(Echo.name, Echo())
    return StubServer([text_model(name, model) for name, model in named.items()], checked, faults)
