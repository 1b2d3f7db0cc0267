"""A model's slots: how many calls it works on at once, and the first-come queue in front of them."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`size` slots and a FIFO queue; a slot set free goes straight to the call that has waited longest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Take a slot, after all who came before; a caller that is cancelled leaves the queue."""
        if self.free > 0:
            self.free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was ours already when the caller gave up
            raise

    def release(self) -> None:
        """Hand the slot to the next in the queue, or set it free."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1
