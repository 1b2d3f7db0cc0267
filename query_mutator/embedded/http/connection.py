"""The connections of a server, asyncio Protocols: keep-alive, deadlines, cancellation when the client leaves.

A connection handles one request at a time; when the client closes it, the request's task is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import cast

from query_mutator.embedded.http.body import BodyBudget, HttpError
from query_mutator.embedded.http.reader import MAX_BODY_BYTES, MAX_HEAD_BYTES, Header, Request, RequestReader
from query_mutator.embedded.http.replies import CHUNKED, CLOSE, TEXT_TYPE, Response, Stream, head_of, status_line

__all__ = ["Clients", "Connection"]

logger = logging.getLogger(__name__)

DISCARD_S = 5.0  # for which a refused client may still send, so that it reads the reply before a reset
MIN_BYTES_PER_S = 16 * 1024  # at which the deadline of a request that arrives moves on
IDLE_FACTOR = 10  # by default an idle connection is kept this many times as long as a request may take to arrive
SWEEP_S = 1.0
DRAIN_POLL_S = 0.05
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES
TURN_BYTES = 64 * 1024  # read of a client, after which the others have their turn
PARSED_BYTES = 8 * 1024  # at once: requests behind the first wait until it is answered


Handler = Callable[[Request, "Connection"], Awaitable[Response | None]]


@dataclass(slots=True, kw_only=True)
class Clients:
    """The open connections of a server and what they share.

    A head must arrive within `request_timeout_s`, a body too unless it arrives at a fair rate. With `is_incremental` a
    handler gets a request with its head and reads the body while it arrives; `max_body_bytes` is then its own concern.
    """

    handler: Handler
    request_timeout_s: float
    idle_timeout_s: float = 0.0  # 0: IDLE_FACTOR times the above
    is_incremental: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    max_bodies_bytes: int = MAX_BODIES_BYTES  # of all connections together, uploads too
    budget: BodyBudget = field(init=False)
    max_connections: int = 0  # beyond which the oldest without a complete request is closed; 0: no bound
    connections: dict[Connection, None] = field(default_factory=dict)  # the oldest first
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.budget = BodyBudget(self.max_bodies_bytes, give_way=self._end_largest_body)
        self.idle_timeout_s = self.idle_timeout_s or IDLE_FACTOR * self.request_timeout_s

    def connect(self) -> Connection:
        """Return the protocol of a new connection."""
        return Connection(self)

    def admit(self, connection: Connection) -> None:
        """Add a connection; if there are too many, close the oldest that has sent no complete request."""
        self.connections[connection] = None
        if self.max_connections and len(self.connections) > self.max_connections:
            oldest = next((each for each in self.connections if each.awaits_client), None)
            if oldest is not None:
                del self.connections[oldest]
                oldest.transport.abort()

    def keep_sweeping(self) -> None:
        """Close the connections that are past their deadline, now and from time to time on the running loop."""
        now_s = time.monotonic()
        for connection in [each for each in self.connections if each.deadline_s < now_s]:
            connection.expire()
        asyncio.get_running_loop().call_later(min(SWEEP_S, self.request_timeout_s / 4), self.keep_sweeping)

    async def drain(self, timeout_s: float) -> None:
        """Close idle connections, let requests in progress finish until the timeout, and cut the rest."""
        self.is_draining = True
        for connection in tuple(self.connections):
            connection.close_if_idle()
        ends_s = time.monotonic() + timeout_s
        while self.connections and time.monotonic() < ends_s:
            await asyncio.sleep(DRAIN_POLL_S)
        for connection in tuple(self.connections):
            connection.transport.abort()

    def _end_largest_body(self, num_bytes: int) -> bool:
        """Refuse the largest body that still arrives if it is longer than `num_bytes`; False if none is."""
        arriving = [each for each in self.connections if each.arriving_bytes > num_bytes]
        if arriving:
            max(arriving, key=lambda each: each.arriving_bytes).refuse(BodyBudget.full())
        return bool(arriving)


class Connection(asyncio.Protocol):
    """One client connection; `reply_headers` are added to the replies of the request in progress."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._reader = RequestReader(
            clients.budget, max_body_bytes=clients.max_body_bytes, is_incremental=clients.is_incremental
        )
        self._requests: deque[Request] = deque()  # complete, or begun as the last, behind the one in progress
        self._current: Request | None = None
        self._waiting = bytearray()  # that came while a request is in progress
        self._task: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._drained.set()
        self._is_refused = False
        self.reply_headers = ""
        self.is_streaming = False
        self.deadline_s = float("inf")

    # --- what the transport reports -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has another base class
        self._clients.admit(self)
        self._expect_request()

    def connection_lost(self, _exc: Exception | None) -> None:
        """Cancel the client's request, which frees its slot."""
        self._clients.connections.pop(self, None)
        if self._task is not None:
            self._task.cancel()
        self._drop_requests()

    def data_received(self, data: bytes) -> None:
        """Start the next request if none is running, or feed the body that the running one reads."""
        if not self._is_refused:
            self._read(data)
        if (
            len(data) >= TURN_BYTES and not self.transport.is_closing()
        ):  # uvloop would read 8 MB before it serves others
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        """Resume reading unless what arrived is not taken yet."""
        incoming = self._current.incoming if self._current is not None else None
        is_full = incoming is not None and not incoming.is_complete and incoming.is_full
        if not (is_full or len(self._waiting) > MAX_HEAD_BYTES or self.transport.is_closing()):
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Make `drain` wait, but not for a client that reads nothing."""
        self._drained.clear()
        self.deadline_s = min(self.deadline_s, time.monotonic() + self._clients.idle_timeout_s)

    def resume_writing(self) -> None:
        """Let `drain` return."""
        self._drained.set()
        if self._task is not None and not self._is_refused:
            self._pace_body(0)

    # --- for handlers -------------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until the client has read most of what was sent; a stream that does so holds little memory."""
        await self._drained.wait()

    def stream(self, request: Request, content_type: str) -> Stream:
        """Return a streamed reply to `request`; its head is sent with the first piece."""
        self.is_streaming = True
        connection = self._connection_header(request) if request.chunked_reply else CLOSE
        framing = CHUNKED if request.chunked_reply else ""
        head = head_of(200, content_type, connection=connection, framing=framing, extra=self.reply_headers)
        return Stream(self.transport, head, is_chunked=request.chunked_reply)

    def forward(self, request: Request, status: int, headers: Sequence[Header]) -> Stream:
        """Return a streamed reply with no other headers than these, framed by their Content-Length if they have it."""
        self.is_streaming = True
        is_silent = request.method == "HEAD" or status in (204, 304)
        has_length = is_silent or any(name.lower() == b"content-length" for name, _ in headers)
        is_chunked = request.chunked_reply and not has_length
        connection = self._connection_header(request) if has_length or is_chunked else CLOSE
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        framing = f"{CHUNKED if is_chunked else ''}{connection}\r\n"
        head = status_line(status).encode() + lines + framing.encode()
        return Stream(self.transport, head, is_chunked=is_chunked, is_silent=is_silent)

    def reset(self) -> None:
        """Close the connection with a TCP reset, as a crashing server does."""
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    # --- for the server -----------------------------------------------------------------------------------------------

    @property
    def awaits_client(self) -> bool:
        """Return whether there is no complete request to answer."""
        return self._is_refused or self._task is None or self._is_within_body

    @property
    def arriving_bytes(self) -> int:
        """Return the memory of a body that has arrived in part, 0 without one."""
        return self._reader.held_bytes if self._reader.is_within else 0

    def expire(self) -> None:
        """Close a connection whose request did not arrive in time, or on which none came for long."""
        if self._is_refused or not self._reader.is_within:
            self.transport.abort()
        else:
            self.refuse(HttpError(408, "the request did not arrive in time"))

    def close_if_idle(self) -> None:
        """Close a connection that handles no request; another is closed after its reply."""
        if self._is_refused or self._task is None:
            self.transport.close()

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def _is_within_body(self) -> bool:
        return self._current is not None and not self._current.is_complete

    def _read(self, data: bytes) -> None:
        """Parse what arrived up to the next request to answer; what follows it waits."""
        for start in range(0, len(data) or 1, PARSED_BYTES):
            if self._is_refused:
                return
            if self._task is not None and not self._is_within_body:
                self._waiting += data[start:]
                if len(self._waiting) > MAX_HEAD_BYTES:  # from here on it is not seen whether the client leaves
                    self.transport.pause_reading()
                return
            self._parse(data[start : start + PARSED_BYTES])

    def _parse(self, data: bytes) -> None:
        was_within = self._reader.is_within
        try:
            self._requests.extend(self._reader.feed(data))
        except HttpError as error:
            self.refuse(error)
            return
        if self._task is not None:
            self._pace_body(len(data))
            return
        if self._requests:
            self._start_next()
            return
        if self._reader.is_within:
            now_s, timeout_s = time.monotonic(), self._clients.request_timeout_s
            # A large body takes its time; one that trickles in does not get more of it.
            earned_s = self.deadline_s + len(data) / MIN_BYTES_PER_S if was_within else float("inf")
            self.deadline_s = min(now_s + timeout_s, earned_s)
        self._let_continue()

    def _start_next(self) -> None:
        self._current = request = self._requests.popleft()
        self.reply_headers, self.is_streaming = "", False
        self.deadline_s = float("inf")
        if request.incoming is not None and not request.is_complete:
            request.incoming.on_wanted = self._want_body
            self.deadline_s = time.monotonic() + self._clients.request_timeout_s
        self._task = asyncio.get_running_loop().create_task(self._serve(request))
        if self._is_within_body and self._reader.has_failed:
            self._read(b"")

    def _want_body(self) -> None:
        """Let the client send: the handler waits for more of its request's body."""
        self._let_continue()
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.deadline_s = min(self.deadline_s, time.monotonic() + self._clients.request_timeout_s)

    def _pace_body(self, num_bytes: int) -> None:
        """Set when the rest of a body must have arrived; stop reading while its handler is behind."""
        assert self._current is not None
        incoming = self._current.incoming
        if incoming is None or incoming.is_complete:
            self.deadline_s = float("inf")
        elif incoming.is_full:
            self.transport.pause_reading()
            self.deadline_s = float("inf")
        else:
            ends_s = time.monotonic() + self._clients.request_timeout_s
            self.deadline_s = min(ends_s, self.deadline_s + num_bytes / MIN_BYTES_PER_S)

    def _let_continue(self) -> None:
        if self._reader.take_expectation():  # otherwise curl waits a second before it sends a large body
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _expect_request(self) -> None:
        timeout_s = self._clients.request_timeout_s if self._reader.is_within else self._clients.idle_timeout_s
        self.deadline_s = time.monotonic() + timeout_s

    # --- replying -----------------------------------------------------------------------------------------------------

    async def _serve(self, request: Request) -> None:
        response: Response | None
        try:
            response = await self._clients.handler(request, self)
        except Exception:
            logger.exception("the handler of %s %s failed", request.method, request.path)
            if self.is_streaming:
                self.transport.close()
                return
            response = Response(500, b"internal server error", TEXT_TYPE)
        if response is not None:
            self._send(request, response)
        await self._drained.wait()  # who reads no reply gets no other one
        self._task = self._current = None
        self._reader.release(request)
        if not request.is_complete:
            self._discard()
        elif self._closes_after(request) or (response is None and not request.chunked_reply):
            self.transport.close()
        elif not self.transport.is_closing():
            self._continue()

    def _continue(self) -> None:
        """Start the next request that came in the meantime, or wait for it."""
        if self._requests:
            self._start_next()
            if self._is_refused or not self._is_within_body:
                return
        else:
            self._expect_request()
        data, self._waiting = bytes(self._waiting), bytearray()
        self.transport.resume_reading()
        if data or self._reader.has_failed:
            self._read(data)

    def _closes_after(self, request: Request) -> bool:
        return not request.keep_alive or self._clients.is_draining

    def _connection_header(self, request: Request) -> str:
        """Return the Connection header of a reply; without one an HTTP/1.0 client closes."""
        if self._closes_after(request) or not request.is_complete:
            return CLOSE
        return "" if request.chunked_reply else "Connection: keep-alive\r\n"

    def _send(self, request: Request, response: Response) -> None:
        framing = "" if response.status == HTTPStatus.NO_CONTENT else f"Content-Length: {len(response.body)}\r\n"
        connection, extra = self._connection_header(request), self.reply_headers
        head = head_of(response.status, response.content_type, connection=connection, framing=framing, extra=extra)
        self.transport.write(head if request.method == "HEAD" else head + response.body)

    def refuse(self, error: HttpError) -> None:
        """Refuse a request that is invalid or late, also while a handler reads its body."""
        if self._task is not None and self.is_streaming:
            self.transport.abort()
            return
        if self._task is not None:
            self._task.cancel()
        body = str(error).encode()
        framing = f"Content-Length: {len(body)}\r\n"
        self.transport.write(head_of(error.status, TEXT_TYPE, connection=CLOSE, framing=framing) + body)
        self._discard()

    def _discard(self) -> None:
        """Take no other request, and close when the client has had time to read the reply."""
        self._is_refused = True
        self._drop_requests()
        if not self.transport.is_closing():
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.transport.resume_reading()
        self.deadline_s = time.monotonic() + DISCARD_S

    def _drop_requests(self) -> None:
        """Give up the memory of all requests; a cancelled task refers to its own until a garbage collection."""
        for request in (*self._requests, *((self._current,) if self._current is not None else ())):
            request.drop_body()
        self._requests.clear()
        self._waiting.clear()
        self._current = None
        self._reader.close()
