"""The proxy's routes: everything is forwarded, requests to virtual models are rewritten."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from importlib import resources
from types import FrameType
from urllib.parse import quote

import orjson
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from query_mutator.apply.proxy import chat
from query_mutator.apply.proxy.answers import Exchange, PolicyAnswerer
from query_mutator.apply.proxy.metrics import Metrics
from query_mutator.apply.proxy.server import (
    BACKLOG,
    Access,
    Bodies,
    ClientLimits,
    HttpError,
    Server,
    cors_headers,
    is_preflight,
)
from query_mutator.apply.proxy.upstream import (
    Content,
    Headers,
    Upstream,
    UpstreamError,
    UpstreamGone,
    end_to_end,
    slices,
)
from query_mutator.types import MAX_NAME_CHARS, Json

_JSON = {"Content-Type": "application/json"}
_METRICS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_PAGE = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    ),
}
_ONE_MODEL, _REWRITE = "/v1/models/", "/qm/rewrite"
_OWN = ("/metrics", "/healthz", _REWRITE)
_APIS, _UPLOADS = ("/api/", "/v1/"), "/api/blobs/"
#: Path of a list of models -> the field that has the rows, the fields of a row that name the model.
LISTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "/api/tags": ("models", ("name", "model")),
    "/api/ps": ("models", ("name", "model")),
    "/v1/models": ("data", ("id",)),
}
_CORS_PREFIX = "access-control-"
_EMBEDS = re.compile(r"embed|minilm|\bbge\b|\be5\b|rerank|whisper|clip\b", re.IGNORECASE)


class ProxyApp:
    """The handler of requests."""

    def __init__(
        self, upstream: Upstream, answerer: PolicyAnswerer, metrics: Metrics, *, access: Access, limits: ClientLimits
    ) -> None:
        self.upstream, self.answerer, self.metrics = upstream, answerer, metrics
        self.access, self.limits, self.bodies = access, limits, Bodies(limits)
        self.open = 0  # requests being answered

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request, whose body may still be on its way."""
        found = _Request(self, request)
        with suppress(ConnectionError):  # the client has left, or reads nothing
            await found.respond()
        return found.response

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request that has arrived; HttpError 503 if too many are being answered."""
        if self.open >= self.limits.requests:
            raise HttpError(503, f"{self.limits.requests} requests are being answered; try again later")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def close(self) -> None:
        """Start no more calls and close the connections to the upstream."""
        self.answerer.episodes.close()
        await self.upstream.close()


class _Request:
    """One request and its reply."""

    def __init__(self, app: ProxyApp, request: web.BaseRequest) -> None:
        self._app, self._request, self.response = app, request, web.StreamResponse()
        self._cors: dict[str, str] = {}  # of replies to a page that may call
        self._method, self._path, self._target = request.method, request.path, _origin_form(request)

    async def respond(self) -> None:
        """Reply; cancelled when the client is gone."""
        try:
            self._app.access.check(self._request)
            self._cors = cors_headers(self._request)
            if is_preflight(self._request) or self._target == "*":
                await self._whole(204, b"", {})
            elif not self._target.startswith("/"):
                raise HttpError(400, "malformed request target")
            elif not await self._own_route():
                await self._forward_or_rewrite()
        except HttpError as error:
            await self._error(error.status, str(error))
        except UpstreamError as error:
            await self._whole(error.status, error.body, error.headers)
        except UpstreamGone as error:
            if not self.response.prepared:
                await self._error(502, f"upstream {error}")
            elif self._request.transport is not None:  # the client sees an incomplete reply
                self._request.transport.close()

    # --- the proxy's own routes --------------------------------------------------------------------------------------

    async def _own_route(self) -> bool:
        """Answer a route of the proxy itself; False for the others."""
        if self._method != "GET":
            return False
        if self._path == "/metrics":
            await self._whole(200, self._app.metrics.prometheus().encode(), _METRICS)
        elif self._path == "/healthz":
            await self._whole(200, b'{"status":"ok"}', _JSON)
        elif self._path == "/" and "text/html" in self._request.headers.get("Accept", ""):
            page = resources.files("query_mutator.apply.proxy").joinpath("page.html").read_bytes()
            await self._whole(200, page, _PAGE)
        else:
            return False
        return True

    # --- what goes to the upstream -----------------------------------------------------------------------------------

    async def _forward_or_rewrite(self) -> None:
        has_body = self._request.body_exists
        if self._path.startswith(_UPLOADS):
            await self._forward(self._app.bodies.pieces(self._request) if has_body else None)
            return
        async with self._app.bodies.whole(self._request) as content:
            with self._app.answering():  # not before: half a body takes nobody's place
                if self._method == "GET" and self._path in LISTS:
                    await self._list()
                elif self._method == "GET" and self._path.startswith(_ONE_MODEL):
                    await self._one_model(self._path.removeprefix(_ONE_MODEL))
                elif self._method == "POST" and self._path == _REWRITE:
                    await self._rewrite(content)
                elif self._method in ("POST", "DELETE") and self._path.startswith(_APIS):
                    await self._post(content)
                else:
                    await self._forward(content if has_body else None)

    async def _post(self, content: bytearray) -> None:
        """Forward a request; one to a virtual model is rewritten, or forwarded under the upstream's name."""
        body = chat.parsed(content) if chat.is_small(content) else None
        call = chat.read_call(self._path, body)
        if call is not None:
            exchange = Exchange(call=call, path=self._path, headers=self._sent())
            exchange.skips, exchange.wants_field = self._wants("X-QM-Skip"), self._wants("X-QM-Body")
            reply = await self._app.answerer.answer(exchange)
            async with reply.stack:
                await self._stream(200, reply.headers, reply.body)
            return
        alias = chat.virtual_in(body)
        if body is None or alias is None:
            await self._forward(content, model=chat.model_of(body))
        else:
            await self._forward(
                orjson.dumps(chat.upstream_body(body)),
                model=chat.upstream_name(chat.model_of(body) or alias),
                alias=alias,
            )

    async def _rewrite(self, content: bytearray) -> None:
        body = chat.parsed(content) if chat.is_small(content) else None
        messages = body.get("messages") if body is not None else None
        call = chat.read_call("/api/chat", {"model": chat.virtual_name(""), "messages": messages})
        if call is None or not messages:
            raise HttpError(400, 'send {"messages": [{"role": "user", "content": "..."}]}')
        exchange = Exchange(call=call, path=self._path, headers=self._sent(), skips=self._wants("X-QM-Skip"))
        await self._whole(200, orjson.dumps(await self._app.answerer.rewrite(exchange)), _JSON)

    async def _list(self) -> None:
        """Forward a list of models, of all servers that can be reached, with the virtual ones in it."""
        replies = await self._app.upstream.lists(self._target, self._sent("accept-encoding"))
        response, content = next((each for each in replies if each[0].status == 200), replies[0])
        found = [body for each, text in replies if each.status == 200 and (body := chat.parsed(text)) is not None]
        merged = orjson.dumps(with_virtual(self._path, found)) if found else content
        await self._whole(response.status, merged, end_to_end(response.headers))

    async def _one_model(self, name: str) -> None:
        """Describe one model of OpenAI's list; a virtual one as the upstream's, under its own name."""
        real, headers = chat.upstream_name(name), self._sent("accept-encoding")
        target = _ONE_MODEL + quote(real, safe="/:")
        async with self._app.upstream.send("GET", target, headers, None, model=real) as response:
            content = await self._app.upstream.read(response)
            body = chat.parsed(content) if chat.is_virtual(name) and response.status == 200 else None
            if body is not None:
                content = orjson.dumps({**body, "id": name})
            await self._whole(response.status, content, end_to_end(response.headers))

    async def _forward(self, content: Content, *, model: str | None = None, alias: str | None = None) -> None:
        """Forward a request and its reply as they are; with `alias` in the place of the model's name in the reply."""
        if alias is not None and self._path not in chat.NAMED_PATHS:
            name, real = alias[:MAX_NAME_CHARS], chat.upstream_name(alias)[:MAX_NAME_CHARS]
            raise HttpError(400, f"{name!r} is {real!r} with rewriting, not a model of the server; name {real!r}")
        headers, upstream = self._sent() if alias is None else self._sent("accept-encoding"), self._app.upstream
        async with AsyncExitStack() as stack:
            if model is not None and self._path in chat.MODEL_PATHS:
                stack.enter_context(self._app.metrics.calling(model))
            sending = upstream.send(self._method, self._target, headers, content, model=model)
            response = await stack.enter_async_context(sending)
            kept, chunks = end_to_end(response.headers), upstream.pieces(response, bounded=alias is not None)
            if alias is not None:
                kept.popall("Content-Length", None)
                chunks = chat.renamed_lines(chat.read_lines(chunks), alias)
            await self._stream(response.status, kept, chunks)

    def _sent(self, *without: str) -> CIMultiDict[str]:
        """Return the client's headers for the upstream, without those for the proxy."""
        own = ("host", "expect", "origin", *(("authorization",) if self._app.access.has_key else ()))
        kept = end_to_end(self._request.headers, *own, *without)
        return CIMultiDict(each for each in kept.items() if not each[0].lower().startswith(("x-qm-", _CORS_PREFIX)))

    def _wants(self, name: str) -> bool:
        return self._request.headers.get(name, "").lower() not in ("", "0", "false")

    # --- replies -----------------------------------------------------------------------------------------------------

    async def _whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        sent = CIMultiDict(headers)
        if status == 204:
            sent.popall("Content-Length", None)
        else:
            sent["Content-Length"] = str(len(body))
        await self._stream(status, sent, slices(b"" if self._method == "HEAD" else body))

    async def _stream(self, status: int, headers: Headers, body: AsyncIterator[bytes]) -> None:
        self._app.metrics.count("qm_requests_total", route=_route(self._path), code=str(status))
        response, cors = self.response, self._cors
        response.set_status(status)
        response.headers.extend(
            each for each in headers.items() if not (cors and each[0].lower().startswith(_CORS_PREFIX))
        )
        response.headers.update({"Server": headers.get("Server", "qm"), **cors})
        is_framed = self._request.version >= HttpVersion11 or "Content-Length" in headers
        if not (is_framed and self._request.content.is_eof()):
            response.force_close()
        await response.prepare(self._request)
        async with aclosing(body) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await response.write(chunk)
        await response.write_eof()
        await self._request.writer.drain()

    async def _error(self, status: int, message: str) -> None:
        error: object = {"message": message, "type": "api_error", "param": None, "code": None}
        body = {"error": error if self._path.startswith("/v1/") else message}
        await self._whole(status, orjson.dumps(body), _JSON)


def _origin_form(request: web.BaseRequest) -> str:
    """Return the path and query of a request as they were sent, where its target may be a whole URL (RFC 9112, 3.2)."""
    target = request.raw_path
    _, is_absolute, rest = target.partition("://")
    return target if target.startswith("/") or not is_absolute else "/" + rest.partition("/")[2]


def _route(path: str) -> str:
    """Return the path as a label: those of the two APIs, and one word for all others."""
    return path if path in chat.CHAT_PATHS or path in LISTS or path in _OWN else "other"


# --- lists of models -------------------------------------------------------------------------------------------------


def with_virtual(path: str, replies: Sequence[Json]) -> Json:
    """Return the lists of several servers as one, in which each model that writes text is followed by its virtual one.

    A model that several servers have is listed once.
    """
    field, names = LISTS[path]
    lists = [rows if isinstance(rows := reply.get(field), list) else [] for reply in replies]
    if not isinstance(replies[0].get(field), list):
        return replies[0]
    listed, seen = [], set[str]()
    for row in (row for rows in lists for row in rows):
        name = str(row.get(names[0])) if isinstance(row, dict) else ""
        if name and name in seen:
            continue
        seen.add(name)
        listed.append(row)
        if isinstance(row, dict) and _writes_text(row):
            listed.append(
                {**row, **{key: chat.virtual_name(row[key]) for key in names if isinstance(row.get(key), str)}}
            )
    return {**replies[0], field: listed}


def _writes_text(row: Json) -> bool:
    """Return whether a listed model writes text: by its capabilities where the list has them, else by its name."""
    capabilities = row.get("capabilities")
    if isinstance(capabilities, list) and capabilities:
        return "completion" in capabilities
    return _EMBEDS.search(str(row.get("name") or row.get("id") or "")) is None


# --- running ---------------------------------------------------------------------------------------------------------


class ProxyServer:
    """Serves requests on a listening socket."""

    def __init__(self, app: ProxyApp, listening: socket.socket) -> None:
        self._app, self._listening = app, listening
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._stopped = asyncio.Event()

    def run(self) -> None:
        """Serve until `stop`; then open requests may finish, `drain_s` at most."""
        with self._runner:
            self._runner.run(self._serve())

    def stop(self) -> None:
        """Stop from another thread or a signal handler."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _serve(self) -> None:
        server = Server(self._app, self._app.limits)
        listener = await self._loop.create_server(server, sock=self._listening, backlog=BACKLOG)
        await self._stopped.wait()
        listener.close()
        await server.drain()
        await self._app.close()


def run_frozen(server: ProxyServer) -> None:
    """Serve until SIGTERM or Ctrl-C, and raise the signal again afterwards; a second one acts at once.

    All that is loaded is left out of garbage collections: one that visits a policy and an encoder stops every request
    for 55 ms.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    caught: list[int] = []

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    def stop(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        restore()
        server.stop()

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    gc.collect()
    gc.freeze()
    try:
        server.run()
    finally:
        gc.unfreeze()
        restore()
    for again in caught:
        signal.raise_signal(again)
