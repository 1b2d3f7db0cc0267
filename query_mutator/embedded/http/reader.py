"""From the bytes of a connection to its requests: httptools parses, the limits on size and memory are here."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote

import httptools

from query_mutator.embedded.http.body import BodyBudget, HttpError, IncomingBody

__all__ = ["MAX_BODY_BYTES", "MAX_HEADERS", "MAX_HEAD_BYTES", "Header", "Request", "RequestReader"]

Header = tuple[bytes, bytes]

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100  # trailers included
MAX_BODY_BYTES = 16 * 1024 * 1024

_TOO_LARGE = "request header fields too large"


@dataclass(slots=True)
class Request:
    """One request; header names are lower case, `path` is unquoted and has no query.

    `body` is the whole body, unless the server reads bodies while they arrive: then `incoming` has it.
    """

    method: str
    path: str
    target: bytes  # path and query as they were sent
    headers: dict[str, str]  # those of one name joined with commas
    fields: list[Header]  # the same as they were sent
    keep_alive: bool
    chunked_reply: bool  # False for HTTP/1.0, which has no chunks
    body: bytes = b""
    incoming: IncomingBody | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether the whole body has arrived."""
        return self.incoming is None or self.incoming.is_complete

    @property
    def held_bytes(self) -> int:
        """Return the memory of the body."""
        return len(self.body) if self.incoming is None else self.incoming.held_bytes

    def drop_body(self) -> None:
        """Give up the memory of the body, whoever still refers to the request."""
        self.body = b""
        if self.incoming is not None:
            self.incoming.clear()


class RequestReader:
    """Reads the requests of one connection; the methods `on_...` are callbacks of httptools.

    With `is_incremental` a request is returned with its head, and its body is fed to its `incoming`.
    """

    def __init__(
        self, budget: BodyBudget, *, max_body_bytes: int = MAX_BODY_BYTES, is_incremental: bool = False
    ) -> None:
        self._budget = budget
        self._max_body_bytes = max_body_bytes
        self._is_incremental = is_incremental
        self.held_bytes = 0  # of the budget
        self._parser = httptools.HttpRequestParser(self)
        self._ready: list[Request] = []
        self._pieces: list[bytes] = []  # of a body, from the bytes that are being parsed
        self._failure: HttpError | None = None
        self._expects = False
        self._is_within = False
        self._request: Request | None = None
        self._unread_bytes = 0  # since the end of a head or request, or the last byte of a body
        self._reset()

    def feed(self, data: bytes) -> list[Request]:
        """Return the requests that `data` completes, or begins; `release` each when its body is no longer needed.

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
        self._give_back(request.held_bytes)

    def close(self) -> None:
        """Give up all memory; idempotent."""
        self._body = bytearray()
        self._request = None
        self._give_back(self.held_bytes)

    def _give_back(self, num_bytes: int) -> None:
        given = min(num_bytes, self.held_bytes)
        self.held_bytes -= given
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
        self._take_pieces()
        if self._unread_bytes > MAX_HEAD_BYTES:
            raise HttpError(431, _TOO_LARGE)

    def _head_again(self) -> bytes:
        """Return the head without its offer of another protocol, which this server declines, for a new parser."""
        kept = [pair for pair in self._fields if pair[0] not in (b"upgrade", b"connection")]
        first = b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, self._parser.get_http_version().encode())
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([first, *(name + b": " + value for name, value in kept), b"", b""])

    def _reset(self) -> None:
        self._is_within = self._expects = self._upgrades = False
        self._url = b""
        self._fields: list[Header] = []
        self._request = None
        self._num_headers = 0
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
        """Add a header; trailers are ignored."""
        self._num_headers += 1
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            raise HttpError(431, _TOO_LARGE)
        if self._request is None:
            self._fields.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        """Refuse a body that is too large or in another coding before it arrives."""
        self._unread_bytes = 0
        headers = _joined(self._fields)
        if self._parser.get_http_version() not in ("1.0", "1.1"):
            raise HttpError(505, "HTTP version not supported")
        if headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise HttpError(501, "unsupported transfer encoding")
        length_bytes = int(headers.get("content-length") or 0)
        if length_bytes > self._max_body_bytes and not self._is_incremental:
            raise HttpError(413, "request body too large")
        self._upgrades = self._parser.should_upgrade()
        if self._upgrades:
            if self._parser.get_method() == b"CONNECT":
                raise HttpError(405, "405 method not allowed")
            return  # the head comes again
        self._expects = headers.get("expect", "").lower() == "100-continue"
        self._request = self._begin(headers)
        if self._is_incremental:
            self._request.incoming = IncomingBody(length_bytes, release=self._give_back)
            self._ready.append(self._request)

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body, which may be a byte."""
        self._pieces.append(piece)

    def _take_pieces(self) -> None:
        """Add to the body what has arrived of it."""
        if not self._pieces:
            return
        piece = b"".join(self._pieces)
        self._pieces.clear()
        self._unread_bytes = 0
        incoming = self._request.incoming if self._request is not None else None
        if incoming is None and len(self._body) + len(piece) > self._max_body_bytes:
            raise HttpError(413, "request body too large")
        self._budget.take(len(piece), held_bytes=self.held_bytes)
        self.held_bytes += len(piece)
        if incoming is None:
            self._body += piece
        else:
            incoming.feed(piece)

    def on_message_complete(self) -> None:
        """Finish the request."""
        self._take_pieces()
        request = self._request
        if request is None:
            return
        if request.incoming is None:
            request.body = bytes(self._body)
            self._ready.append(request)
        else:
            request.incoming.end()
        self._unread_bytes = 0
        self._reset()

    def _begin(self, headers: dict[str, str]) -> Request:
        method = self._parser.get_method().decode("latin-1")
        target = _origin_form(self._url, method)
        path = unquote(target.partition(b"?")[0].decode("latin-1"))
        is_new = self._parser.get_http_version() == "1.1"
        return Request(method, path, target, headers, self._fields, self._parser.should_keep_alive(), is_new)


def _joined(fields: list[Header]) -> dict[str, str]:
    """Return headers as text, those of one name joined with commas."""
    headers: dict[str, str] = {}
    for name, value in fields:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        before = headers.setdefault(key, text)
        if before is not text:
            headers[key] = f"{before}, {text}"
    return headers


def _origin_form(url: bytes, method: str) -> bytes:
    """Return the path and query of a request's target, which may be a whole URL (RFC 9112, 3.2); raises HttpError."""
    if url.startswith(b"/") or (url == b"*" and method == "OPTIONS"):
        return url
    _, is_absolute, rest = url.partition(b"://")
    if not is_absolute:
        raise HttpError(400, "malformed request target")
    return b"/" + rest.partition(b"/")[2]
