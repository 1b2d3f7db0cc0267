"""HTTP/1.1 on an asyncio Protocol: keep-alive, chunked replies, cancellation of calls whose client has left.

    bytes -> RequestReader -> Request -> handler (a task) -> Response, or a Stream it wrote itself

A connection handles one request at a time; when the client closes it, the request's task is cancelled. uvicorn takes
more than twice the CPU time per call and does not cancel calls (figures in docs/log.md, 2026-11-22).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from query_mutator.embedded.http_reader import MAX_HEAD_BYTES, BodyBudget, HttpError, Request, RequestReader

__all__ = ["JSON_TYPE", "TEXT_TYPE", "Clients", "Connection", "Response", "Stream", "why_not_listening"]

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"
IDLE_FACTOR = 10  # an idle connection is kept this many times as long as a request may take to arrive
DISCARD_S = 5.0  # for which a refused client may still send, so that it reads the reply before a reset


class Response(NamedTuple):
    """A whole reply."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE


Handler = Callable[[Request, "Connection"], Awaitable[Response | None]]


@dataclass(slots=True, kw_only=True)
class Clients:
    """The open connections of a server and what they share."""

    handler: Handler
    request_timeout_s: float
    budget: BodyBudget = field(default_factory=BodyBudget)
    connections: set[Connection] = field(default_factory=set)

    def connect(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self)

    def sweep(self) -> None:
        """Close the connections that are past their deadline."""
        now_s = time.monotonic()
        for connection in [each for each in self.connections if each.deadline_s < now_s]:
            connection.expire()


@lru_cache(maxsize=1)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)


def _head(status: int, content_type: str, *, connection: str, framing: str, extra: str = "") -> bytes:
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
    return f"{first}Date: {_date(int(time.time()))}\r\n{framing}{extra}{connection}\r\n".encode("latin-1")


def _connection_header(request: Request) -> str:
    """Return the Connection header of a reply; without one an HTTP/1.0 client closes."""
    if not request.keep_alive:
        return "Connection: close\r\n"
    return "" if request.chunked_reply else "Connection: keep-alive\r\n"


class Stream:
    """A streamed reply; every `write` sends one chunk immediately."""

    def __init__(self, transport: asyncio.Transport, request: Request, content_type: str, *, extra: str) -> None:
        self._transport = transport
        self._chunked = request.chunked_reply
        framing = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        connection = _connection_header(request) if self._chunked else "Connection: close\r\n"
        self._pending = _head(200, content_type, connection=connection, framing=framing, extra=extra)

    def write(self, data: bytes) -> None:
        """Send `data`, with the head before the first piece."""
        if data:
            framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
            self._transport.write(self._pending + framed)
            self._pending = b""

    def close(self) -> None:
        """Send the end of the reply."""
        self._transport.write(self._pending + (b"0\r\n\r\n" if self._chunked else b""))
        self._pending = b""


class Connection(asyncio.Protocol):
    """One client connection; `reply_headers` are added to the replies of the request in progress."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._reader = RequestReader(clients.budget)
        self._requests: deque[Request] = deque()  # complete, behind the one in progress
        self._waiting = bytearray()  # that came while a request is in progress
        self._task: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._is_refused = False
        self.reply_headers = ""
        self.is_streaming = False
        self.deadline_s = float("inf")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._clients.connections.add(self)
        self._expect_request()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Cancel the client's request, which frees its slot."""
        self._clients.connections.discard(self)
        self._reader.close()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Start the next request if it is complete and none is running."""
        if self._is_refused:
            return
        if self._task is None:
            self._read(data)
            return
        self._waiting += data
        if len(self._waiting) > MAX_HEAD_BYTES:  # from here on it is not seen whether the client leaves
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        """Make `drain` wait."""
        self._drained.clear()

    def resume_writing(self) -> None:
        """Let `drain` return."""
        self._drained.set()

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent; a stream that does so holds little memory."""
        await self._drained.wait()

    def expire(self) -> None:
        """Close a connection whose request did not arrive in time, or on which none came for long."""
        if self._is_refused or not self._reader.is_within:
            self.transport.abort()
        else:
            self._refuse(HttpError(408, "the request did not arrive in time"))

    def stream(self, request: Request, content_type: str) -> Stream:
        """Return a streamed reply to `request`; its head is sent with the first piece."""
        self.is_streaming = True
        return Stream(self.transport, request, content_type, extra=self.reply_headers)

    def reset(self) -> None:
        """Close the connection with a TCP reset, as a crashing server does."""
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _read(self, data: bytes) -> None:
        was_within = self._reader.is_within
        try:
            self._requests.extend(self._reader.feed(data))
        except HttpError as error:
            self._refuse(error)
            return
        if self._requests:
            self._start_next()
            return
        if self._reader.is_within and not was_within:
            self.deadline_s = time.monotonic() + self._clients.request_timeout_s
        if self._reader.take_expectation():  # otherwise curl waits a second before it sends a large body
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _start_next(self) -> None:
        self.deadline_s = float("inf")
        self.reply_headers, self.is_streaming = "", False
        self._task = asyncio.get_running_loop().create_task(self._serve(self._requests.popleft()))

    def _refuse(self, error: HttpError) -> None:
        """Send the reply to invalid HTTP, and close when the client has had time to read it."""
        self._is_refused = True
        self._reader.close()
        body = str(error).encode()
        framing = f"Content-Length: {len(body)}\r\n"
        self.transport.write(_head(error.status, TEXT_TYPE, connection="Connection: close\r\n", framing=framing) + body)
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self.deadline_s = time.monotonic() + DISCARD_S

    async def _serve(self, request: Request) -> None:
        try:
            response = await self._clients.handler(request, self)
        except Exception:
            logger.exception("the handler of %s %s failed", request.method, request.path)
            self.transport.close()
            return
        if response is not None:
            self._send(request, response)
        self._task = None
        self._reader.release(request)
        if not request.keep_alive or (response is None and not request.chunked_reply):
            self.transport.close()
        elif not self.transport.is_closing():
            self._continue()

    def _continue(self) -> None:
        """Start the next request that came in the meantime, or wait for it."""
        if self._requests:
            self._start_next()
            return
        self._expect_request()
        data, self._waiting = bytes(self._waiting), bytearray()
        self.transport.resume_reading()
        if data or self._reader.has_failed:
            self._read(data)

    def _expect_request(self) -> None:
        timeout_s = self._clients.request_timeout_s * (1 if self._reader.is_within else IDLE_FACTOR)
        self.deadline_s = time.monotonic() + timeout_s

    def _send(self, request: Request, response: Response) -> None:
        framing = "" if response.status == HTTPStatus.NO_CONTENT else f"Content-Length: {len(response.body)}\r\n"
        connection, extra = _connection_header(request), self.reply_headers
        head = _head(response.status, response.content_type, connection=connection, framing=framing, extra=extra)
        self.transport.write(head if request.method == "HEAD" else head + response.body)


def why_not_listening(host: str, port: int, error: Exception) -> str:
    """Return in words why a server cannot listen."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there or choose another with --port"
    return f"cannot listen on {host}:{port}: {error}"
