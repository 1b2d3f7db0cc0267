"""Bodies of requests: the memory that all of them may hold together, and one that is read while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

__all__ = ["MAX_BODIES", "BodyBudget", "HttpError", "IncomingBody"]

MAX_BODIES = 4  # of the largest size that a server holds at once
PIECE_BYTES = 256 * 1024  # held of a body whose handler is slower than its client


class HttpError(Exception):
    """Bytes that are not a valid request; `status` is the reply before the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyBudget:
    """Bytes that the request bodies of all connections may hold together, arriving and in progress."""

    def __init__(self, limit_bytes: int) -> None:
        self._left_bytes = limit_bytes

    def take(self, num_bytes: int) -> None:
        """Reserve memory; raises HttpError 503 if too little is left."""
        if num_bytes > self._left_bytes:
            raise HttpError(503, "server busy: the requests in progress fill the memory for request bodies")
        self._left_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Release reserved memory."""
        self._left_bytes += num_bytes


class IncomingBody:
    """A body that its handler reads while it arrives: in `pieces`, or whole with `read`.

    `length_bytes` is the announced length, 0 if there is none. Whoever feeds the body stops while it `is_full`;
    `on_wanted` is called when the handler waits for more.
    """

    def __init__(self, length_bytes: int, *, release: Callable[[int], None]) -> None:
        self.is_complete = False
        self.on_wanted: Callable[[], None] = lambda: None
        self._length_bytes = length_bytes
        self._release = release
        self._held = bytearray()
        self._max_held_bytes = PIECE_BYTES
        self._changed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Return the number of bytes that arrived and are not yet taken."""
        return len(self._held)

    @property
    def is_full(self) -> bool:
        """Return whether the handler should take what is there before more arrives."""
        return len(self._held) >= self._max_held_bytes

    def feed(self, piece: bytes) -> None:
        """Add bytes that arrived."""
        self._held += piece
        self._changed.set()

    def end(self) -> None:
        """Mark the body as complete."""
        self.is_complete = True
        self._changed.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while not self.is_complete or self._held:
            if self._held:
                piece = bytes(self._held)
                self._held.clear()
                self._release(len(piece))
                yield piece
            else:
                await self._more()

    async def read(self, max_bytes: int) -> bytes:
        """Return the whole body; raises HttpError 413, if possible before it arrives."""
        self._max_held_bytes = max_bytes + 1
        while not self.is_complete and max(len(self._held), self._length_bytes) <= max_bytes:
            await self._more()
        if max(len(self._held), self._length_bytes) > max_bytes:
            raise HttpError(413, f"the request has more than {max_bytes:,} bytes")
        return bytes(self._held)

    async def _more(self) -> None:
        self._changed.clear()
        self.on_wanted()
        await self._changed.wait()
