"""Read items and load batches: the half of a trial that runs in the child process and loads torch.

The first batches are left out: meanwhile workers start, import and fill their queues.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.child import load_target
from query_mutator.lab.sizing.datasets import Endless, as_loader, ready_batches, shuffled, with_workers
from query_mutator.lab.sizing.loading import Loaded, LoadTrial, Profile

__all__ = ["load_batches", "read_items", "run"]

PROFILE_WINDOWS = 2  # windows in which items are read one by one


def run(**fields: Any) -> dict[str, Any]:
    """Run a trial and return the fields of a Profile or a Loaded; the child's half of `run_trial`."""
    trial = LoadTrial(**fields)
    return asdict(read_items(trial) if trial.workers is None else load_batches(trial))


def read_items(trial: LoadTrial) -> Profile:
    """Read items one by one for a few seconds; time in which other programs had the processor is left out."""
    loader = as_loader(trial.source, batch_size=trial.batch_size)
    size, items = _items(loader, first=trial.first)
    batch_size, take = _batch_size(trial, loader), _step(trial)
    item_s: list[float] = []
    collate_s: list[float] = []
    step_s: list[float] = []
    batch: Any = None
    busy, ends = 0.0, time.perf_counter() + PROFILE_WINDOWS * trial.window_s
    while time.perf_counter() < ends or len(collate_s) < 2:
        read = []
        for _ in range(batch_size):
            began, cpu, queued = time.perf_counter(), time.process_time(), _queued_s()
            read.append(next(items))
            used = time.process_time() - cpu
            item_s.append(max(used, time.perf_counter() - began - (_queued_s() - queued)))
            busy += used
        made = time.perf_counter()
        batch = loader.collate_fn(read)
        taken = time.perf_counter()
        take(batch)
        collate_s.append(taken - made)
        step_s.append(time.perf_counter() - taken)
    return Profile(
        item_s=item_s,
        collate_s=median(collate_s),
        step_s=median(step_s),
        batch_size=batch_size,
        batch_bytes=_bytes(batch),
        cpu_share=min(1.0, busy / max(sum(item_s), 1e-9)),
        size=size,
    )


def _items(loader: DataLoader[Any], *, first: int) -> tuple[int | None, Iterator[Any]]:
    """Return the number of items, None for a stream, and an iterator over them."""
    data: Any = loader.dataset
    if isinstance(data, IterableDataset):
        return None, iter(data)
    return len(data), (data[index] for index in Endless(shuffled(len(data), first=first)))


def _batch_size(trial: LoadTrial, loader: DataLoader[Any]) -> int:
    return trial.batch_size or loader.batch_size or 8


def _queued_s() -> float:
    """Return the seconds that this thread was ready to run without a processor; 0 if the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def load_batches(trial: LoadTrial) -> Loaded:
    """Load batches with workers while a consumer takes a step with each."""
    workers, take, loader = trial.workers or 0, _step(trial), _loader(trial)
    began = time.perf_counter()
    batches = iter(loader)
    batch = next(batches)
    startup_s, batch_size = time.perf_counter() - began, _batch_size(trial, loader)
    for _ in range(workers * (trial.prefetch + 1) + 1):
        take(batch)
        batch = next(batches)
    waits: list[float] = []
    steps, stalls = 0.0, []
    for _ in range(trial.windows):
        waited, worked = _window(batches, take, trial, least=3 * workers * trial.prefetch)
        stalls.append(sum(waited) / (sum(waited) + worked))
        waits += waited
        steps += worked
    found = Loaded(
        stalls=stalls,
        samples_per_s=len(waits) * batch_size / (sum(waits) + steps),
        step_s=steps / len(waits),
        wait_p95_s=sorted(waits)[int(0.95 * (len(waits) - 1))],
        startup_s=startup_s,
        worker_bytes=sum(_memory(child.pid) for child in multiprocessing.active_children() if child.pid),
    )
    del batches, loader
    return found


def _loader(trial: LoadTrial) -> DataLoader[Any]:
    loader = as_loader(trial.source, batch_size=trial.batch_size)
    if trial.ready:
        return ready_batches(next(iter(loader)), start_method=trial.start_method)
    return with_workers(
        loader,
        workers=trial.workers or 0,
        prefetch=trial.prefetch,
        start_method=trial.start_method,
        first=trial.first,
    )


def _window(
    batches: Iterator[Any], take: Callable[[Any], None], trial: LoadTrial, *, least: int
) -> tuple[list[float], float]:
    """Return the waits of a window, in seconds, and the total time of its steps."""
    waits: list[float] = []
    worked, ends = 0.0, time.perf_counter() + trial.window_s
    while time.perf_counter() < ends or len(waits) < min(least, 200):
        requested = time.perf_counter()
        batch = next(batches)
        arrived = time.perf_counter()
        take(batch)
        waits.append(arrived - requested)
        worked += time.perf_counter() - arrived
    return waits, worked


def _step(trial: LoadTrial) -> Callable[[Any], None]:
    if trial.step is not None:
        found = load_target(trial.step)
        if not callable(found):
            raise UsageError(f"--step {trial.step} is a {type(found).__name__}; it should be a function of a batch")
        return found  # type: ignore[no-any-return]
    return lambda batch: time.sleep(trial.step_s)


def _bytes(batch: Any) -> int:
    leaves = tree_leaves(batch)
    return sum(len(leaf) if isinstance(leaf, (bytes, str)) else getattr(leaf, "nbytes", 0) for leaf in leaves)


def _memory(pid: int) -> int:
    """Return the bytes of a process with its share of shared pages (Linux's PSS); 0 if they cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
