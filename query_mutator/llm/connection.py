"""One keep-alive HTTP/1.1 connection: every wait ends at the call's deadline, or when another thread cuts it.

Neither `requests` nor urllib3 lets another thread cancel a stalled call, and both need more CPU time per call
(docs/explanation/model-calls.md).
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from query_mutator.llm.address import Route
from query_mutator.settings.calls import Calls

MAX_REPLY_BYTES = round(Calls.max_reply_mb * 1e6)
_MAX_HEAD_BYTES = 65_536  # informational replies (1xx) included
_ERROR_BYTES = 65_536  # read of a reply whose status is an error: it may never end
_CONTINUE_STATUSES = range(100, 200)  # the reply proper follows

CONNECT_TIMEOUT_S = 10.0
_PIECE_BYTES = 65_536


class BadReply(Exception):
    """A reply that breaks HTTP, is truncated or too large; the message continues a sentence about the server."""


class NoReply(ConnectionError):
    """The connection ended before the first byte of a reply."""


class Reply:
    """A reply whose bytes come from `receive`, which returns b"" at their end."""

    def __init__(self, receive: Callable[[], bytes], *, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self._receive = receive
        self._max_bytes = max_bytes
        self._received = 0
        self._body: list[bytes] = []  # parsed, not yet read
        self._has_head = self._is_complete = self._has_extra = self._keeps_alive = False
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        # Some servers end lines with "\n" alone, as RFC 9112 (2.2) lets a client accept.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True)

    @property
    def is_ok(self) -> bool:
        """Return whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def is_reusable(self) -> bool:
        """Return whether another reply may follow on the connection: all bytes received belong to this one."""
        return self._is_complete and self._keeps_alive and not self._has_extra

    def read_head(self) -> None:
        """Read status and headers; NoReply when the connection ends before, BadReply for other than HTTP."""
        while not self._has_head:
            self._read_more()
            if self._received > _MAX_HEAD_BYTES and not self._has_head:
                raise BadReply(f"sent a head of more than {_MAX_HEAD_BYTES:,} bytes")
        if self.status < 200:
            raise BadReply(f"answered with the status {self.status}")
        if self._length() > self._max_bytes:
            self._refuse()

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives; BadReply when it is truncated, broken or too large."""
        while True:
            if self._body:
                piece, self._body = b"".join(self._body), []
                yield piece
            elif self._is_complete:
                return
            else:
                self._read_more()

    def read(self) -> bytes:
        """Return the body, or its beginning if the status is an error."""
        pieces, size = [], 0
        for piece in self.pieces():
            pieces.append(piece)
            size += len(piece)
            if size >= _ERROR_BYTES and not self.is_ok:
                break
        return b"".join(pieces)

    def release(self) -> None:
        """Drop the parser, which refers back to this reply."""
        self._parser = None

    # --- callbacks of the parser ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note bytes that belong to another reply."""
        self._has_extra = self._is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are ignored."""
        if not self._has_head:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Take the status."""
        if self._parser is None or self._has_head:
            return
        self.status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()
        self._has_head = self.status not in _CONTINUE_STATUSES
        if not self._has_head:
            self.headers.clear()

    def on_body(self, piece: bytes) -> None:
        """Take a part of the body."""
        if not self._is_complete:
            self._body.append(piece)

    def on_message_complete(self) -> None:
        """Note the end of the reply."""
        self._is_complete = self._has_head

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_more(self) -> None:
        try:
            data = self._receive()
        except ConnectionError as error:
            if self._received:
                raise
            raise NoReply(*error.args) from None
        self._received += len(data)
        if not data:
            self._end()
        elif self._received > self._max_bytes + _MAX_HEAD_BYTES:
            self._refuse()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None, "a released reply is read"
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if not self._is_complete:
                raise BadReply(f"did not answer in HTTP: {error}") from None
            self._has_extra = True

    def _end(self) -> None:
        """Take the end of the connection, which ends a reply without a length."""
        if not self._received:
            raise NoReply("the connection was closed without a reply")
        has_length = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        if not self._has_head or has_length:
            raise BadReply("sent a truncated reply")
        self._is_complete = True

    def _length(self) -> int:
        return int(self.headers.get("content-length", 0))  # the parser has checked that it is a 64-bit number

    def _refuse(self) -> None:
        raise BadReply(f"sent a reply of more than {self._max_bytes / 1e6:g} MB; --max-reply-mb allows larger ones")


class Connection:
    """A connection along one route, used by one thread at a time, cut by any. All requests carry `headers`."""

    def __init__(
        self, route: Route, *, headers: Mapping[str, str] | None = None, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> None:
        self._route = route
        self._max_reply_bytes = max_reply_bytes
        self._sock: socket.socket | None = None
        self._is_cut = False
        common = {"Host": route.host_header, "Accept": "application/json", **(headers or {})}
        self._common = _lines(common if route.tunnel else common | self._proxy_headers())

    @property
    def is_open(self) -> bool:
        """True while another request can be sent."""
        return self._sock is not None

    @contextmanager
    def request(
        self, method: str, path: str, body: bytes | None, *, deadline: float, retry_count: int | None = None
    ) -> Iterator[Reply]:
        """Send a request and yield the reply with its head read; connect first if necessary.

        All waits end at `deadline` (time.monotonic). `retry_count` says how often the same call failed before, in the
        header that OpenAI's client sends. A caller that does not read the whole reply closes the connection by it, at
        which the server stops working; so does a reply that more bytes follow, which would answer the next request.
        Raises TimeoutError at the deadline, another OSError when there is no connection or it is lost, BadReply for a
        truncated or unreadable reply.
        """
        about = {} if body is None else {"Content-Type": "application/json", "Content-Length": str(len(body))}
        if retry_count is not None:
            about["X-Stainless-Retry-Count"] = str(retry_count)
        start = f"{method} {self._route.target}{path} HTTP/1.1\r\n"
        data = f"{start}{self._common}{_lines(about)}\r\n".encode("ascii") + (body or b"")
        reply: Reply | None = None
        try:
            reply = self._exchange(data, deadline)
            yield reply
        finally:
            if reply is None or not reply.is_reusable:
                self.close()
            if reply is not None:
                reply.release()

    def cut(self) -> None:
        """End from another thread whatever waits on this connection, for good."""
        self._is_cut = True
        sock = self._sock
        if sock is not None:
            # The plain socket's method: that of a TLS socket would pull its state away under the reading thread.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; idempotent."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _exchange(self, data: bytes, deadline: float) -> Reply:
        """Send a request and return the reply with its head read.

        A kept connection that the server closes before the first byte is replaced: servers close idle ones at any
        time, and some (llama-server) after every streamed reply.
        """
        if self._sock is not None and not _is_dropped(self._sock):
            with contextlib.suppress(NoReply):
                return self._try(data, deadline)
        self.close()
        self._open(deadline)
        return self._try(data, deadline)

    def _try(self, data: bytes, deadline: float) -> Reply:
        try:
            self._send(data, deadline)
        except (ConnectionError, ssl.SSLEOFError) as error:
            raise NoReply(*error.args) from None
        return self._reply(deadline)

    def _open(self, deadline: float) -> None:
        failure: OSError | None = None
        host, port = self._route.host, self._route.port
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                self._connect(socket.socket(family, kind, protocol), address, deadline)
                break
            except OSError as error:
                self.close()
                failure = error
        else:
            raise failure or ConnectionError(f"{host} has no address")
        if self._route.tunnel:
            self._open_tunnel(self._route.tunnel, deadline)
        if self._route.secure:
            self._start_tls(deadline)

    def _connect(self, sock: socket.socket, address: tuple[object, ...], deadline: float) -> None:
        self._sock = sock  # before connecting, so that `cut` reaches it
        if self._is_cut:
            raise ConnectionAbortedError("the connection was cut")
        timeout_s = min(CONNECT_TIMEOUT_S, _left_s(deadline))
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
        except TimeoutError:
            raise ConnectionError(f"no connection within {timeout_s:.3g} s") from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _start_tls(self, deadline: float) -> None:
        sock = tls_context().wrap_socket(
            self._timed(deadline), server_hostname=self._route.server_host, do_handshake_on_connect=False
        )
        self._sock = sock  # before the handshake, so that `cut` reaches it
        sock.do_handshake()

    def _open_tunnel(self, server: str, deadline: float) -> None:
        headers = _lines({"Host": server, **self._proxy_headers()})
        self._send(f"CONNECT {server} HTTP/1.1\r\n{headers}\r\n".encode("ascii"), deadline)
        reply = self._reply(deadline)
        reply.release()
        if reply.status != 200:
            raise ConnectionError(f"the proxy refused a tunnel with status {reply.status}")

    def _proxy_headers(self) -> dict[str, str]:
        authorization = self._route.proxy_authorization
        return {"Proxy-Authorization": authorization} if authorization else {}

    def _send(self, data: bytes, deadline: float) -> None:
        self._timed(deadline).sendall(data)  # the timeout is that of the whole call

    def _reply(self, deadline: float) -> Reply:
        """Return the reply to the last request, with its head read."""
        reply = Reply(lambda: self._timed(deadline).recv(_PIECE_BYTES), max_bytes=self._max_reply_bytes)
        reply.read_head()
        return reply

    def _timed(self, deadline: float) -> socket.socket:
        """Return the socket with the time left as its timeout; TimeoutError when none is left."""
        if self._sock is None:
            raise ConnectionAbortedError("the connection was closed")
        self._sock.settimeout(_left_s(deadline))
        return self._sock


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _is_dropped(sock: socket.socket) -> bool:
    """Return whether an idle connection has something to read: its end, since no reply is expected."""
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, those of `requests` and REQUESTS_CA_BUNDLE."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH  # only https needs it

    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        context.load_verify_locations(bundle)
    return context
