"""Threads are moved to one CPU when the leading thread is busy, apart again when it is not."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from query_mutator.env.one_cpu import BUSY, IDLE, LOOK_EVERY_S, OneCpu, allow, every_cpu

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(every_cpu()) < 2, reason="needs Linux and two CPUs to choose from"
)


class Clocks:
    """A clock and a CPU clock that stand still until they are put on."""

    def __init__(self) -> None:
        self.now = self.ran = 0.0

    def pass_(self, seconds: float, *, busy: float) -> None:
        self.now += seconds
        self.ran += busy * seconds


@pytest.fixture
def worker() -> Iterator[int]:
    """Yield the native id of a thread that waits."""
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    ended.set()
    thread.join()


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    """Yield clocks; afterwards the test's own thread may run everywhere again."""
    cpus = every_cpu()
    yield Clocks()
    allow(cpus, 0)


def one_cpu(clocks: Clocks, *worker_ids: int) -> OneCpu:
    return OneCpu(lambda: worker_ids, clock=lambda: clocks.now, cpu_clock=lambda: clocks.ran)


def test_busy_thread_and_its_workers_share_a_cpu_until_the_context_ends(clocks: Clocks, worker: int) -> None:
    cpus, together = every_cpu(), one_cpu(clocks, worker)
    with together:
        assert every_cpu() == cpus
        clocks.pass_(2 * LOOK_EVERY_S, busy=BUSY + 0.1)
        together.look()
        assert len(every_cpu()) == 1
        assert os.sched_getaffinity(worker) == every_cpu()
    assert every_cpu() == cpus
    with together:  # the next time from the beginning
        assert len(every_cpu()) == 1


def test_thread_that_waits_for_its_server_stays_where_it_is(clocks: Clocks, worker: int) -> None:
    cpus, together = every_cpu(), one_cpu(clocks, worker)
    with together:
        clocks.pass_(2 * LOOK_EVERY_S, busy=BUSY - 0.1)
        together.look()
        assert every_cpu() == os.sched_getaffinity(worker) == cpus


def test_threads_part_once_there_is_little_to_do(clocks: Clocks, worker: int) -> None:
    cpus, together = every_cpu(), one_cpu(clocks, worker)
    with together:
        clocks.pass_(2 * LOOK_EVERY_S, busy=0.9)
        together.look()
        clocks.pass_(2 * LOOK_EVERY_S, busy=(BUSY + IDLE) / 2)
        together.look()
        assert len(every_cpu()) == 1
        clocks.pass_(2 * LOOK_EVERY_S, busy=IDLE / 2)
        together.look()
        assert every_cpu() == os.sched_getaffinity(worker) == cpus


def test_looks_close_together_judge_nothing(clocks: Clocks) -> None:
    cpus, together = every_cpu(), one_cpu(clocks)
    with together:
        clocks.pass_(LOOK_EVERY_S / 2, busy=1.0)
        together.look()
        assert every_cpu() == cpus


def test_worker_that_has_ended_is_passed_over(clocks: Clocks) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    together = one_cpu(clocks, thread.native_id or 0)
    with together:
        clocks.pass_(2 * LOOK_EVERY_S, busy=1.0)
        together.look()
        assert len(every_cpu()) == 1
