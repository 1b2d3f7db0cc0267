"""A real Ray cluster on this machine: a head and a worker, each `ray start` with one CPU, that tests may kill."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from query_mutator.lab.sweep.trials import GUARD

_UP_WITHIN_S = 60
_STORE_BYTES = 80_000_000
#: Of Ray itself: no telemetry, no token file in the home folder, and a dead node is found in seconds.
RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class RayNode:
    """One `ray start --block` and everything it started."""

    process: subprocess.Popen[bytes]

    @property
    def processes(self) -> list[psutil.Process]:
        """Return its processes, Ray's own first."""
        try:
            return [*(top := psutil.Process(self.process.pid)).children(recursive=True), top]
        except psutil.NoSuchProcess:
            return []

    @property
    def is_alive(self) -> bool:
        """Return whether it runs."""
        return self.process.poll() is None

    def named(self, name: str) -> list[psutil.Process]:
        """Return its processes with `name` in their command line, as "raylet" or "ray::"."""
        found = []
        for one in self.processes:
            try:
                words = one.cmdline()
            except psutil.Error:
                continue
            if any(name in word for word in words[:1]):
                found.append(one)
        return found

    def kill(self) -> None:
        """End the node as a machine that loses its power: SIGKILL to all its processes at once."""
        found = self.processes
        for one in found:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=10)
        self.process.wait()


class RayCluster:
    """A head and workers; `address` is for --ray-address."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, list[RayNode]()
        # Kills the nodes when the tests are killed.
        words = [sys.executable, "-I", "-S", "-c", GUARD]
        self._guard = subprocess.Popen(words, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self.head = self._start("--head", "--port", "0", "--include-dashboard", "false")
        current = self.folder / "ray_current_cluster"
        wait_until(current.exists, "the head does not start")
        self.address = current.read_text().strip()

    @property
    def workers(self) -> list[RayNode]:
        """Return the nodes besides the head that run."""
        return [node for node in self.nodes if node is not self.head and node.is_alive]

    def add_worker(self) -> RayNode:
        """Start one more node; tasks reach it once it has registered."""
        node = self._start("--address", self.address)
        wait_until(lambda: bool(node.named("raylet")), "the worker does not start")
        return node

    def close(self) -> list[str]:
        """Kill all nodes; return the command lines of what they left behind."""
        for node in self.nodes:
            node.kill()
        self._guard.communicate()
        return [" ".join(one.cmdline()) for one in processes_with(str(self.folder))]

    def _start(self, *flags: str) -> RayNode:
        ray = Path(sys.executable).with_name("ray")
        words = [str(ray), "start", "--block", "--num-cpus", "1", "--object-store-memory", str(_STORE_BYTES), *flags]
        environ = {**os.environ, **RAY_ENV}
        node = RayNode(
            subprocess.Popen(
                [*words, "--temp-dir", str(self.folder)],
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        assert self._guard.stdin is not None
        print(f"+{node.process.pid}", file=self._guard.stdin, flush=True)
        self.nodes.append(node)
        return node


def wait_until(is_true: Callable[[], bool], failure: str, *, within_s: float = _UP_WITHIN_S) -> None:
    """Wait for a condition; fail with `failure`."""
    ends = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < ends, failure
        time.sleep(0.05)


def processes_with(text: str) -> list[psutil.Process]:
    """Return the processes with a text in their command line."""
    return [one for one in psutil.process_iter(["cmdline"]) if any(text in word for word in one.info["cmdline"] or ())]


@pytest.fixture(scope="session")
def _cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="qm-ray-", dir="/tmp"))  # sockets have paths of at most 107 bytes
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        left = cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    assert left == []


@pytest.fixture
def ray_cluster(_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """Return the cluster of this session with its head and at least one worker; commands of the test connect to it."""
    if not _cluster.workers:
        _cluster.add_worker()
    for name, value in RAY_ENV.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_ADDRESS", _cluster.address)
    return _cluster
