"""One keep-alive HTTP/1.1 connection: every wait ends at the call's deadline, or when another thread cuts it.

Neither `requests` nor urllib3 lets another thread cancel a stalled call, and both need more CPU time per call
(docs/explanation/model-calls.md). Replies are parsed by the standard library's `http.client`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import cast

from query_mutator.llm.address import Route

__all__ = ["Connection"]

CONNECT_TIMEOUT_S = 10.0


class Connection:
    """A connection along one route, used by one thread at a time, cut by any. All requests carry `headers`."""

    def __init__(self, route: Route, *, headers: Mapping[str, str] | None = None) -> None:
        self._route = route
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
    ) -> Iterator[HTTPResponse]:
        """Send a request and yield the reply with its head read; connect first if necessary.

        All waits end at `deadline` (time.monotonic). `retry_count` says how often the same call failed before, in the
        header that OpenAI's client sends. A caller that does not read the whole reply closes the connection by it, at
        which the server stops working. Raises TimeoutError at the deadline, another OSError when there is no connection
        or it is lost, HTTPException for a truncated or unreadable reply.
        """
        is_done = False
        try:
            if self._sock is None or _is_dropped(self._sock):
                self.close()
                self._open(deadline)
            about = {} if body is None else {"Content-Type": "application/json", "Content-Length": str(len(body))}
            if retry_count is not None:
                about["X-Stainless-Retry-Count"] = str(retry_count)
            start = f"{method} {self._route.target}{path} HTTP/1.1\r\n"
            self._send(f"{start}{self._common}{_lines(about)}\r\n".encode("ascii") + (body or b""), deadline)
            reply = self._reply(method, deadline)
            yield reply
            is_done = not reply.will_close and (reply.isclosed() or reply.length == 0)
        finally:
            if not is_done:
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
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

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
        sock = _tls_context().wrap_socket(
            self._timed(deadline), server_hostname=self._route.server_host, do_handshake_on_connect=False
        )
        self._sock = sock  # before the handshake, so that `cut` reaches it
        sock.do_handshake()

    def _open_tunnel(self, server: str, deadline: float) -> None:
        headers = _lines({"Host": server, **self._proxy_headers()})
        self._send(f"CONNECT {server} HTTP/1.1\r\n{headers}\r\n".encode("ascii"), deadline)
        reply = self._reply("CONNECT", deadline)
        if reply.status != 200:
            raise ConnectionError(f"the proxy refused a tunnel with status {reply.status}")

    def _proxy_headers(self) -> dict[str, str]:
        authorization = self._route.proxy_authorization
        return {"Proxy-Authorization": authorization} if authorization else {}

    def _send(self, data: bytes, deadline: float) -> None:
        self._timed(deadline).sendall(data)  # the timeout is that of the whole call

    def _reply(self, method: str, deadline: float) -> HTTPResponse:
        """Return the reply to the last request, with its head read."""
        reply = HTTPResponse(cast(socket.socket, _Wire(self, deadline)), method=method)
        reply.begin()
        return reply

    def _timed(self, deadline: float) -> socket.socket:
        """Return the socket with the time left as its timeout; TimeoutError when none is left."""
        if self._sock is None:
            raise ConnectionAbortedError("the connection was closed")
        self._sock.settimeout(_left_s(deadline))
        return self._sock


class _Wire(io.RawIOBase):
    """The reading half of a connection; every read ends at the deadline. An HTTPResponse takes it for a socket."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the base class takes any buffer
        return self._connection._timed(self._deadline).recv_into(buffer)

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self)


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
def _tls_context() -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, those of `requests` and REQUESTS_CA_BUNDLE."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH  # only https needs it

    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        context.load_verify_locations(bundle)
    return context
