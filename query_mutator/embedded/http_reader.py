"""From the bytes of a connection to its requests: httptools parses, the limits on size and memory are here."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

import httptools

__all__ = ["MAX_BODY_BYTES", "MAX_HEAD_BYTES", "BodyBudget", "HttpError", "Request", "RequestReader"]

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES

_TOO_LARGE = "request header fields too large"


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


class BodyBudget:
    """Bytes that the request bodies of all connections may hold together, arriving and in progress."""

    def __init__(self, limit_bytes: int = MAX_BODIES_BYTES) -> None:
        self._left_bytes = limit_bytes

    def take(self, num_bytes: int) -> None:
        """Reserve memory; raises HttpError 503 if too little is left."""
        if num_bytes > self._left_bytes:
            raise HttpError(503, "server busy: the requests in progress fill the memory for request bodies")
        self._left_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Release reserved memory."""
        self._left_bytes += num_bytes


class RequestReader:
    """Reads the requests of one connection; the methods `on_...` are callbacks of httptools."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held_bytes = 0  # of this connection's share of the budget
        self._parser = httptools.HttpRequestParser(self)
        self._ready: list[Request] = []
        self._failure: HttpError | None = None
        self._expects = False
        self._is_within = False
        self._unread_bytes = 0  # since the end of a head or request, or the last byte of a body
        self._reset()

    def feed(self, data: bytes) -> list[Request]:
        """Return the requests that `data` completes; `release` each of them when its body is no longer needed.

        Raises HttpError for an invalid or too large request, once those before it were returned.
        """
        if self._failure is None:
            try:
                self._parse(data)
            except HttpError as error:
                self._failure = error
        if self._failure is not None and not self._ready:
            raise self._failure
        ready, self._ready = self._ready, []
        return ready

    @property
    def has_failed(self) -> bool:
        """Return whether the next `feed` raises."""
        return self._failure is not None

    @property
    def is_within(self) -> bool:
        """Return whether a request has arrived in part."""
        return self._is_within

    def take_expectation(self) -> bool:
        """Return, once for a request, whether its client waits for "100 Continue" before it sends the body."""
        expects, self._expects = self._expects, False
        return expects

    def release(self, request: Request) -> None:
        """Give back the memory of a request's body."""
        self._give_back(len(request.body))

    def close(self) -> None:
        """Give back all memory; idempotent."""
        self._give_back(self._held_bytes)

    def _give_back(self, num_bytes: int) -> None:
        given = min(num_bytes, self._held_bytes)
        self._held_bytes -= given
        self._budget.give_back(given)

    def _parse(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_again() + data[upgrade.args[0] :]
                continue
            except httptools.HttpParserCallbackError as error:
                cause = error.__context__
                raise cause if isinstance(cause, HttpError) else HttpError(400, "malformed request") from error
            except httptools.HttpParserError as error:
                raise HttpError(400, f"malformed request: {error}") from error
            break
        if self._unread_bytes > MAX_HEAD_BYTES:
            raise HttpError(431, _TOO_LARGE)

    def _head_again(self) -> bytes:
        """Return the head without its offer of another protocol, which this server declines, for a new parser."""
        kept = {name: value for name, value in self._headers.items() if name not in ("upgrade", "connection")}
        first = b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([first, *(f"{name}: {value}".encode("latin-1") for name, value in kept.items()), b"", b""])

    def _reset(self) -> None:
        self._is_within = self._expects = self._upgrades = False
        self._is_head = True
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._header_bytes = 0

    def on_message_begin(self) -> None:
        """Start a request."""
        self._reset()
        self._is_within = True

    def on_url(self, piece: bytes) -> None:
        """Add a piece of the request's target."""
        self._url += piece
        if len(self._url) > MAX_HEAD_BYTES:
            raise HttpError(431, _TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, joined with commas to an earlier one of its name; trailers are ignored."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES:
            raise HttpError(431, _TOO_LARGE)
        if self._is_head:
            key, text = name.lower().decode("latin-1"), value.strip().decode("latin-1")
            before = self._headers.setdefault(key, text)
            if before is not text:
                self._headers[key] = f"{before}, {text}"

    def on_headers_complete(self) -> None:
        """Refuse a body that is too large or in another coding before it arrives."""
        self._is_head = False
        self._unread_bytes = 0
        headers = self._headers
        if self._parser.get_http_version() not in ("1.0", "1.1"):
            raise HttpError(505, "HTTP version not supported")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise HttpError(501, "unsupported transfer encoding")
        if int(headers.get("content-length") or 0) > MAX_BODY_BYTES:
            raise HttpError(413, "request body too large")
        self._expects = headers.get("expect", "").lower() == "100-continue"
        self._upgrades = self._parser.should_upgrade()
        if self._upgrades and self._parser.get_method() == b"CONNECT":
            raise HttpError(405, "405 method not allowed")

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body."""
        self._unread_bytes = 0
        if len(self._body) + len(piece) > MAX_BODY_BYTES:
            raise HttpError(413, "request body too large")
        self._budget.take(len(piece))
        self._held_bytes += len(piece)
        self._body += piece

    def on_message_complete(self) -> None:
        """Finish the request."""
        if self._upgrades:
            return
        method = self._parser.get_method().decode("latin-1")
        path = unquote(self._url.partition(b"?")[0].decode("latin-1"))
        is_new = self._parser.get_http_version() == "1.1"
        keep_alive = self._parser.should_keep_alive()
        self._ready.append(Request(method, path, self._headers, bytes(self._body), keep_alive, is_new))
        self._unread_bytes = 0
        self._reset()
