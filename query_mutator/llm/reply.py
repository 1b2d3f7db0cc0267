"""One HTTP/1.1 reply, parsed by llhttp (the parser of Node.js) as its bytes arrive, within bounds.

llhttp is strict: a length that is not a number, two lengths, or a chunk size beyond 64 bits break the protocol. It also
takes a twentieth of the time of the standard library's `http.client`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from query_mutator.settings.calls import Calls

__all__ = ["MAX_REPLY_BYTES", "BadReply", "NoReply", "Reply"]

MAX_REPLY_BYTES = round(Calls.max_reply_mb * 1e6)
_MAX_HEAD_BYTES = 65_536  # informational replies (1xx) included
_ERROR_BYTES = 65_536  # read of a reply whose status is an error: it may never end
_CONTINUE_STATUSES = range(100, 200)  # the reply proper follows


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
