"""Keeps threads that take turns at Python on one CPU, while taking turns is what a run waits for.

One thread at a time runs Python. Where calls come back in microseconds, the trainer's thread and the workers hand it
over thousands of times a second, and a turn that goes to another CPU waits until that CPU is awake: on one CPU the same
run makes 1.4 to 1.9 times the calls (docs/log.md). Where a model takes its time nothing is moved. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

LOOK_EVERY_S = 0.05
#: Shares of the time in which the calling thread runs: above the first the threads are moved together, and below the
#: second apart. A run whose server takes 100 ms a call is at 0.05, one whose server takes none at 0.5.
BUSY, IDLE = 0.3, 0.15


class OneCpu:
    """A context for the thread that leads; `look` moves it and the workers of `worker_ids` together when that pays.

    Leaving sets the leading thread free again, for what it does next may use all CPUs.
    """

    def __init__(
        self,
        worker_ids: Callable[[], Iterable[int]],
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._worker_ids, self._clock, self._cpu_clock = worker_ids, clock, cpu_clock
        self._all = every_cpu()
        self._pays = False  # as of the last look
        self._since = self._ran = 0.0

    def __enter__(self) -> Self:
        self._begin()
        if self._pays:
            self._move_together()
        return self

    def look(self) -> None:
        """Move the threads together or apart, if they are not where they should be."""
        passed = self._clock() - self._since
        if passed < LOOK_EVERY_S:
            return
        share = (self._cpu_clock() - self._ran) / passed
        self._begin()
        if not self._pays and share > BUSY:
            self._pays = True
            self._move_together()
        elif self._pays and share < IDLE:
            self._pays = False
            allow(self._all, 0, *self._worker_ids())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pays:
            allow(self._all, 0)

    def _begin(self) -> None:
        self._since, self._ran = self._clock(), self._cpu_clock()

    def _move_together(self) -> None:
        """Put all threads where this one is: of several busy runs each is on a CPU of its own by then."""
        cpu = _present_cpu()
        if cpu in self._all and len(self._all) > 1:
            allow({cpu}, 0, *self._worker_ids())


def every_cpu() -> set[int]:
    """Return the CPUs that the calling thread may use; none where they cannot be chosen."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def allow(cpus: set[int], *thread_ids: int) -> None:
    """Let threads (their native ids; 0 is the calling one) run on these CPUs; those that have ended are passed over."""
    for thread_id in thread_ids if cpus else ():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread_id, cpus)


def _present_cpu() -> int:
    """Return the CPU that the calling thread runs on, -1 where the system does not say."""
    try:
        with open("/proc/thread-self/stat", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[36])
    except (OSError, ValueError, IndexError):
        return -1
