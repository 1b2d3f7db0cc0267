"""Trials of a sweep as Ray tasks: on any node with the resources, restarted elsewhere when a node is lost.

folder of the sweep     the node sees it (shared storage): the trial writes there, as on this machine
                        it does not: the trial writes to a temporary folder, which is sent back when it ends
working directory       that of the command, where the node has it
"""

from __future__ import annotations

import functools
import io
import tarfile
import tempfile
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from query_mutator.cli.console import note
from query_mutator.errors import UsageError
from query_mutator.files import LOCK
from query_mutator.lab.sweep.config import EngineFlags
from query_mutator.lab.sweep.engines import Ended, Job, ended
from query_mutator.lab.sweep.processes import Processes

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["RayEngine"]

_POLL_S = 1.0  # how soon `stop` is noticed


class _Result(NamedTuple):
    """How a job ended on a node, and the tar archive of its folder unless the driver sees that folder."""

    ended: Ended | None
    archive: bytes | None


class _Driver(NamedTuple):
    """Where the command runs: its working directory, and the lock of the sweep's folder, which no other folder has."""

    cwd: Path
    lock_path: Path
    lock: bytes

    def shares_storage(self) -> bool:
        """Return whether this node sees the folder that the driver holds the lock of."""
        try:
            return self.lock_path.read_bytes() == self.lock
        except OSError:
            return False


class RayEngine:
    """Runs jobs as Ray tasks of the connected cluster, as many at a time as its resources or `flags.jobs` allow."""

    def __init__(self, ray: ModuleType, flags: EngineFlags, *, folder: Path) -> None:
        self._ray, self._flags, self._folder = ray, flags, folder.absolute()
        self._needs = {"CPU": flags.task_cpus, "GPU": flags.task_gpus, **flags.custom_resources}
        self._stopped = False

    @property
    def slots(self) -> int:
        """Return how many jobs run at the same time."""
        total: Mapping[str, float] = self._ray.cluster_resources()
        fits = [int(total.get(name, 0.0) / amount) for name, amount in self._needs.items() if amount]
        return max(1, min([*fits, *([self._flags.jobs] if self._flags.jobs else [])], default=1))

    def run(self, jobs: Sequence[Job]) -> Generator[Ended]:
        """Run jobs; yield how each ended. A failed job does not stop the others."""
        self._note_missing()
        driver, task, most = self._driver(), self._task(), self._flags.jobs or len(jobs)
        waiting, running = deque(jobs), dict[Any, Job]()
        self._stopped = False
        try:
            while (waiting or running) and not self._stopped:
                while waiting and len(running) < most:
                    job = waiting.popleft()
                    running[task.remote(job, driver)] = job
                ready, _ = self._ray.wait(list(running), timeout=_POLL_S)
                for ref in ready:
                    if found := self._result(running.pop(ref), ref):
                        yield found
        finally:
            for ref in running:
                self._ray.cancel(ref, force=True)  # its worker ends, and with it the trial's processes

    def stop(self) -> None:
        """Stop all jobs, from any thread; idempotent."""
        self._stopped = True

    def _driver(self) -> _Driver:
        lock_path = self._folder / LOCK
        return _Driver(Path.cwd(), lock_path, lock_path.read_bytes())

    def _task(self) -> Any:
        flags = self._flags
        return self._ray.remote(_run_job).options(
            name="qm-trial",
            num_cpus=flags.task_cpus,
            num_gpus=flags.task_gpus,
            resources=flags.custom_resources,
            max_retries=flags.task_retries,
            retry_exceptions=False,
        )

    def _result(self, job: Job, ref: Any) -> Ended | None:
        """Return how a job ended, its files in its folder; a job whose nodes were lost too often has failed."""
        exceptions = self._ray.exceptions
        try:
            result: _Result = self._ray.get(ref)
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError) as error:
            why = str(error).strip().splitlines()[-1]
            raise UsageError(
                f"a node cannot run trials ({why}); every node needs the same query-mutator, and free disk space"
            ) from None
        except exceptions.RayError as error:
            why = type(error).__name__
            return ended(
                job.trial, "failed", -1, 0.0, f"lost with its node or worker more often than --task-retries ({why})"
            )
        if result.archive is not None:
            _unpack(result.archive, job.folder)
        return result.ended

    def _note_missing(self) -> None:
        """Say what no node has; trials then wait for a node that joins."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0.0) >= amount for name, amount in self._needs.items()) for node in nodes):
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items() if amount)
            note(f"no node of the cluster has {wanted}; trials wait for a node that has; the --task flags ask for less")


# --- on a node -------------------------------------------------------------------------------------------------------


@functools.cache
def _processes() -> Processes:
    return Processes()  # one for each worker: they end with it


def _run_job(job: Job, driver: _Driver) -> _Result:
    """Run a job on this node."""
    cwd = driver.cwd if driver.cwd.is_dir() else None
    if driver.shares_storage():
        here = job if cwd else replace(job, folder=driver.cwd / job.folder)
        return _Result(_processes().run(here, cwd=cwd), None)
    with tempfile.TemporaryDirectory(prefix="qm-trial-") as scratch:
        found = _processes().run(replace(job, folder=Path(scratch)), cwd=cwd)
        return _Result(found, _packed(Path(scratch)))


def _packed(folder: Path) -> bytes:
    """Return a folder as a tar archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return content.getvalue()


def _unpack(content: bytes, folder: Path) -> None:
    """Write the files of an archive into a folder; what lies outside it is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")
