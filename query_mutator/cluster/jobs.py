"""Trials of a sweep as Ray tasks: on any node with the resources, restarted elsewhere when a node is lost.

A trial writes into the folder of the sweep, which every node must see, and runs in the working directory of the command
where the node has it.
"""

from __future__ import annotations

import functools
import socket
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from query_mutator.cli.console import note
from query_mutator.errors import UsageError
from query_mutator.files import LOCK
from query_mutator.lab.sweep.trials import Ended, EngineFlags, Job, Processes, ended

if TYPE_CHECKING:
    from types import ModuleType

_POLL_S = 1.0  # how soon `stop` is noticed


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
        flags, most = self._flags, self._flags.jobs or len(jobs)
        task = self._ray.remote(_run_job).options(
            name="qm-trial",
            num_cpus=flags.task_cpus,
            num_gpus=flags.task_gpus,
            resources=flags.custom_resources,
            max_retries=flags.task_retries,
            retry_exceptions=False,
        )
        lock = self._folder / LOCK
        where = Path.cwd(), lock, lock.read_bytes()
        waiting, running = deque(jobs), dict[Any, Job]()
        self._stopped = False
        try:
            while (waiting or running) and not self._stopped:
                while waiting and len(running) < most:
                    job = waiting.popleft()
                    running[task.remote(job, *where)] = job
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

    def _result(self, job: Job, ref: Any) -> Ended | None:
        """Return how a job ended, its files in its folder; a job whose nodes were lost too often has failed."""
        exceptions = self._ray.exceptions
        try:
            found: Ended | None = self._ray.get(ref)
            return found
        except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError) as error:
            why = str(error).strip().splitlines()[-1]
            raise UsageError(
                f"a node cannot run trials ({why}); every node needs the same query-mutator and the folder of the sweep"
            ) from None
        except exceptions.RayError as error:
            why = type(error).__name__
            return ended(
                job.trial, "failed", -1, 0.0, f"lost with its node or worker more often than --task-retries ({why})"
            )

    def _note_missing(self) -> None:
        """Say what no node has; trials then wait for a node that joins."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0.0) >= amount for name, amount in self._needs.items()) for node in nodes):
            wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items() if amount)
            note(f"no node of the cluster has {wanted}; trials wait for a node that has; the --task flags ask for less")


# --- on a node -------------------------------------------------------------------------------------------------------


_processes = functools.cache(Processes)  # one for each worker: they end with it


def _run_job(job: Job, cwd: Path, lock: Path, owner: bytes) -> Ended | None:
    """Run a job on this node; UsageError where it does not see the lock that the command holds on the folder."""
    if not lock.is_file() or lock.read_bytes() != owner:
        raise UsageError(f"{lock.parent} is not shared with {socket.gethostname()}; give an --out that is")
    return _processes().run(replace(job, folder=cwd / job.folder), cwd=cwd if cwd.is_dir() else None)
