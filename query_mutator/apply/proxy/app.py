"""The proxy's routes: everything is forwarded, requests to virtual models are rewritten."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from urllib.parse import quote

import orjson
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from query_mutator.apply.proxy import chat
from query_mutator.apply.proxy.answers import Exchange, PolicyAnswerer
from query_mutator.apply.proxy.metrics import Metrics
from query_mutator.apply.proxy.server import Access, ClientLimits, cors_headers, is_preflight
from query_mutator.apply.proxy.upstream import (
    Content,
    Headers,
    Upstream,
    UpstreamError,
    UpstreamGone,
    end_to_end,
    parsed,
    slices,
)
from query_mutator.llm.ollama import with_tag
from query_mutator.types import MAX_NAME_CHARS, Json

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METRICS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_ONE_MODEL, _REWRITE, _FEEDBACK = "/v1/models/", "/qm/rewrite", "/qm/feedback"
_INSTANT = ("/metrics", "/healthz")
_APIS, _UPLOADS = ("/api/", "/v1/"), "/api/blobs/"
#: Path of a list of models -> the field that has the rows, the fields of a row that name the model.
LISTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "/api/tags": ("models", ("name", "model")),
    "/api/ps": ("models", ("name", "model")),
    "/v1/models": ("data", ("id",)),
}
_CORS = web.RequestKey("cors", dict[str, str])  # what lets the page that asked read the reply
_CORS_PREFIX = "access-control-"


class Proxy:
    """The handlers of requests; `application` has their routes."""

    def __init__(
        self, upstream: Upstream, answerer: PolicyAnswerer, metrics: Metrics, *, access: Access, limits: ClientLimits
    ) -> None:
        self.upstream, self._answerer, self._metrics = upstream, answerer, metrics
        self.names, self._feedback = answerer.names, answerer.feedback
        self._access, self.limits = access, limits
        self._open = 0  # requests being answered

    def application(self) -> web.Application:
        """Return the routes, with the checks that every request passes."""
        app = web.Application(middlewares=[self._explain, self._admit], client_max_size=self.limits.body_bytes)
        own: Mapping[str, Handler] = {
            "/metrics": self._show_metrics,
            "/healthz": self._show_health,
            **dict.fromkeys(LISTS, self._list),
            _ONE_MODEL + "{name:.+}": self._one_model,
        }
        for path, handler in own.items():
            app.router.add_get(path, handler, allow_head=False)
        app.router.add_post(_REWRITE, self._rewrite)
        app.router.add_post(_FEEDBACK, self._take_feedback)
        app.router.add_route("*", _UPLOADS + "{digest:.*}", self._upload)
        app.router.add_route("*", "/{path:.*}", self._forward_or_rewrite)
        app.on_response_prepare.append(self._sign)
        app.cleanup_ctx.append(self.upstream.connected)
        return app

    # --- what every request passes -----------------------------------------------------------------------------------

    @web.middleware
    async def _explain(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Reply to a failure in the form of the API that was called."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            status, message = error.status, error.text or error.reason
        except UpstreamError as error:
            return await self._whole(request, error.status, error.body, error.headers)
        except UpstreamGone as error:
            status, message = 502, f"upstream {error}"
        except TimeoutError:
            status, message = 408, "the request did not arrive in time"
        except web.RequestPayloadError:
            status, message = 400, "malformed request body"
        except ConnectionError:  # the client has left, or reads nothing
            raise
        except Exception:
            logger.exception("the handler of %s %s failed", request.method, request.path)
            status, message = 500, "internal error of the proxy; its log says more"
        if request.writer.output_size > 0 and request.transport is not None:  # the client sees an incomplete reply
            request.transport.abort()
            raise ConnectionResetError(message)
        about: object = {"message": message, "type": "api_error", "param": None, "code": None}
        return _json({"error": about if request.path.startswith("/v1/") else message}, status)

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check who calls, wait for the body, and bound the requests at once: half a body takes nobody's place."""
        self._access.check(request)
        request[_CORS] = cors_headers(request)
        if is_preflight(request):
            return web.Response(status=204)
        if request.path in _INSTANT or request.path.startswith(_UPLOADS):
            return await handler(request)
        if (request.content_length or 0) > self.limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(self.limits.body_bytes, request.content_length or 0)
        async with asyncio.timeout(self.limits.timeout_s):
            await request.read()
        if self._open >= self.limits.requests:
            raise web.HTTPServiceUnavailable(text=f"{self._open} requests are being answered; try again later")
        self._open += 1
        try:
            return await handler(request)
        finally:
            self._open -= 1

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        """Count a reply, and let the page that asked read it."""
        self._metrics.count("qm_requests_total", route=_route(request.path), code=str(response.status))
        if cors := request.get(_CORS):
            for name in [name for name in response.headers if name.lower().startswith(_CORS_PREFIX)]:
                del response.headers[name]
            response.headers.update(cors)

    # --- the proxy's own routes --------------------------------------------------------------------------------------

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.prometheus().encode(), headers=_METRICS)

    async def _show_health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _rewrite(self, request: web.Request) -> web.Response:
        content = await request.read()
        body = parsed(content) if chat.is_small(content) else None
        messages = body.get("messages") if body is not None else None
        call = chat.read_call("/api/chat", {"model": self.names.virtual(""), "messages": messages}, self.names)
        if call is None or not messages:
            raise web.HTTPBadRequest(text='send {"messages": [{"role": "user", "content": "..."}]}')
        return _json(await self._answerer.rewrite(self._exchange(request, call)))

    async def _take_feedback(self, request: web.Request) -> web.Response:
        """Take a client's grade of a reply, once."""
        content = await request.read()
        body = (parsed(content) if chat.is_small(content) else None) or {}
        name, right = body.get("id"), body.get("right")
        if not isinstance(name, str) or not isinstance(right, bool):
            raise web.HTTPBadRequest(text='send {"id": "X-QM-Id of a reply", "right": true} or false')
        if not self._feedback.take(name, right, request.headers.get("Authorization", "")):
            raise web.HTTPNotFound(text="no reply of this id waits for feedback from a client with this key")
        return _json({"status": "ok"})

    def _exchange(self, request: web.Request, call: chat.ChatCall) -> Exchange:
        send = partial(self._stream, request, 200)
        skips = request.headers.get("X-QM-Skip", "").lower() not in ("", "0", "false")
        key = request.headers.get("Authorization", "")
        return Exchange(call=call, path=request.path, headers=self._sent(request), key=key, send=send, skips=skips)

    # --- what goes to the upstream -----------------------------------------------------------------------------------

    async def _forward_or_rewrite(self, request: web.Request) -> web.StreamResponse:
        """Forward a request; one to a virtual model is rewritten, or forwarded under the upstream's name."""
        content, path = await request.read(), request.path
        reads = request.method in ("POST", "DELETE") and path.startswith(_APIS) and chat.is_small(content)
        body = parsed(content) if reads else None
        call, alias = chat.read_call(path, body, self.names), self.names.virtual_in(body)
        if call is not None:
            return await self._answerer.answer(self._exchange(request, call))
        if body is None or alias is None:
            model = chat.model_of(body)
            return await self._forward(request, content if request.body_exists else None, model=model)
        real = self.names.upstream(chat.model_of(body) or alias)
        if path not in chat.NAMED_PATHS:
            name, real = alias[:MAX_NAME_CHARS], self.names.upstream(alias)[:MAX_NAME_CHARS]
            raise web.HTTPBadRequest(
                text=f"{name!r} is {real!r} with rewriting, not a model of the server; name {real!r}"
            )
        if path in chat.MODEL_PATHS:
            self._metrics.count("qm_decisions_total", decision="passed", mode="passed", reason=path.rpartition("/")[2])
        return await self._forward(request, orjson.dumps(self.names.upstream_body(body)), model=real, alias=alias)

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        """Forward a request as it arrives."""

        async def pieces() -> AsyncIterator[bytes]:
            while not request.content.at_eof():
                async with asyncio.timeout(self.limits.timeout_s):
                    piece = await request.content.readany()
                yield piece

        return await self._forward(request, pieces() if request.body_exists else None)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        """Forward a list of models, of all servers that can be reached, with the virtual ones in it."""
        replies = await self.upstream.lists(request.rel_url.raw_path_qs, self._sent(request, "accept-encoding"))
        response, content = next((each for each in replies if each[0].status == 200), replies[0])
        found = [body for each, text in replies if each.status == 200 and (body := parsed(text)) is not None]
        merged = orjson.dumps(with_virtual(request.path, found, self.names)) if found else content
        return await self._whole(request, response.status, merged, end_to_end(response.headers))

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        """Describe one model of OpenAI's list; a virtual one as the upstream's, under its own name."""
        name, headers = request.match_info["name"], self._sent(request, "accept-encoding")
        real = self.names.upstream(name)
        target = _ONE_MODEL + quote(real, safe="/:")
        async with self.upstream.send("GET", target, headers, None, model=real) as response:
            content = await self.upstream.read(response)
            body = parsed(content) if self.names.is_virtual(name) and response.status == 200 else None
            if body is not None:
                content = orjson.dumps({**body, "id": name})
            return await self._whole(request, response.status, content, end_to_end(response.headers))

    async def _forward(
        self, request: web.Request, content: Content, *, model: str | None = None, alias: str | None = None
    ) -> web.StreamResponse:
        """Forward a request and its reply as they are; with `alias` in the place of the model's name in the reply."""
        headers = self._sent(request, *(() if alias is None else ("accept-encoding",)))
        async with AsyncExitStack() as stack:
            if model is not None and request.path in chat.MODEL_PATHS:
                stack.enter_context(self._metrics.calling(model))
            sending = self.upstream.send(request.method, request.rel_url.raw_path_qs, headers, content, model=model)
            response = await stack.enter_async_context(sending)
            kept, pieces = end_to_end(response.headers), self.upstream.pieces(response, bounded=alias is not None)
            if alias is not None:
                kept.popall("Content-Length", None)
                pieces = chat.renamed_lines(chat.read_lines(pieces), alias)
            return await self._stream(request, response.status, kept, pieces)

    def _sent(self, request: web.Request, *without: str) -> CIMultiDict[str]:
        """Return the client's headers for the upstream, without those for the proxy."""
        own = ("host", "expect", "origin", *(("authorization",) if self._access.has_key else ()))
        kept = end_to_end(request.headers, *own, *without)
        return CIMultiDict(each for each in kept.items() if not each[0].lower().startswith(("x-qm-", _CORS_PREFIX)))

    # --- replies -----------------------------------------------------------------------------------------------------

    async def _whole(self, request: web.Request, status: int, body: bytes, headers: Headers) -> web.StreamResponse:
        sent = CIMultiDict(headers)
        sent["Content-Length"] = str(len(body))
        return await self._stream(request, status, sent, slices(body))

    async def _stream(
        self, request: web.Request, status: int, headers: Headers, body: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        """Send a reply as it arrives; TimeoutError where the client reads nothing for the time limit."""
        response, transport = web.StreamResponse(status=status, headers={"Server": "qm"}), request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        response.headers.update(headers)
        if request.version < HttpVersion11 and "Content-Length" not in headers:
            response.force_close()  # which ends the reply
        transport.set_write_buffer_limits(high=0)  # or what a client does not read stays behind unseen
        await response.prepare(request)
        async with aclosing(body) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                async with asyncio.timeout(self.limits.timeout_s):
                    await response.write(piece)
        async with asyncio.timeout(self.limits.timeout_s):
            await response.write_eof()
            await request.writer.drain()
        return response


def _json(body: object, status: int = 200) -> web.Response:
    headers = {"Content-Type": "application/json", "Server": "qm"}
    return web.Response(status=status, body=orjson.dumps(body), headers=headers)


def _route(path: str) -> str:
    """Return the path as a label: those of the two APIs, and one word for all others."""
    return path if path in chat.CHAT_PATHS or path in LISTS or path in (*_INSTANT, _REWRITE, _FEEDBACK) else "other"


# --- lists of models -------------------------------------------------------------------------------------------------


def with_virtual(path: str, replies: Sequence[Json], names: chat.Names = chat.EACH) -> Json:
    """Return the lists of several servers as one, in which each model is followed by its virtual one.

    A model that several servers have is listed once; of several that answer, the virtual one is next to the first.
    """
    field, keys = LISTS[path]
    lists = [rows if isinstance(rows := reply.get(field), list) else [] for reply in replies]
    if not isinstance(replies[0].get(field), list):
        return replies[0]
    listed, seen = [], set[str]()
    for row in (row for rows in lists for row in rows):
        name = str(row.get(keys[0])) if isinstance(row, dict) else ""
        if name and name in seen:
            continue
        seen.add(name)
        listed.append(row)
        if isinstance(row, dict) and (not names.first or with_tag(name) == with_tag(names.first)):
            listed.append({**row, **{key: names.virtual(row[key]) for key in keys if isinstance(row.get(key), str)}})
    return {**replies[0], field: listed}
