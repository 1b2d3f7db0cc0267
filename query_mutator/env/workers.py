"""The threads that carry calls: a ThreadPoolExecutor, and what waits for one of its workers, in an order of its own."""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

PATIENCE_S = 0.5  # an interpreter that ends without `close` waits as long

Work = Callable[[], None]


class Workers:
    """A ThreadPoolExecutor of `size` workers, each of which takes what waits and has precedence, one after the other.

    A worker that found nothing to do for a while goes back to the executor, which otherwise would make and hand over a
    future for every call. What the work raises goes to `on_error`.
    """

    def __init__(self, size: int, *, on_error: Callable[[BaseException], None]) -> None:
        self._size = size
        self._on_error = on_error
        self.ids: list[int] = []  # of the threads there are
        self._pool = ThreadPoolExecutor(
            max_workers=size,
            thread_name_prefix="qm-call",
            initializer=lambda: self.ids.append(threading.get_native_id()),
        )
        self._waiting: list[tuple[int, int, Work]] = []  # a heap
        self._turns = itertools.count()
        self._begun = 0  # workers that are not with the executor
        self._at_work = 0  # those of them that are not waiting for work
        self._lock = threading.Lock()  # guards the four above
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # one True for each work; False: go back

    def put(self, work: Work, *, precedence: int) -> None:
        """Have a worker do this; the lowest precedence goes first, among equals the one that came first."""
        with self._lock:
            heapq.heappush(self._waiting, (precedence, next(self._turns), work))
            begins = self._begun < min(self._size, self._at_work + len(self._waiting))
            self._begun += begins
        self._calls.put(True)
        if begins:
            self._pool.submit(self._run)

    def close(self) -> None:
        """Drop what waits and wait for what is under way; idempotent."""
        with self._lock:
            self._waiting.clear()
        for _ in range(self._size):
            self._calls.put(False)
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        while self._is_called():
            with self._lock:
                if not self._waiting:  # it was dropped
                    continue
                *_, work = heapq.heappop(self._waiting)
                self._at_work += 1
            try:
                work()
            except BaseException as error:
                self._on_error(error)
            with self._lock:
                self._at_work -= 1

    def _is_called(self) -> bool:
        """Wait for work; False when the worker went back to the executor instead."""
        while True:
            try:
                is_called = self._calls.get(timeout=PATIENCE_S)
            except queue.Empty:
                is_called = False
            with self._lock:
                if not is_called and not self._waiting:
                    self._begun -= 1
                    return False
            if is_called:
                return True
