"""HTTP/1.1 on an asyncio Protocol: keep-alive, chunked replies, cancellation of calls whose client has left.

    bytes -> take_request -> Request -> handler (a task) -> Response, or a Stream it wrote itself

A connection handles one request at a time; when the client closes it, the request's task is cancelled. uvicorn takes
more than twice the CPU time per call and does not cancel calls (figures in docs/log.md, 2026-11-22).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import unquote

__all__ = ["JSON_TYPE", "TEXT_TYPE", "Connection", "HttpError", "Request", "Response", "Stream", "take_request"]

logger = logging.getLogger(__name__)

JSON_TYPE = "application/json; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"
MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024


class HttpError(Exception):
    """Bytes that are not a valid request; `status` is the reply before the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One complete request; header names are lower case, `path` is unquoted and has no query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool
    chunked_reply: bool  # False for HTTP/1.0, which has no chunks


class Response(NamedTuple):
    """A whole reply."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE


Handler = Callable[[Request, "Connection"], Awaitable[Response | None]]


def take_request(buffer: bytearray) -> Request | None:
    """Remove the first complete request from `buffer` and return it, or None while bytes are missing.

    Raises HttpError for invalid or too large requests.
    """
    end = buffer.find(b"\r\n\r\n")
    if end < 0 or end > MAX_HEAD_BYTES:
        if len(buffer) > MAX_HEAD_BYTES:
            raise HttpError(431, "request header fields too large")
        return None
    method, target, version, headers = _parse_head(bytes(buffer[:end]))
    taken = _take_body(buffer, end + 4, headers)
    if taken is None:
        return None
    body, used = taken
    del buffer[:used]
    connection = headers.get("connection", "").lower()
    is_new = version == "HTTP/1.1"
    keep_alive = connection != "close" if is_new else connection == "keep-alive"
    path = unquote(target.partition("?")[0])
    return Request(method, path, headers, body, keep_alive, is_new)


def _parse_head(head: bytes) -> tuple[str, str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise HttpError(400, "malformed request line")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpError(400, "malformed header line")
        headers[name.lower()] = value.strip()
    return parts[0], parts[1], parts[2], headers


def _take_body(buffer: bytearray, start: int, headers: dict[str, str]) -> tuple[bytes, int] | None:
    """Return the body and where the request ends in `buffer`, or None while bytes are missing."""
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if coding.lower() != "chunked":
            raise HttpError(501, "unsupported transfer encoding")
        return _take_chunks(buffer, start)
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise HttpError(400, "malformed content length")
    length = int(text)
    if length > MAX_BODY_BYTES:
        raise HttpError(413, "request body too large")
    if len(buffer) < start + length:
        return None
    return bytes(buffer[start : start + length]), start + length


def _take_chunks(buffer: bytearray, at: int) -> tuple[bytes, int] | None:
    chunks: list[bytes] = []
    size = 0
    while (line_end := buffer.find(b"\r\n", at)) >= 0:
        try:
            length = int(bytes(buffer[at:line_end]).split(b";")[0], 16)
        except ValueError:
            raise HttpError(400, "malformed chunk") from None
        size += length
        if length < 0 or size > MAX_BODY_BYTES:
            raise HttpError(413, "request body too large")
        at = line_end + 2
        if length == 0:  # trailers, which no client sends, would follow
            return (b"".join(chunks), at + 2) if len(buffer) >= at + 2 else None
        chunks.append(bytes(buffer[at : at + length]))
        at += length + 2
    return None


@lru_cache(maxsize=1)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)


def _head(status: int, content_type: str, *, keep_alive: bool, framing: str) -> bytes:
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {content_type}\r\n"
    close = "" if keep_alive else "Connection: close\r\n"
    return f"{first}Date: {_date(int(time.time()))}\r\n{framing}{close}\r\n".encode("latin-1")


class Stream:
    """A streamed reply; every `write` sends one chunk immediately."""

    def __init__(self, transport: asyncio.Transport, request: Request, content_type: str) -> None:
        self._transport = transport
        self._chunked = request.chunked_reply
        framing = "Transfer-Encoding: chunked\r\n" if self._chunked else ""
        self._pending = _head(200, content_type, keep_alive=request.keep_alive and self._chunked, framing=framing)

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
    """One client connection; adds itself to the server's set `open_connections`, which the server closes."""

    def __init__(self, handler: Handler, open_connections: set[Connection]) -> None:
        self._handler = handler
        self._open = open_connections
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._continued = False  # whether "100 Continue" was sent for the request that is arriving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._open.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Cancel the client's request, which frees its slot."""
        self._open.discard(self)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Start the next request if it is complete and none is running."""
        self._buffer += data
        if self._task is None:
            self._start_next()
        elif len(self._buffer) > MAX_HEAD_BYTES + MAX_BODY_BYTES:
            self.transport.abort()

    def stream(self, request: Request, content_type: str) -> Stream:
        """Return a streamed reply to `request`; its head is sent with the first piece."""
        return Stream(self.transport, request, content_type)

    def reset(self) -> None:
        """Close the connection with a TCP reset, as a crashing server does."""
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _start_next(self) -> None:
        try:
            request = take_request(self._buffer)
        except HttpError as error:
            body = str(error).encode()
            framing = f"Content-Length: {len(body)}\r\n"
            self.transport.write(_head(error.status, TEXT_TYPE, keep_alive=False, framing=framing) + body)
            self.transport.close()
            return
        if request is None:
            self._answer_expect()
            return
        self._continued = False
        self._task = asyncio.get_running_loop().create_task(self._serve(request))

    def _answer_expect(self) -> None:
        """Answer `Expect: 100-continue`; otherwise curl waits a second before it sends a large body."""
        head, end, _ = bytes(self._buffer[:MAX_HEAD_BYTES]).partition(b"\r\n\r\n")
        if end and not self._continued and b"100-continue" in head.lower():
            self._continued = True
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _serve(self, request: Request) -> None:
        try:
            response = await self._handler(request, self)
        except Exception:
            logger.exception("the handler of %s %s failed", request.method, request.path)
            self.transport.close()
            return
        if response is not None:
            self._send(request, response)
        self._task = None
        if not request.keep_alive or (response is None and not request.chunked_reply):
            self.transport.close()
        elif self._buffer and not self.transport.is_closing():
            self._start_next()

    def _send(self, request: Request, response: Response) -> None:
        framing = f"Content-Length: {len(response.body)}\r\n"
        head = _head(response.status, response.content_type, keep_alive=request.keep_alive, framing=framing)
        self.transport.write(head if request.method == "HEAD" else head + response.body)
