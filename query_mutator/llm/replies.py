"""Read one HTTP/1.1 reply from a stream of bytes, whole or piece by piece, and turn failures into an `ErrorInfo`.

`http.client.HTTPResponse` parses headers as e-mail, at twice the cost of everything else in a short call; its
exceptions are used here.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import BadStatusLine, HTTPException, IncompleteRead, LineTooLong, RemoteDisconnected
from typing import Any

from query_mutator.types import ErrorInfo

__all__ = ["IncomingReply", "Reply", "error_from_exception", "error_from_status", "malformed"]

_MAX_LINE_BYTES = 65536
_MAX_HEADERS = 200
_PIECE_BYTES = 65536
_MESSAGE_CHARS = 300
# Ollama answers 500 for these; a retry cannot help, a smaller model or fewer slots can.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|cudaMalloc failed|(requires|needs) more (system |gpu )?memory|(insufficient|not enough) memory",
    re.IGNORECASE,
)
_NO_SUCH_MODEL = re.compile(r"model\b.*\bnot found|no such model|does not exist", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, whatever its status; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class IncomingReply:
    """A reply whose head has been read; `pieces` or `read` consumes the body."""

    __slots__ = ("_left", "_stream", "headers", "status", "will_close")

    def __init__(self, stream: io.BufferedReader, *, body_expected: bool = True) -> None:
        """Read the head; HTTPException for anything else, RemoteDisconnected when nothing arrives."""
        self._stream = stream
        version, self.status = _read_status(stream)
        self.headers = _read_headers(stream)
        while 100 <= self.status < 200:  # "100 Continue" and similar precede the reply
            version, self.status = _read_status(stream)
            self.headers = _read_headers(stream)
        self._left = self._body_length() if body_expected and self.status not in (204, 304) else 0
        connection = self.headers.get("connection", "").lower()
        keeps = connection != "close" if version == b"HTTP/1.1" else connection == "keep-alive"
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


# --- what went wrong with a call --------------------------------------------------------------------------------------


def error_from_exception(error: Exception, *, url: str, timeout_s: float) -> ErrorInfo:
    """Return why a call without a complete reply failed; `error` is an OSError or an HTTPException."""
    if isinstance(error, TimeoutError):
        return ErrorInfo(kind="timeout", message=f"no complete reply from {url} within {timeout_s:g} s")
    if isinstance(error, RemoteDisconnected):
        return ErrorInfo(kind="connect", message=f"{url} closed the connection without a reply")
    if isinstance(error, IncompleteRead):
        return ErrorInfo(kind="malformed", message=f"the reply of {url} was cut short")
    if isinstance(error, HTTPException):
        return ErrorInfo(kind="malformed", message=f"{url} did not answer in HTTP: {_one_line(repr(error))}")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
    return ErrorInfo(kind="connect", message=f"cannot reach {url}: {_one_line(reason)}")


def error_from_status(reply: Reply) -> ErrorInfo:
    """Return why a reply with a status other than 2xx is a failure."""
    message = _server_message(reply)
    kind = _kind_of_status(reply.status, message)
    if kind == "memory":
        message += "; use a smaller model, or fewer slots (OLLAMA_NUM_PARALLEL)"
    if reply.status in range(300, 400):
        message = f"redirected to {reply.headers.get('location')}: use that as the server's address"
    return ErrorInfo(kind=kind, message=message, status=reply.status, retry_after_s=_retry_after_s(reply))


def malformed(reply: Reply) -> ErrorInfo:
    """Return the error for a 2xx reply whose body is not one JSON object."""
    start = _one_line(reply.body.decode("utf-8", "replace"))[:80]
    return ErrorInfo(kind="malformed", message=f"the reply is not a JSON object: {start!r}", status=reply.status)


def _kind_of_status(status: int, message: str) -> str:
    if status in (429, 503):
        return "busy"
    if status >= 500:
        return "memory" if _OUT_OF_MEMORY.search(message) else "server"
    return "model_missing" if status == 404 and _NO_SUCH_MODEL.search(message) else "request"


def _server_message(reply: Reply) -> str:
    """Return the server's message: `error` as text (Ollama) or as an object (OpenAI), else the body or the status."""
    text = reply.body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        said: Any = json.loads(text)
        said = said.get("error", said) if isinstance(said, dict) else said
        text = str(said.get("message", said)) if isinstance(said, dict) else str(said)
    return _one_line(text) or f"status {reply.status} without a message"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MESSAGE_CHARS]


def _retry_after_s(reply: Reply) -> float | None:
    """Return the seconds of a Retry-After header, which holds a number or a date (RFC 9110, 10.2.3)."""
    value = reply.headers.get("retry-after")
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None
