"""Bodies of requests: the memory that all of them may hold together, and one that is read while it arrives."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

__all__ = ["BodyBudget", "HttpError", "IncomingBody"]

SMALL_BYTES = 8 * 1024  # to which pieces are joined
PIECE_BYTES = 256 * 1024  # held of a body whose handler is slower than its client


class HttpError(Exception):
    """Bytes that are not a valid request; `status` is the reply before the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyBudget:
    """Bytes that the request bodies of all connections may hold together, arriving and in progress.

    `give_way(num_bytes)` ends the largest body that still arrives if it is longer than that; False if none is.
    """

    def __init__(self, limit_bytes: int, *, give_way: Callable[[int], bool] = lambda num_bytes: False) -> None:
        self._left_bytes = limit_bytes
        self._give_way = give_way

    def take(self, num_bytes: int, *, held_bytes: int = 0) -> None:
        """Reserve memory for a connection that holds `held_bytes`; raises HttpError 503 if too little is left."""
        while num_bytes > self._left_bytes and self._give_way(held_bytes + num_bytes):
            pass
        if num_bytes > self._left_bytes:
            raise self.full()
        self._left_bytes -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Release reserved memory."""
        self._left_bytes += num_bytes

    @staticmethod
    def full() -> HttpError:
        """Return the reply to a body for which there is no memory."""
        return HttpError(503, "server busy: the requests in progress fill the memory for request bodies")


class IncomingBody:
    """A body that its handler reads while it arrives: in `pieces`, or as `held` once it has all `arrived`.

    `length_bytes` is the announced length, 0 if there is none. Whoever feeds the body stops while it `is_full`;
    `on_wanted` is called when the handler waits for more. Pieces stay apart: joined while they grow, large bodies would
    be copied again and again.
    """

    def __init__(self, length_bytes: int, *, release: Callable[[int], None]) -> None:
        self.is_complete = False
        self.on_wanted: Callable[[], None] = lambda: None
        self.held: deque[bytes] = deque()  # arrived and not yet taken
        self.held_bytes = 0
        self._length_bytes = length_bytes
        self._release = release
        self._max_held_bytes = PIECE_BYTES
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Return whether the handler should take what is there before more arrives."""
        return self.held_bytes >= self._max_held_bytes

    def feed(self, piece: bytes) -> None:
        """Add bytes that arrived."""
        self.held_bytes += len(piece)
        if self.held and len(self.held[-1]) + len(piece) <= SMALL_BYTES:
            piece = self.held.pop() + piece
        self.held.append(piece)
        self._changed.set()

    def end(self) -> None:
        """Mark the body as complete."""
        self.is_complete = True
        self._changed.set()

    def clear(self) -> None:
        """Drop what is held."""
        self.held.clear()
        self.held_bytes = 0

    def join_ends(self, num_bytes: int) -> None:
        """Make the first and the last piece that long, or one piece of a shorter body."""
        while len(self.held) > 1 and len(self.held[0]) < num_bytes:
            first = self.held.popleft()
            self.held[0] = first + self.held[0]
        while len(self.held) > 1 and len(self.held[-1]) < num_bytes:
            last = self.held.pop()
            self.held[-1] += last

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, and give up its memory."""
        while not self.is_complete or self.held:
            if self.held:
                piece = self.held.popleft()
                self.held_bytes -= len(piece)
                self._release(len(piece))
                yield piece
            else:
                await self._more()

    async def arrived(self, max_bytes: int) -> None:
        """Wait for the whole body; raises HttpError 413, if possible before it arrives."""
        self._max_held_bytes = max_bytes + 1
        while not self.is_complete and max(self.held_bytes, self._length_bytes) <= max_bytes:
            await self._more()
        if max(self.held_bytes, self._length_bytes) > max_bytes:
            raise HttpError(413, f"the request has more than {max_bytes:,} bytes")

    async def _more(self) -> None:
        self._changed.clear()
        self.on_wanted()
        await self._changed.wait()
