"""The model server behind the proxy: requests go there, and replies come back, byte for byte and as they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from aiohttp.http import HttpProcessingError
from yarl import URL

from query_mutator.files import count_values
from query_mutator.llm.connection import tls_context
from query_mutator.llm.reply import MAX_REPLY_BYTES

__all__ = [
    "MAX_REPLY_VALUES", "Response", "Upstream", "UpstreamError", "UpstreamGone", "end_to_end", "json_headers",
    "read_object", "success",
]  # fmt: skip

Header = tuple[bytes, bytes]
#: Headers of one connection (RFC 9110, 7.6.1), which a proxy does not forward.
_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
OWN_PREFIX = b"x-qm-"  # of headers between a client and the proxy
_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError)
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
KEEP_ALIVE_S = 4.0  # llama.cpp says Keep-Alive: timeout=5, and closes then
MAX_REPLY_VALUES = 1_000_000  # parsed in a tenth of a second, in which no other client is served
_MAX_HEADER_BYTES = 64 * 1024
_PIECE_BYTES = 256 * 1024  # of a body; a larger one is sent in pieces, so that other requests are served in between


class UpstreamGone(Exception):
    """The upstream could not be reached (`is_unreached`), or closed the connection before its reply was complete."""

    def __init__(self, message: str, *, is_unreached: bool = False) -> None:
        super().__init__(message)
        self.is_unreached = is_unreached


class UpstreamError(Exception):
    """The upstream answered a call of the proxy with an error, which the client gets as it is."""

    def __init__(self, status: int, headers: list[Header], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


class Response:
    """The upstream's reply: status and headers, and the body as it arrives or whole."""

    def __init__(self, reply: aiohttp.ClientResponse, upstream: str, *, max_bytes: int) -> None:
        self._reply, self._upstream, self._max_bytes = reply, upstream, max_bytes
        self.url = str(reply.url)
        self.status_code = reply.status
        self.headers: list[Header] = list(reply.raw_headers)

    @property
    def is_ok(self) -> bool:
        """Return whether the status is 200."""
        return self.status_code == 200

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body's bytes on arrival; UpstreamGone if the connection ends before the body does."""
        try:
            async for chunk in self._reply.content.iter_any():
                yield chunk
        except _ERRORS as error:
            raise UpstreamGone(f"{self._upstream}: {_named(error)}") from error

    async def aiter_bounded(self) -> AsyncIterator[bytes]:
        """Yield the body's bytes as `aiter_raw` does; UpstreamGone too if they are more than --max-reply-mb allows."""
        left_bytes = self._max_bytes
        async for chunk in self.aiter_raw():
            left_bytes -= len(chunk)
            if left_bytes < 0:
                limit_mb = self._max_bytes / 1e6
                raise UpstreamGone(
                    f"{self._upstream}: sent a reply of more than {limit_mb:g} MB; --max-reply-mb allows larger ones"
                )
            yield chunk

    async def aread(self) -> bytes:
        """Return the whole body; UpstreamGone as above."""
        return b"".join([chunk async for chunk in self.aiter_bounded()])


class Upstream:
    """One model server; `headers`, as the key it expects, are sent where the client has none of these names.

    With `replaces` they are sent in place of the client's: the server is this process's own. `max_reply_bytes` bounds
    the replies that are not forwarded as they are.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        headers: Mapping[str, str] | None = None,
        replaces: bool = False,
    ) -> None:
        self.url = url.rstrip("/")
        self._own = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        self._replaced = [name for name, _ in self._own] if replaces else []
        self._timeout_s, self._max_reply_bytes = timeout_s, max_reply_bytes
        self._session: aiohttp.ClientSession | None = None

    def _opened(self) -> aiohttp.ClientSession:
        """Return the session, which needs a running event loop to be made; a proxy of the environment is not used."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=tls_context()),
                timeout=aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=self._timeout_s),
                trace_configs=[_watching()],
                cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
                auto_decompress=False,
                max_line_size=_MAX_HEADER_BYTES,
                max_field_size=_MAX_HEADER_BYTES,
            )
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def send(
        self, method: str, target: bytes, headers: Iterable[Header], content: AsyncIterator[bytes] | bytes | None
    ) -> AsyncIterator[Response]:
        """Send a request as it is and yield the reply before its body; leaving cuts what has not arrived.

        UpstreamGone if there is no reply.
        """
        sent = self._sent(headers)
        if isinstance(content, bytes) and len(content) > _PIECE_BYTES:
            sent.append((b"Content-Length", str(len(content)).encode()))
            content = _pieces(content)
        try:
            reply = await self._reply(method, target, sent, content)
        except _ERRORS as error:
            raise UpstreamGone(f"{self.url}: {_named(error)}", is_unreached=isinstance(error, _UNREACHED)) from error
        try:
            if reply.status < 200:  # no server may send it, and no client would take it
                raise UpstreamGone(f"{self.url}: answered with the status {reply.status}")
            yield Response(reply, self.url, max_bytes=self._max_reply_bytes)
        finally:
            reply.close()

    async def _reply(
        self, method: str, target: bytes, headers: Iterable[Header], content: AsyncIterator[bytes] | bytes | None
    ) -> aiohttp.ClientResponse:
        """Return the reply; where the server has just closed a kept connection, ask again, as aiohttp does for GET."""
        connection: dict[str, bool] = {}
        while True:
            try:
                return await self._opened().request(
                    method,
                    URL(self.url + target.decode("latin-1"), encoded=True),
                    headers=[(name.decode("latin-1"), _text(value)) for name, value in headers],
                    data=content,
                    allow_redirects=False,
                    trace_request_ctx=connection,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not connection.pop("is_kept", False) or not isinstance(content, bytes | None):
                    raise

    def _sent(self, headers: Iterable[Header]) -> list[Header]:
        """Return a client's headers as the upstream gets them, with its own."""
        kept = end_to_end(headers, without=(b"host", b"expect", *self._replaced))
        kept = [pair for pair in kept if not pair[0].lower().startswith(OWN_PREFIX)]
        given = {name.lower() for name, _ in kept}
        return [*kept, *((name, value) for name, value in self._own if name not in given)]


def json_headers(headers: Iterable[Header]) -> list[Header]:
    """Return a client's headers for a JSON body of the proxy, whose reply it reads."""
    kept = end_to_end(headers, without=(b"host", b"content-length", b"content-type", b"accept-encoding"))
    return [*kept, (b"content-type", b"application/json"), (b"accept-encoding", b"identity")]


async def success(response: Response) -> Response:
    """Return a reply of status 200; UpstreamError for another."""
    if not response.is_ok:
        raise UpstreamError(response.status_code, end_to_end(response.headers), await response.aread())
    return response


async def read_object(response: Response) -> dict[str, Any]:
    """Return the JSON object of a whole reply; UpstreamGone for anything else."""
    content = await response.aread()
    if count_values(content) > MAX_REPLY_VALUES:
        raise UpstreamGone(f"{response.url}: the reply has more than {MAX_REPLY_VALUES:,} values")
    try:
        reply = orjson.loads(content)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise UpstreamGone(f"{response.url}: the reply is not a JSON object")
    return reply


def end_to_end(headers: Iterable[Header], *, without: Iterable[bytes] = ()) -> list[Header]:
    """Return the headers that a proxy forwards, in their order and spelling."""
    headers = list(headers)
    named = {
        part.strip().lower() for name, value in headers if name.lower() == b"connection" for part in value.split(b",")
    }
    dropped = _HOP_BY_HOP | named | set(without)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _watching() -> aiohttp.TraceConfig:
    """Return what notes in a request's context that its connection was kept from an earlier one."""

    async def kept(
        _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
    ) -> None:
        context.trace_request_ctx["is_kept"] = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(kept)
    return config


def _named(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _text(value: bytes) -> str:
    """Return a header's value such that it is sent as the same bytes: as UTF-8, and Latin-1 is not valid UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]
