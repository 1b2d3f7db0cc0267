"""Reads one HTTP/1.1 reply from a stream of bytes, whole or piece by piece.

`http.client.HTTPResponse` parses headers as e-mail, at twice the cost of all else in a short call. Its exceptions are
used here for what is wrong with a reply.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http.client import BadStatusLine, HTTPException, IncompleteRead, LineTooLong, RemoteDisconnected

_MAX_LINE_BYTES = 65536
_MAX_HEADERS = 200
_PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one request, whatever its status; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class IncomingReply:
    """A reply whose head has been read; `pieces` or `read` takes the body, once."""

    __slots__ = ("_left", "_stream", "headers", "status", "will_close")

    def __init__(self, stream: io.BufferedReader, *, body_expected: bool = True) -> None:
        """Read the head; HTTPException for what is none, RemoteDisconnected when nothing comes at all."""
        self._stream = stream
        version, self.status = _read_status(stream)
        self.headers = _read_headers(stream)
        while 100 <= self.status < 200:  # "100 Continue" and its kin precede the reply
            version, self.status = _read_status(stream)
            self.headers = _read_headers(stream)
        self._left = self._body_length() if body_expected and self.status not in (204, 304) else 0
        wish = self.headers.get("connection", "").lower()
        keeps = wish != "close" if version == b"HTTP/1.1" else wish == "keep-alive"
        self.will_close = not keeps or self._left == _UNTIL_CLOSED

    def read(self) -> bytes:
        """Return the whole body."""
        if self._left < 0:
            return b"".join(self.pieces())
        body = self._stream.read(self._left)
        if len(body) < self._left:
            raise IncompleteRead(body, self._left - len(body))
        return body

    def pieces(self) -> Iterator[bytes]:
        """Yield the body as it arrives."""
        if self._left == _CHUNKED:
            yield from self._chunks()
        elif self._left == _UNTIL_CLOSED:
            while piece := self._stream.read1(_PIECE_BYTES):
                yield piece
        else:
            yield from self._counted()

    def _counted(self) -> Iterator[bytes]:
        while self._left > 0:
            piece = self._stream.read1(min(self._left, _PIECE_BYTES))
            if not piece:
                raise IncompleteRead(b"", self._left)
            self._left -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while True:
            line = self._stream.readline(_MAX_LINE_BYTES)
            try:
                size = int(line.split(b";", 1)[0], 16)
            except ValueError:
                raise IncompleteRead(line) from None
            if size == 0:
                _read_headers(self._stream)  # trailers, and the empty line that ends the reply
                return
            if size < 0:
                raise HTTPException(f"a chunk of {size} bytes")
            framed = self._stream.read(size + 2)
            if len(framed) < size + 2:
                raise IncompleteRead(framed, size + 2 - len(framed))
            yield framed[:size]

    def _body_length(self) -> int:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return _CHUNKED
        length = self.headers.get("content-length")
        if length is None:
            return _UNTIL_CLOSED
        if not (length.isascii() and length.isdigit()):
            raise HTTPException(f"the length of the reply is {length!r}")
        return int(length)


_CHUNKED, _UNTIL_CLOSED = -1, -2


def _read_status(stream: io.BufferedReader) -> tuple[bytes, int]:
    line = stream.readline(_MAX_LINE_BYTES)
    if not line:
        raise RemoteDisconnected("the connection was closed without a reply")
    return _status(line)


@lru_cache(maxsize=64)  # replies of one server begin with the same lines
def _status(line: bytes) -> tuple[bytes, int]:
    parts = line.split(None, 2)
    if len(parts) < 2 or parts[0] not in (b"HTTP/1.1", b"HTTP/1.0") or not parts[1].isdigit():
        raise BadStatusLine(line.decode("latin-1"))
    return parts[0], int(parts[1])


def _read_headers(stream: io.BufferedReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    for _ in range(_MAX_HEADERS):
        line = stream.readline(_MAX_LINE_BYTES)
        if line in (b"\r\n", b"\n"):
            return headers
        if not line.endswith(b"\n"):
            raise IncompleteRead(line) if len(line) < _MAX_LINE_BYTES else LineTooLong("header line")
        name, value = _header(line)
        headers[name] = value
    raise HTTPException(f"the reply has more than {_MAX_HEADERS} headers")


@lru_cache(maxsize=256)
def _header(line: bytes) -> tuple[str, str]:
    name, _, value = line.partition(b":")
    return name.decode("latin-1").lower(), value.strip().decode("latin-1")
