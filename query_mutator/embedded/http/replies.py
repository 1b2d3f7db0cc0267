"""Replies as bytes: heads, whole replies, and streams of chunks."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

__all__ = ["CHUNKED", "CLOSE", "JSON_TYPE", "TEXT_TYPE", "Response", "Stream", "head_of", "status_line"]

JSON_TYPE = "application/json; charset=utf-8"
TEXT_TYPE = "text/plain; charset=utf-8"
CHUNKED = "Transfer-Encoding: chunked\r\n"
CLOSE = "Connection: close\r\n"
LARGE_BYTES = 64 * 1024  # beyond which data are not copied to be framed
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class Response(NamedTuple):
    """A whole reply."""

    status: int
    body: bytes
    content_type: str = JSON_TYPE


@lru_cache(maxsize=1)
def _date(now_s: int) -> str:
    return formatdate(now_s, usegmt=True)


def head_of(status: int, content_type: str, *, connection: str, framing: str, extra: str = "") -> bytes:
    """Return the head of a reply, `extra` being header lines of the handler."""
    first = f"{status_line(status)}Content-Type: {content_type}\r\n"
    return f"{first}Date: {_date(int(time.time()))}\r\n{framing}{extra}{connection}\r\n".encode("latin-1")


def status_line(status: int) -> str:
    """Return the first line of a reply; statuses of an upstream may be unknown."""
    return f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n"


class Stream:
    """A streamed reply; every `write` sends one piece immediately, the first with the head."""

    def __init__(self, transport: asyncio.Transport, head: bytes, *, is_chunked: bool, is_silent: bool = False) -> None:
        self._transport = transport
        self._is_chunked = is_chunked
        self._is_silent = is_silent
        self._pending = head

    def write(self, data: bytes) -> None:
        """Send `data`, unless the reply can have no body."""
        if len(data) > LARGE_BYTES and self._is_chunked and not self._is_silent:
            self._transport.writelines((self._pending + b"%x\r\n" % len(data), data, b"\r\n"))
            self._pending = b""
        elif data and not self._is_silent:
            framed = b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
            self._transport.write(self._pending + framed)
            self._pending = b""

    def flush(self) -> None:
        """Send the head before there is a piece."""
        if self._pending:
            self._transport.write(self._pending)
            self._pending = b""

    def close(self) -> None:
        """Send the end of the reply."""
        self._transport.write(self._pending + (b"0\r\n\r\n" if self._is_chunked else b""))
        self._pending = b""
