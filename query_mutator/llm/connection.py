"""One keep-alive HTTP/1.1 connection: every wait ends at the call's deadline, or when another thread cuts it.

Neither `requests` nor urllib3 lets another thread cancel a stalled call, and both need more CPU time per call
(docs/explanation/model-calls.md).
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Generator, Mapping

from query_mutator.llm.address import Route
from query_mutator.llm.replies import IncomingReply, Reply

__all__ = ["Connection"]

CONNECT_TIMEOUT_S = 10.0
#: A wait on a plain socket ends after this long and is repeated until the deadline: the socket's timeout then stays the
#: same from call to call, which saves a short call half of its system calls.
TICK_S = 1.0


class Connection:
    """A connection along one route, used by one thread at a time, cut by any. All requests carry `headers`."""

    def __init__(self, route: Route, *, headers: Mapping[str, str] | None = None) -> None:
        self._route = route
        self._sock: socket.socket | None = None
        self._wire: _Wire | None = None
        self._reader: io.BufferedReader | None = None  # of the wire
        self._is_cut = False
        self._wait_s: float | None = None  # the plain socket's timeout
        lines = [f"Host: {route.host_header}", "Accept: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._common = "\r\n".join([*lines, *([] if route.tunnel else self._proxy_lines()), ""])

    @property
    def is_open(self) -> bool:
        """True while another request can be sent."""
        return self._sock is not None

    def exchange(
        self, method: str, path: str, body: bytes | None, *, deadline: float, retry_count: int | None = None
    ) -> Reply:
        """Send a request and return its whole reply by `deadline` (time.monotonic), connecting if necessary.

        `retry_count` says how often the same call failed before, in the header that OpenAI's client sends. Raises
        TimeoutError at the deadline, another OSError when there is no connection or it is lost, HTTPException for a
        truncated or unreadable reply.
        """
        is_whole = False
        try:
            incoming = self._ask(method, path, body, deadline, retry_count)
            reply = Reply(incoming.status, incoming.headers, incoming.read())
            is_whole = not incoming.will_close
            return reply
        finally:
            if not is_whole:
                self.close()

    def stream(
        self, method: str, path: str, body: bytes | None, *, deadline: float, retry_count: int | None = None
    ) -> Generator[Reply, None, None]:
        """Yield the reply's head and then its pieces as they arrive, each with the head; raises like `exchange`.

        A caller who stops early closes the generator and so the connection, at which the server stops working.
        """
        is_whole = False
        try:
            incoming = self._ask(method, path, body, deadline, retry_count)
            yield Reply(incoming.status, incoming.headers, b"")
            for piece in incoming.pieces():
                yield Reply(incoming.status, incoming.headers, piece)
            is_whole = not incoming.will_close
        finally:
            if not is_whole:
                self.close()

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
        sock, self._sock, self._wire, self._reader = self._sock, None, None, None
        if sock is not None:
            sock.close()

    def _ask(
        self, method: str, path: str, body: bytes | None, deadline: float, retry_count: int | None
    ) -> IncomingReply:
        """Send a request and return its reply with the head read."""
        if self._sock is None or _is_dropped(self._sock):
            self.close()
            self._open(deadline)
        self._send(self._head(method, path, body, retry_count) + (body or b""), deadline)
        return self._begin(deadline)

    def _open(self, deadline: float) -> None:
        failure: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self._route.host, self._route.port, type=socket.SOCK_STREAM
        ):
            try:
                self._connect(socket.socket(family, kind, protocol), address, deadline)
                break
            except OSError as error:
                self.close()
                failure = error
        else:
            raise failure or ConnectionError(f"{self._route.host} has no address")
        if self._route.tunnel:
            self._open_tunnel(self._route.tunnel, deadline)
        if self._route.secure:
            self._start_tls(deadline)

    def _connect(self, sock: socket.socket, address: tuple[object, ...], deadline: float) -> None:
        self._sock, self._wait_s = sock, None  # before connecting, so that `cut` reaches it
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
        sock = _tls_context().wrap_socket(
            self.timed(deadline), server_hostname=self._route.server_host, do_handshake_on_connect=False
        )
        self._sock = sock  # before the handshake, so that `cut` reaches it
        sock.do_handshake()

    def _open_tunnel(self, server: str, deadline: float) -> None:
        lines = [f"CONNECT {server} HTTP/1.1", f"Host: {server}", *self._proxy_lines(), "", ""]
        self._send("\r\n".join(lines).encode("ascii"), deadline)
        response = self._begin(deadline, body_expected=False)
        if response.status != 200:
            raise ConnectionError(f"the proxy refused a tunnel with status {response.status}")

    def _proxy_lines(self) -> list[str]:
        authorization = self._route.proxy_authorization
        return [f"Proxy-Authorization: {authorization}"] if authorization else []

    def _head(self, method: str, path: str, body: bytes | None, retry_count: int | None) -> bytes:
        about_body = ""
        if body is not None:
            about_body = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        if retry_count is not None:
            about_body += f"X-Stainless-Retry-Count: {retry_count}\r\n"
        return f"{method} {self._route.target}{path} HTTP/1.1\r\n{self._common}{about_body}\r\n".encode("ascii")

    def _send(self, data: bytes, deadline: float) -> None:
        sent = 0
        while sent < len(data):
            sock = self.timed(deadline)
            try:
                sent += sock.send(memoryview(data)[sent:] if sent else data)
            except BlockingIOError:  # a tick passed
                continue

    def _begin(self, deadline: float, *, body_expected: bool = True) -> IncomingReply:
        if self._wire is None or self._reader is None or self._wire.sock is not self._sock:
            self._wire = _Wire(self, self.timed(deadline))
            self._reader = io.BufferedReader(self._wire)
        self._wire.deadline = deadline
        return IncomingReply(self._reader, body_expected=body_expected)

    def timed(self, deadline: float) -> socket.socket:
        """Return the socket with its timeout set to a tick, or to the time left; TimeoutError when none is left."""
        sock = self._sock
        if sock is None:
            raise ConnectionAbortedError("the connection was closed")
        left_s = _left_s(deadline)
        if isinstance(sock, ssl.SSLSocket):
            sock.settimeout(left_s)
        elif self._wait_s != (wait_s := min(left_s, TICK_S)):
            if self._wait_s is None:
                sock.settimeout(None)
            for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, direction, _timeval(wait_s))
            self._wait_s = wait_s
        return sock


class _Wire(io.RawIOBase):
    """The reading half of a socket; each read takes at most the time left until the deadline."""

    def __init__(self, connection: Connection, sock: socket.socket) -> None:
        self._connection = connection
        self.sock = sock
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the base class takes any buffer
        while True:
            sock = self._connection.timed(self.deadline)
            try:
                return sock.recv_into(buffer)
            except BlockingIOError:  # a tick passed
                continue


def _timeval(seconds: float) -> bytes:
    """Return a time in the format of the socket options; 0 would mean no timeout."""
    if os.name == "nt":
        return struct.pack("L", max(1, int(seconds * 1e3)))
    whole, rest = divmod(max(1, int(seconds * 1e6)), 1_000_000)
    return struct.pack("ll", whole, rest)


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
def _tls_context() -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, those of `requests` and REQUESTS_CA_BUNDLE."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH  # late: only https needs it

    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        context.load_verify_locations(bundle)
    return context
