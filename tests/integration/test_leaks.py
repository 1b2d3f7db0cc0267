"""Threads, sockets and files: none is left over after many calls, and a run fits into few open files."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from query_mutator.llm.stack import build_client
from query_mutator.llm.transport import error_from_exception
from query_mutator.testing import StubServer, start_server
from query_mutator.types import ChatRequest
from rl_query_mutator_env import make_vector_env

CALLS, WORKERS, ENVIRONMENTS = 10_000, 8, 100

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc"),
]


@pytest.fixture(scope="module")
def echo() -> Iterator[StubServer]:
    with start_server([], num_parallel=WORKERS) as running:
        yield running


def held() -> Counter[str]:
    """Return how many threads by name, and open files by kind, this process has."""
    gc.collect()
    kinds: Counter[str] = Counter(thread.name.rstrip("0123456789") for thread in threading.enumerate())
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            kinds[os.readlink(f"/proc/self/fd/{name}").split(":")[0]] += 1
    return kinds


def test_ten_thousand_calls_leave_nothing_behind(echo: StubServer, tmp_path: Path) -> None:
    def call(number: int) -> bool:
        return stack.client.complete(ChatRequest.user(f"call {number}", model="echo", seed=0)).ok

    before = held()
    stack = build_client(echo.url, batch_size=WORKERS, cache="eval", cache_path=tmp_path / "replies.sqlite")
    with ThreadPoolExecutor(WORKERS) as pool:
        assert all(pool.map(call, range(CALLS // 10)))
        early = held()
        assert all(pool.map(call, range(CALLS // 10, CALLS)))
        late = held()
    stack.close()
    assert echo.stats()["calls_by_model"] == {"echo": CALLS}
    assert not late - early
    settle(echo)
    assert not held() - before


def test_a_hundred_environments_leave_nothing_behind(echo: StubServer, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"question": "What is {n} and {n}?", "answer": "{2 * n}"}}\n' for n in range(30)))

    def one_life() -> None:
        envs = make_vector_env(
            4,
            ollama_url=echo.url,
            target_model="echo",
            mutator_model="echo",
            encoder="hash",
            dataset=str(few),
            batch_size=4,
        )
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())
        envs.close()

    one_life()  # what is loaded once and kept
    settle(echo)
    before = held()
    for _ in range(ENVIRONMENTS):
        one_life()
    settle(echo)
    assert not held() - before


def settle(server: StubServer) -> None:
    """Wait until the server has closed its ends of connections that were closed here."""
    for _ in range(1000):
        mine = psutil.Process().net_connections("tcp")
        if not (left := [one for one in mine if one.laddr.port == server.port and one.status == "ESTABLISHED"]):
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{len(left)} connections are still open")


ROOT = Path(__file__).resolve().parents[2]


def train(flags: list[str], tmp_path: Path, *, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train_query_mutator.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


@pytest.mark.parametrize(("batch_size", "hard"), [(16, 64), (64, 1024)])
def test_a_run_that_fits_into_64_open_files_or_may_raise_them(
    batch_size: int, hard: int, tiny_flags: list[str], tmp_path: Path
) -> None:
    more = ["--batch-size", str(batch_size), "--num-processes", str(batch_size), "--num-env-steps", "128"]
    done = train([*tiny_flags, *more, "--eval-interval", "0"], tmp_path, soft=64, hard=hard)
    assert done.returncode == 0, done.stderr


def test_a_run_that_does_not_fit_names_the_batch_size_that_does(tiny_flags: list[str], tmp_path: Path) -> None:
    done = train([*tiny_flags, "--batch-size", "64", "--num-processes", "64"], tmp_path, soft=64, hard=64)
    assert done.returncode == 2
    assert "allow more with `ulimit -n 92`, or give --batch-size 36" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_file_for_a_connection_is_not_a_server_that_is_away() -> None:
    error = error_from_exception(OSError(24, os.strerror(24)), url="http://here", timeout_s=1)
    assert error.kind == "server"
    assert "ulimit -n" in error.message
