"""The connections of `requests` that model calls go over: one server, a sized pool, calls that end in time or when cut.

`requests` bounds each wait for bytes, not a whole call, and lets no other thread end a call that stalls. Connections
here wait only for the time that the call in flight has left, and give it their socket to shut down.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import ssl
from collections.abc import Mapping
from http.client import CONTINUE, EARLY_HINTS, PROCESSING, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH, default_headers, get_environ_proxies, select_proxy
from urllib3 import BaseHTTPResponse, Timeout
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ProtocolError

from query_mutator.errors import UsageError, hide_credentials
from query_mutator.llm.client import CALL, is_loopback

CONNECT_TIMEOUT_S = 10.0
_SLACK_S = 0.01  # by which a call may outlast its deadline

logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of every connection beyond the pool


def proxy_of(url: str) -> str:
    """Return the proxy of the environment for a server, as `requests` finds it; "" without one, and for loopback.

    UsageError for one of another kind than HTTP's.
    """
    host = urlsplit(url).hostname or ""
    proxy = "" if is_loopback(host) else select_proxy(url, get_environ_proxies(url)) or ""
    proxy = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    if proxy and not proxy.startswith(("http://", "https://")):
        kind = proxy.partition("://")[0]
        raise UsageError(f"a {kind} proxy is not supported; use an http:// one, or list {host} in NO_PROXY")
    return proxy


def authorities() -> ssl.SSLContext:
    """Return whom the environment trusts, as `requests` does: a file or folder of certificates, else its own.

    UsageError for one that cannot be read.
    """
    variable = next(filter(os.environ.get, ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")), "")
    path = os.environ.get(variable) or DEFAULT_CA_BUNDLE_PATH
    is_folder = os.path.isdir(path)
    try:
        return ssl.create_default_context(cafile=None if is_folder else path, capath=path if is_folder else None)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{variable}={path}: {reason}; name a file or folder of certificates, or unset it") from None


def named_with(proxy: str, url: str) -> str:
    """Return how messages name a server, with the proxy in front of it."""
    return hide_credentials(f"{url} through the proxy {proxy}") if proxy else url


class Session:
    """The pool of connections to one server, with proxies and authorities of the environment as `requests` finds them.

    A key goes to that server alone.
    """

    def __init__(self, url: str, *, pool_size: int, headers: Mapping[str, str]) -> None:
        adapter, proxy = HTTPAdapter(pool_maxsize=pool_size), proxy_of(url)
        trusted = authorities() if "https:" in (url[:6], proxy[:6]) else None
        manager = adapter.proxy_manager_for(proxy, proxy_ssl_context=trusted) if proxy else adapter.poolmanager
        self._pool: Any = manager.connection_from_url(url, pool_kwargs={"ssl_context": trusted} if trusted else None)
        self._pool.ConnectionCls = _Connection if self._pool.scheme == "http" else _SecureConnection
        self._sent_headers = {**default_headers(), "Accept": "application/json", **headers}
        self.named = named_with(proxy, url)
        self.proxy_headers = adapter.proxy_headers(proxy) if proxy else {}
        parts = urlsplit(url)
        is_forwarded = bool(proxy) and parts.scheme == "http"  # by a proxy, which needs the whole address
        self._unsent = "" if is_forwarded else f"{parts.scheme}://{parts.netloc}"

    def close(self) -> None:
        """Close all connections; idempotent."""
        self._pool.close()

    def ask(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> BaseHTTPResponse:
        """Return the reply with its head read; it may redirect.

        A kept connection that the server closes before the first byte is replaced: servers close idle ones at any
        time, and some (llama-server) after every streamed reply.
        """
        call = CALL.get()
        request = (method, url.removeprefix(self._unsent), body, {**self._sent_headers, **headers})
        raw = {"retries": False, "assert_same_host": False, "preload_content": False, "decode_content": False}
        while True:
            timeout = Timeout(call.left_s())
            try:
                reply: BaseHTTPResponse = self._pool.urlopen(*request, timeout=timeout, **raw)
                return reply
            except (ProtocolError, OSError):
                if call.is_first or call.is_answered or call.is_cut:
                    raise


class _Connection(HTTPConnection):
    """A connection that waits no longer than its call has left, and ends when that is cut."""

    def _new_conn(self) -> socket.socket:
        call, failure = CALL.get(), OSError(f"{self.host} has no address")
        call.is_first = True
        for family, kind, protocol, _, address in socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                call.hold(sock, copy=True)
                sock.settimeout(min(CONNECT_TIMEOUT_S, call.left_s()))
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(call.left_s())  # of a TLS handshake
                return sock
            except OSError as error:
                sock.close()
                failure = error
        raise ConnectionError("no connection in time") if isinstance(failure, TimeoutError) else failure

    def request(self, *args: Any, **settings: Any) -> None:
        """Send the head and the body together: a server wakes once."""
        if self.sock is not None:
            CALL.get().hold(getattr(self.sock, "socket", self.sock))  # TLS within TLS wraps one
        parts: list[bytes] = []
        self.send = parts.append  # type: ignore[method-assign, assignment]
        try:
            super().request(*args, **settings)
        finally:
            del self.send
        self.send(b"".join(parts))

    def getresponse(self) -> Any:
        if self.sock is None:  # urllib3 passes over a connection that broke while the request was sent
            raise ConnectionResetError("the connection was closed without a reply")
        return super().getresponse()

    def response_class(self, sock: socket.socket, *args: Any, **settings: Any) -> HTTPResponse:  # type: ignore[override]
        response = _Response(sock, *args, **settings)
        response.fp = io.BufferedReader(_Timed(sock, response.fp.detach()))
        return response


class _Response(HTTPResponse):
    """A reply after whatever interim ones, of which `http.client` passes over 100 (Continue) alone."""

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        return version, CONTINUE if status in (PROCESSING, EARLY_HINTS) else status, reason


class _SecureConnection(_Connection, HTTPSConnection):
    """The same over TLS."""


class _Timed(io.RawIOBase):
    """The bytes that arrive at a socket for the call in flight, within the time that it has left."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw, self._call = sock, raw, CALL.get()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._call.left_s()
        if (self._sock.gettimeout() or 0.0) - left_s > _SLACK_S:  # to set it lets other threads run first
            self._sock.settimeout(left_s)
        count = self._raw.readinto(buffer)
        self._call.is_answered |= bool(count)
        return count

    def close(self) -> None:
        self._call.release()  # before another call has the connection
        self._raw.close()
        super().close()
