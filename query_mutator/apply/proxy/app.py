"""The proxy's routes: everything is forwarded, requests to virtual models are rewritten."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from http import HTTPStatus
from importlib import resources
from urllib.parse import quote

import orjson

from query_mutator.apply.proxy.contract import Answerer, ClientLimits, Reply
from query_mutator.apply.proxy.cors import PREFLIGHT, cors_headers, without_origin
from query_mutator.apply.proxy.models import LISTS, merged_list
from query_mutator.apply.proxy.queue import Counts
from query_mutator.apply.proxy.replies import parsed, read_lines, renamed_lines
from query_mutator.apply.proxy.requests import (
    CHAT_PATHS,
    MAX_PARSED_BYTES,
    MAX_PARSED_VALUES,
    MODEL_PATHS,
    NAMED_PATHS,
    SUFFIX,
    is_small,
    is_virtual,
    model_of,
    names_virtual,
    read_call,
    upstream_body,
    upstream_name,
    virtual_in,
    virtual_name,
)  # fmt: skip
from query_mutator.apply.proxy.status import Status
from query_mutator.apply.proxy.upstream import Header, Upstream, UpstreamError, UpstreamGone, end_to_end
from query_mutator.embedded.access import Access
from query_mutator.embedded.http import Connection, HttpError, IncomingBody, Request, Stream
from query_mutator.types import MAX_NAME_CHARS

__all__ = ["ProxyApp"]

_JSON_TYPE: Header = (b"content-type", b"application/json")
_METRICS_TYPE: Header = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
_HTML_TYPE: Header = (b"content-type", b"text/html; charset=utf-8")
_POLICY: Header = (
    b"content-security-policy",
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'",
)
_ONE_MODEL, _REWRITE = "/v1/models/", "/qm/rewrite"
_OWN = ("/metrics", "/healthz", "/qm/queue", _REWRITE)
_APIS, _UPLOADS = ("/api/", "/v1/"), "/api/blobs/"


class ProxyApp:
    """The handler of requests; `api_key` is what clients must send, if anything."""

    def __init__(
        self,
        upstream: Upstream,
        answerer: Answerer,
        status: Status,
        *,
        access: Access,
        api_key: str | None,
        limits: ClientLimits,
    ) -> None:
        self.upstream, self.answerer, self.status = upstream, answerer, status
        self.access, self.limits = access, limits
        self.key = None if api_key is None else f"Bearer {api_key}".encode()
        self.open = 0  # requests being answered

    async def __call__(self, request: Request, connection: Connection) -> None:
        """Serve one request, whose body may still be on its way."""
        await _Exchange(self, request, connection).respond()

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
        """Stop what runs in the background and close the connections to the upstream."""
        await self.answerer.close()
        await self.upstream.close()


class _Exchange:
    """One request and its reply."""

    def __init__(self, app: ProxyApp, request: Request, connection: Connection) -> None:
        assert request.incoming is not None, "the server hands over requests with their head"
        self._app, self._request, self._connection = app, request, connection
        self._method, self._path, self._target = request.method, request.path, request.target
        self._headers = request.fields
        self._incoming: IncomingBody = request.incoming
        self._began = False
        self._cors: list[Header] = []  # of every reply to a page of another address

    async def respond(self) -> None:
        """Reply; cancelled when the client is gone."""
        try:
            refusal = self._refusal()
            if refusal is not None:
                await self._error(*refusal)
                return
            self._cors = cors_headers(self._app.access, self._headers)
            if self._is_preflight or self._target == b"*":
                await self._whole(204, b"")
            elif not await self._own_route():
                await self._forward_or_rewrite()
        except HttpError as error:
            await self._error(error.status, str(error))
        except UpstreamError as error:
            await self._whole(error.status, error.body, *error.headers)
        except UpstreamGone as error:
            if self._began:  # the client sees an incomplete reply
                self._connection.transport.close()
            else:
                await self._error(502, f"upstream {error}")

    def _refusal(self) -> tuple[int, str] | None:
        app = self._app
        why = app.access.refusal(self._request.headers)
        if why is not None:
            return 403, why
        given = self._header("authorization").encode("latin-1")
        if app.key is not None and not self._is_preflight and not hmac.compare_digest(given, app.key):
            return 401, "send the key of qm serve --api-key as Authorization: Bearer KEY"
        return None

    @property
    def _is_preflight(self) -> bool:
        """Return whether a browser asks what a page may send; such a request carries no key."""
        return self._method == "OPTIONS" and PREFLIGHT in self._request.headers

    def _header(self, name: str) -> str:
        return self._request.headers.get(name, "")

    # --- the proxy's own routes ------------------------------------------------------------------------------------

    async def _own_route(self) -> bool:
        """Answer a route of the proxy itself; False for the others."""
        if self._method != "GET":
            return False
        status = self._app.status
        if self._path == "/metrics":
            await self._whole(200, status.prometheus(await self._queue()).encode(), _METRICS_TYPE)
        elif self._path == "/healthz":
            await self._whole(200, b'{"status":"ok"}', _JSON_TYPE)
        elif self._path == "/qm/queue":
            counts = {"models": await self._queue(), "requests": self._app.open}
            await self._whole(200, orjson.dumps(counts), _JSON_TYPE)
        elif self._path == "/" and "text/html" in self._header("accept"):
            page = resources.files("query_mutator.apply.proxy").joinpath("page.html").read_bytes()
            await self._whole(200, page, _HTML_TYPE, _POLICY)
        else:
            return False
        return True

    async def _queue(self) -> Counts:
        """Return the calls by listed model; no list is asked for where there is no call."""
        queue = self._app.status.queue
        return queue.counts(await self._app.upstream.listed()) if queue.is_used else {}

    # --- what goes to the upstream ---------------------------------------------------------------------------------

    async def _forward_or_rewrite(self) -> None:
        has_body = bool({"content-length", "transfer-encoding"} & self._request.headers.keys())
        if self._path.startswith(_UPLOADS):
            await self._forward(self._incoming.pieces() if has_body else None)
            return
        await self._incoming.arrived(self._app.limits.body_bytes)
        with self._app.answering():  # not before: half a body takes nobody's place
            if self._method == "GET" and self._path in LISTS:
                await self._list()
            elif self._method == "GET" and self._path.startswith(_ONE_MODEL):
                await self._one_model(self._path.removeprefix(_ONE_MODEL))
            elif self._method == "POST" and self._path == _REWRITE:
                await self._rewrite()
            elif self._method in ("POST", "DELETE") and self._path.startswith(_APIS):
                await self._post(b"".join(self._incoming.held))
            else:
                await self._forward(self._incoming.pieces() if has_body else None)

    async def _post(self, content: bytes) -> None:
        """Forward a request; one to a virtual model is rewritten, or forwarded under the upstream's name."""
        body = parsed(content) if is_small(content) else None
        call = read_call(self._path, body)
        if call is not None:
            await self._stream(await self._app.answerer.answer(call, self._forwarded(), self._path))
            return
        model, alias = model_of(body), virtual_in(body)
        if body is None and names_virtual(content):
            if not is_small(content):
                limits = f"{MAX_PARSED_BYTES:,} bytes and {MAX_PARSED_VALUES:,} values"
                raise HttpError(413, f"a request to a model with {SUFFIX} has at most {limits}; ask the model itself")
            raise HttpError(400, f"the body is not valid JSON, which {SUFFIX} needs: no lone surrogates, NaN or 1e999")
        if body is None or alias is None:
            await self._forward(content, model=model)
        else:
            await self._forward(orjson.dumps(upstream_body(body)), model=upstream_name(model or alias), alias=alias)

    async def _one_model(self, name: str) -> None:
        """Describe one model of OpenAI's list; a virtual one as the upstream's, under its own name."""
        target = _ONE_MODEL.encode() + quote(upstream_name(name), safe="/:").encode()
        sending = self._app.upstream.send("GET", target, self._without_coding(), None, model=upstream_name(name))
        async with sending as response:
            content, body = await self._app.upstream.read(response), None
            if is_virtual(name) and response.status == 200:
                body = parsed(content)
            if isinstance(body, dict):
                content = orjson.dumps({**body, "id": name})
            await self._whole(response.status, content, *end_to_end(response.raw_headers))

    async def _rewrite(self) -> None:
        content = b"".join(self._incoming.held)
        body = parsed(content) if is_small(content) else None
        messages = body.get("messages") if isinstance(body, dict) else None
        call = read_call("/api/chat", {"model": virtual_name(""), "messages": messages})
        if call is None or not messages:
            await self._error(400, 'send {"messages": [{"role": "user", "content": "..."}]}')
            return
        await self._whole(200, orjson.dumps(await self._app.answerer.rewrite(call, self._headers)), _JSON_TYPE)

    async def _list(self) -> None:
        """Forward a list of models, of all servers that can be reached, with the virtual ones in it."""
        replies = await self._app.upstream.lists(self._target, self._without_coding())
        response, content = next((each for each in replies if each[0].status == 200), replies[0])
        content = merged_list(self._path, [found for each, found in replies if each.status == 200]) or content
        await self._whole(response.status, content, *end_to_end(response.raw_headers))

    async def _forward(
        self,
        content: AsyncIterator[bytes] | bytes | None,
        *,
        model: str | None = None,
        alias: str | None = None,
    ) -> None:
        """Forward a request and its reply as they are; with `alias` in the place of the model's name in the reply."""
        if alias is not None and self._path not in NAMED_PATHS:
            name, real = alias[:MAX_NAME_CHARS], upstream_name(alias)[:MAX_NAME_CHARS]
            raise HttpError(400, f"{name!r} is {real!r} with rewriting, not a model of the server; name {real!r}")
        headers = self._forwarded() if alias is None else self._without_coding()
        if isinstance(content, bytes):
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        async with AsyncExitStack() as stack:
            if model is not None and self._path in MODEL_PATHS:
                await stack.enter_async_context(self._app.status.queue.place(model))
            sending = self._app.upstream.send(self._method, self._target, headers, content, model=model)
            response = await stack.enter_async_context(sending)
            kept = end_to_end(response.raw_headers)
            chunks = self._app.upstream.pieces(response, bounded=False)
            if alias is not None:
                kept = end_to_end(kept, without=(b"content-length",))
                chunks = renamed_lines(read_lines(self._app.upstream.pieces(response)), alias)
            await self._stream(Reply(status=response.status, headers=kept, body=chunks))

    def _forwarded(self) -> list[Header]:
        """Return the client's headers, without the proxy's own key."""
        kept = without_origin(self._headers)
        return [pair for pair in kept if self._app.key is None or pair[0] != b"authorization"]

    def _without_coding(self) -> list[Header]:
        return [pair for pair in self._forwarded() if pair[0] != b"accept-encoding"]

    # --- bodies ----------------------------------------------------------------------------------------------------

    async def _stream(self, reply: Reply) -> None:
        stream = self._begin(reply.status, reply.headers)
        stream.flush()
        async with aclosing(reply.body) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                stream.write(chunk)
                await self._connection.drain()
        stream.close()

    async def _whole(self, status: int, body: bytes, *headers: Header) -> None:
        kept = [pair for pair in headers if pair[0].lower() != b"content-length"]
        if status != HTTPStatus.NO_CONTENT:
            kept.append((b"content-length", str(len(body)).encode()))
        stream = self._begin(status, kept)
        stream.write(body)
        stream.close()

    def _begin(self, status: int, headers: Iterable[Header]) -> Stream:
        self._began = True
        self._app.status.count("qm_requests_total", route=_route(self._path), code=str(status))
        sent = [*without_origin(headers), *self._cors] if self._cors else list(headers)
        return self._connection.forward(self._request, status, sent)

    async def _error(self, status: int, message: str) -> None:
        error: object = {"message": message, "type": "api_error", "param": None, "code": None}
        body = {"error": error if self._path.startswith("/v1/") else message}
        await self._whole(status, orjson.dumps(body), _JSON_TYPE)


def _route(path: str) -> str:
    """Return the path as a label: those of the two APIs, and one word for all others."""
    return path if path in CHAT_PATHS or path in LISTS or path in _OWN else "other"
