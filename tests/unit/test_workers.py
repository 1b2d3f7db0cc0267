"""Workers do everything once, in order of precedence, at most so many at a time, and let an interpreter end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from query_mutator.env import workers as module
from query_mutator.env.workers import Workers


def no_error(error: BaseException) -> None:
    raise AssertionError(error)


def test_the_lowest_precedence_goes_first_and_among_equals_the_first() -> None:
    workers, begun, may_end, done = Workers(1, on_error=no_error), threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        may_end.wait()

    workers.put(first, precedence=9)
    begun.wait()
    ended = threading.Event()
    for name, precedence in (("c", 2), ("a", 1), ("d", 2), ("b", 1)):
        workers.put(lambda name=name: done.append(name), precedence=precedence)  # type: ignore[misc]
    workers.put(ended.set, precedence=3)
    may_end.set()
    ended.wait()
    assert done == ["a", "b", "c", "d"]
    workers.close()


@pytest.mark.parametrize("patience_s", [0.0001, 0.5])
def test_everything_is_done_once_by_no_more_than_there_are(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", patience_s)
    workers, lock, all_done = Workers(3, on_error=no_error), threading.Lock(), threading.Semaphore(0)
    done: list[int] = []
    now = most = 0

    def work(number: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.0002 * (number % 3))
        with lock:
            now -= 1
            done.append(number)
        all_done.release()

    for first in range(0, 600, 60):
        for number in range(first, first + 60):
            workers.put(lambda number=number: work(number), precedence=number % 7)  # type: ignore[misc]
        for _ in range(60):
            assert all_done.acquire(timeout=10)
        time.sleep(0.005)  # long enough for impatient workers to go back
    assert sorted(done) == list(range(600))
    assert most <= 3
    assert len(workers.ids) <= 3
    workers.close()


def test_a_worker_that_is_free_is_taken_before_another_is_begun() -> None:
    workers = Workers(3, on_error=no_error)
    for _ in range(10):
        ended = threading.Event()
        workers.put(ended.set, precedence=0)
        ended.wait()
        give_up_at = time.monotonic() + 10
        while workers._at_work:  # it has said so, and is not back yet
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
    assert len(workers.ids) == 1
    workers.close()


def test_what_waits_is_dropped_at_the_end_and_what_is_under_way_is_waited_for() -> None:
    workers, begun, done = Workers(1, on_error=no_error), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        time.sleep(0.05)
        done.append("first")

    workers.put(first, precedence=0)
    begun.wait()
    workers.put(lambda: done.append("second"), precedence=0)
    workers.close()
    workers.close()
    assert done == ["first"]


def test_an_error_is_handed_on_and_its_worker_goes_on() -> None:
    errors: list[BaseException] = []
    workers, ended = Workers(1, on_error=errors.append), threading.Event()
    workers.put(lambda: [][0], precedence=0)
    workers.put(ended.set, precedence=1)
    ended.wait()
    assert [type(error) for error in errors] == [IndexError]
    workers.close()


def test_an_interpreter_ends_though_nobody_closed_them() -> None:
    code = (
        "from query_mutator.env.workers import Workers\n"
        "Workers(2, on_error=print).put(lambda: print('done'), precedence=0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("done\n", "")
