"""What runs a sweep's trials: the job of one trial, how it ended, and the protocol of the engines."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from query_mutator.lab.sweep.plan import Setting, Trial

__all__ = ["Ended", "Engine", "Job", "Status", "ended"]

Status = Literal["done", "failed", "timed out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One trial to run: its command, the folder that it writes to, and how long it may take."""

    trial: Trial
    command: tuple[str, ...]
    folder: Path
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a trial ended."""

    name: str
    setting: Setting
    seed: int
    status: Status
    exit_code: int
    wall_s: float
    says: str  # the last line of its stderr, where it failed


class Engine(Protocol):
    """Runs jobs: in processes of this machine (`processes.LocalEngine`) or as Ray tasks (`cluster.jobs.RayEngine`)."""

    @property
    def slots(self) -> int:
        """Return how many jobs run at the same time."""

    def run(self, jobs: Sequence[Job]) -> Generator[Ended]:
        """Run jobs; yield how each ended, first those that ended first. Closing the iterator stops all jobs."""

    def stop(self) -> None:
        """Stop all jobs, from any thread; idempotent."""


def ended(trial: Trial, status: Status, exit_code: int, wall_s: float, says: str) -> Ended:
    """Return how a trial ended; `says` is kept where it failed."""
    return Ended(
        name=trial.name,
        setting=trial.setting,
        seed=trial.seed,
        status=status,
        exit_code=exit_code,
        wall_s=round(wall_s, 2),
        says="" if status == "done" else says,
    )
