"""The engine that --engine names, for the commands that run trials."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from query_mutator.cluster.connection import connected
from query_mutator.cluster.jobs import RayEngine
from query_mutator.lab.sweep.config import EngineFlags
from query_mutator.lab.sweep.engines import Engine
from query_mutator.lab.sweep.processes import LocalEngine

__all__ = ["open_engine"]


@contextmanager
def open_engine(flags: EngineFlags, folder: str) -> Iterator[Engine]:
    """Yield the engine for trials under `folder`; UsageError where there is no Ray."""
    if flags.engine == "local":
        yield LocalEngine(flags.jobs or 1)
        return
    with connected(flags.ray_address) as ray:
        yield RayEngine(ray, flags, folder=Path(folder))
