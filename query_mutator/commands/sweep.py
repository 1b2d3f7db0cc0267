"""`qm sweep`: run a command over a grid, in parallel, and print which setting is best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from query_mutator.cli.console import note
from query_mutator.cli.outputs import write_report
from query_mutator.cluster import connected
from query_mutator.cluster.jobs import RayEngine
from query_mutator.errors import TooManyFailuresError
from query_mutator.files import encode, locked
from query_mutator.lab.sweep.job import Sweep, SweepFlags
from query_mutator.lab.sweep.trials import Engine, EngineFlags, LocalEngine


def sweep(flags: SweepFlags) -> None:
    """Run the missing trials, then print and write the results; TooManyFailuresError when trials failed."""
    job = Sweep(flags)
    if flags.dry_run:
        print(*job.commands(), sep="\n")
        note(f"{len(job.trials)} trials, {flags.jobs or 1} at a time")
        return
    with open_engine(flags, flags.dir) as engine, locked(Path(flags.dir)):
        found = job.run(engine)
        results = found.as_json()
        print(encode(results).decode() if flags.json == "-" else "\n".join([found.table(), *found.says]))
        json_path = Path(flags.dir) / "results.json" if flags.json in (None, "-") else Path(flags.json)
        write_report(json_path, results)
    note(str(json_path))
    if found.failed:
        raise TooManyFailuresError(
            f"{len(found.failed)} of {len(found.trials)} trials failed; --retry-failed runs them again"
        )


@contextmanager
def open_engine(flags: EngineFlags, folder: str) -> Iterator[Engine]:
    """Yield the engine for trials under `folder`; UsageError where there is no Ray."""
    if flags.engine == "local":
        yield LocalEngine(flags.jobs or 1)
        return
    with connected(flags.ray_address) as ray:
        yield RayEngine(ray, flags, folder=Path(folder))
