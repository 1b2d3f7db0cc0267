"""The HTTP server of the proxy: aiohttp's, with bounds on what a client may take, and the checks of who may call.

heads      64 KiB and 100 headers, within the time limit               431
bodies     --max-body-mb, at a fair rate; those of all within memory   408, 413, 503
replies    a client that reads nothing for the time limit is cut
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import ModuleType
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from query_mutator.errors import UsageError
from query_mutator.llm.address import is_loopback

resource: ModuleType | None
try:
    import resource
except ImportError:  # there is none for Windows
    resource = None

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100  # trailers included
MIN_BYTES_PER_S = 16 * 1024  # at which the deadline of a body that arrives moves on
SPARE_BYTES = 16_000_000  # of memory for bodies in addition to one of --max-body-mb
DISCARD_S = 5.0  # for which a refused client may still send, so that it reads the reply before a reset
BACKLOG = 2048  # clients that come before the server has started wait
_MAX_FILES = 16_384
PREFLIGHT = "Access-Control-Request-Method"  # the header by which a browser asks before it sends
PREFLIGHT_S = 12 * 3600  # for which a browser remembers what it may send
_EXPOSED = "x-qm-decision, x-qm-operators, x-qm-form, x-qm-calls, x-qm-overhead-ms"
#: Pages that may call, and ends of host names that are never those of a public site; both as Ollama has them.
_ORIGINS = re.compile(
    r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0)(:.*)?|(app|file|tauri|vscode-webview|vscode-file)://.*",
    re.IGNORECASE,
)
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")


class HttpError(Exception):
    """A request that is refused with a status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may take."""

    body_bytes: int = 64_000_000  # of a request; uploads of models are forwarded as they come
    requests: int = 1_000  # at once, of those that have arrived
    timeout_s: float = 60.0  # for a head, for a body that stalls, between two requests, for a reply that nobody reads
    drain_s: float = 30.0


class Access:
    """Who may call: clients with the key, if there is one, and pages that a browser on this machine shows.

    A page of another site can send requests to a server on the loopback address (its `Origin` header shows that), and
    with DNS rebinding it can even read the replies (its `Host` header has the site's name).
    """

    def __init__(self, *, host: str = "127.0.0.1", api_key: str | None = None) -> None:
        self._checks_host = is_loopback(host)
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self.has_key = api_key is not None  # that clients send, and that the upstream does not get

    def check(self, request: web.BaseRequest) -> None:
        """Raise HttpError for a client that may not call."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if self._checks_host and not is_local(host):
            raise HttpError(403, f"host {host!r} is not this machine; call the server by its address, as 127.0.0.1")
        if origin not in (None, f"http://{host}", f"https://{host}") and not _ORIGINS.fullmatch(origin):
            raise HttpError(403, f"origin {origin!r} is not allowed")
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._key is not None and not is_preflight(request) and not hmac.compare_digest(given, self._key):
            raise HttpError(401, "send the key of qm serve --api-key as Authorization: Bearer KEY")


def is_preflight(request: web.BaseRequest) -> bool:
    """Return whether a browser asks what a page may send; such a request carries no key."""
    return request.method == "OPTIONS" and PREFLIGHT in request.headers


def cors_headers(request: web.BaseRequest) -> dict[str, str]:
    """Return what lets the page that sent a request read the reply, and send what it asks to send."""
    if (origin := request.headers.get("Origin")) is None:
        return {}
    found = {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": _EXPOSED}
    if PREFLIGHT in request.headers:
        found["Access-Control-Allow-Methods"] = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
        found["Access-Control-Max-Age"] = str(PREFLIGHT_S)
        if wanted := request.headers.get("Access-Control-Request-Headers"):
            found["Access-Control-Allow-Headers"] = wanted
    return found


def is_local(host: str) -> bool:
    """Return whether a Host header names this machine or a local network; a client without the header may call."""
    name = host[: host.find("]") + 1].strip("[]") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost", socket.gethostname().lower()) or name.endswith(_LOCAL_SUFFIXES)
    return address.is_loopback or address.is_private or address.is_unspecified


# --- bodies ----------------------------------------------------------------------------------------------------------


class Bodies:
    """Reads bodies of requests; where memory for all of them is short, the largest that still arrives gives way."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits, self._left_bytes = limits, limits.body_bytes + SPARE_BYTES
        self._held: dict[asyncio.Task[Any], int] = {}  # bytes by request
        self._arriving: set[asyncio.Task[Any]] = set()

    async def pieces(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """Yield a body as it arrives; HttpError 408 if that takes too long, 400 if it is malformed."""
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # or aiohttp takes the reply for one that has begun
        left_s = self._limits.timeout_s
        while not request.content.at_eof():
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    piece = await request.content.readany()
            except TimeoutError:
                raise HttpError(408, "the request did not arrive in time") from None
            except web.RequestPayloadError:
                raise HttpError(400, "malformed request body") from None
            earned_s = len(piece) / MIN_BYTES_PER_S - (time.monotonic() - began_s)
            left_s = min(self._limits.timeout_s, left_s + earned_s)
            yield piece

    @asynccontextmanager
    async def whole(self, request: web.BaseRequest) -> AsyncIterator[bytearray]:
        """Yield a body that has arrived and hold its memory until the end; HttpError as above, 413 and 503."""
        task, content = asyncio.current_task(), bytearray()
        assert task is not None
        self._held[task] = 0
        self._arriving.add(task)
        try:
            self._check_size(request.content_length or 0)
            async for piece in self.pieces(request):
                self._check_size(len(content) + len(piece))
                self._take(task, len(piece))
                content += piece
            self._arriving.discard(task)
            yield content
        finally:
            self._arriving.discard(task)
            self._left_bytes += self._held.pop(task, 0)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.body_bytes:
            raise HttpError(413, f"the request has more than {self._limits.body_bytes:,} bytes")

    def _take(self, task: asyncio.Task[Any], num_bytes: int) -> None:
        while num_bytes > self._left_bytes:
            largest = max(self._arriving, key=self._held.__getitem__)
            if self._held[largest] <= self._held[task] + num_bytes:
                raise HttpError(503, "server busy: the requests in progress fill the memory for request bodies")
            self._left_bytes += self._held.pop(largest)
            self._arriving.discard(largest)
            largest.cancel()
        self._left_bytes -= num_bytes
        self._held[task] += num_bytes


# --- connections -----------------------------------------------------------------------------------------------------

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _Connection(web.RequestHandler):
    """A connection of one client, whose heads are bounded as a whole, and which ends when it reads nothing."""

    _head_bytes = 0  # that arrived since the last request
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Pause a reply until the client has read what was sent."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # type: ignore[attr-defined]

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the request, which frees its slot."""
        super().connection_lost(exc)
        if self._stalled is not None:
            self._stalled.cancel()

    def pause_writing(self) -> None:
        """Give the client its time to read."""
        super().pause_writing()
        assert self.transport is not None
        self._stalled = self._loop.call_later(self.keepalive_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue the reply."""
        super().resume_writing()
        assert self._stalled is not None
        self._stalled.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; refuse a head that grows without end."""
        is_between, before = self.awaits_head, self._request_count
        super().data_received(data)
        grows = is_between and self._request_count == before
        self._head_bytes = self._head_bytes + len(data) if grows else 0
        if self._head_bytes > MAX_HEAD_BYTES and self.transport is not None:
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n\r\n")
            self.force_close()

    @property
    def awaits_head(self) -> bool:
        """Return whether what the client sends next is a head."""
        if self._current_request is not None:
            return self._current_request.content.is_eof()
        return self._waiter is not None and not self._waiter.done()

    @property
    def awaits_client(self) -> bool:
        """Return whether there is no complete request to answer."""
        return self._current_request is None or not self._current_request.content.is_eof()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the reply to bytes that are not a valid request, or to one that the proxy failed to answer."""
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("the handler of %s %s failed", request.method, request.path, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the reply was sent already")
        if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        response = web.Response(status=status, text=HTTPStatus(status).phrase.lower(), headers={"Server": "qm"})
        response.force_close()
        return response


class Server(web.Server):
    """Makes connections; where files are short, the oldest one without a complete request gives way."""

    def __init__(self, handler: Handler, limits: ClientLimits) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            keepalive_timeout=limits.timeout_s,
            lingering_time=DISCARD_S,
            access_log=None,
            auto_decompress=False,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._drain_s = limits.drain_s
        self._max_connections = most_open_files() // 2  # a call to the upstream takes another file

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Add a connection."""
        super().connection_made(handler, transport)
        if self._max_connections and len(self._connections) > self._max_connections:
            waiting = (place for each, place in self._connections.items() if each.awaits_client)  # type: ignore[attr-defined]
            oldest = next((place for place in waiting if not place.is_closing()), None)
            if oldest is not None:
                oldest.abort()

    async def drain(self) -> None:
        """Close idle connections, let requests in progress finish within `drain_s`, and cut the rest."""
        self.pre_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self.shutdown(self._drain_s)
        for transport in self._connections.values():
            transport.abort()


# --- sockets ---------------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; UsageError if the address is not available."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit these: a call whose client lost its network gives its slot back.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # not on every system
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port") from None
    return found


def most_open_files() -> int:
    """Raise the process's limit of open files as far as it may, and return it; 0 if it is not known."""
    if resource is None:
        return 0
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _MAX_FILES:
        return _MAX_FILES
    files = _MAX_FILES if most == resource.RLIM_INFINITY else min(most, _MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return files
