"""One keep-alive HTTP/1.1 connection whose every wait ends with the call's deadline, or when another thread cuts it.

Replies are parsed by `http.client.HTTPResponse`; the socket is ours. A pooled `requests.Session` reaches about a fifth
of the calls a second, urllib3 a half (docs/llm.md), and neither lets another thread end a call that is stalled.
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
from dataclasses import dataclass
from email.message import Message as Headers
from http.client import HTTPResponse
from typing import cast

from query_mutator.llm.address import Route

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one request, whatever its status."""

    status: int
    headers: Headers
    body: bytes


class Connection:
    """A connection along one route; used by one thread at a time, cut by any."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._sock: socket.socket | None = None
        self._is_cut = False

    @property
    def is_open(self) -> bool:
        """True while another request can be sent."""
        return self._sock is not None

    def exchange(self, method: str, path: str, body: bytes | None, *, deadline: float) -> Reply:
        """Send a request and return its whole reply by `deadline` (time.monotonic), opening the connection if need be.

        Raises TimeoutError at the deadline, another OSError when there is no connection or it is lost, HTTPException
        for a reply that is cut or unreadable.
        """
        try:
            if self._sock is None or _is_dropped(self._sock):
                self.close()
                self._open(deadline)
            self._send(self._head(method, path, body) + (body or b""), deadline)
            return self._receive(method, deadline)
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """End from another thread whatever waits on this connection; it is of no use afterwards."""
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
        lines = [f"CONNECT {server} HTTP/1.1", f"Host: {server}", *self._proxy_lines(), "", ""]
        self._send("\r\n".join(lines).encode("ascii"), deadline)
        response = self._begin("CONNECT", deadline)
        if response.status != 200:
            raise ConnectionError(f"the proxy refused a tunnel: {response.status} {response.reason}")

    def _proxy_lines(self) -> list[str]:
        authorization = self._route.proxy_authorization
        return [f"Proxy-Authorization: {authorization}"] if authorization else []

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        lines = [
            f"{method} {self._route.target}{path} HTTP/1.1",
            f"Host: {self._route.host_header}",
            "Accept: application/json",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if not self._route.tunnel:
            lines += self._proxy_lines()
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _send(self, data: bytes, deadline: float) -> None:
        self._timed(deadline).sendall(data)

    def _receive(self, method: str, deadline: float) -> Reply:
        response = self._begin(method, deadline)
        reply = Reply(response.status, response.headers, response.read())
        if response.will_close:
            self.close()
        return reply

    def _begin(self, method: str, deadline: float) -> HTTPResponse:
        response = HTTPResponse(cast(socket.socket, _Wire(self._timed(deadline), deadline)), method=method)
        response.begin()
        return response

    def _timed(self, deadline: float) -> socket.socket:
        """Return the socket with the time left as its timeout."""
        if self._sock is None:
            raise ConnectionAbortedError("the connection was closed")
        self._sock.settimeout(_left_s(deadline))
        return self._sock


class _Wire(io.RawIOBase):
    """The reading half of a socket for `HTTPResponse`; each read may take what is left until the deadline, no more."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the base class takes any buffer
        self._sock.settimeout(_left_s(self._deadline))
        return self._sock.recv_into(buffer)


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _is_dropped(sock: socket.socket) -> bool:
    """Return whether an idle connection has something to read: its end, since no reply is due."""
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select([sock], [], [], 0)[0])
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return a context that trusts the system's authorities, those that `requests` trusts and REQUESTS_CA_BUNDLE."""
    from requests.utils import DEFAULT_CA_BUNDLE_PATH  # late: only https needs it

    context = ssl.create_default_context()
    context.load_verify_locations(DEFAULT_CA_BUNDLE_PATH)
    if bundle := os.environ.get("REQUESTS_CA_BUNDLE"):
        context.load_verify_locations(bundle)
    return context
