"""One trial of loading data, in a process of its own: `python -m query_mutator.sizing.loading TRIAL`, JSON in and out.

    wait    from asking for a batch until it is there
    step    what training does with it: a pause of a given length, or a function called with the batch
    stall   wait / (wait + step)

The first batches are left out: workers start, import and fill their queues then.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from query_mutator.errors import UsageError
from query_mutator.sizing.child import ERROR_MARK

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

PROFILE_WINDOWS = 2  # windows in which items are read one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrial:
    """What is tried; with `workers` None items are read one by one in the process itself."""

    source: str
    batch_size: int | None = None
    workers: int | None = None
    prefetch: int = 2
    start_method: str | None = None
    step_s: float = 0.0
    step: str | None = None  # package.module:function, called with a batch; then step_s is not looked at
    window_s: float = 1.5
    windows: int = 3
    first: int = 0  # item at which reading begins
    ready: bool = False  # every batch is ready: what is left is the handing over


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What items cost when nothing else runs."""

    item_s: list[float]
    collate_s: float
    step_s: float
    batch_size: int
    batch_bytes: int
    cpu_share: float  # processor time by the time items take: 1 computes, 0 waits
    size: int | None  # items of the data set


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What loading with workers gave, by window."""

    stalls: list[float]
    samples_per_s: float
    step_s: float
    wait_p95_s: float
    startup_s: float
    worker_bytes: int  # of all workers together, pages they share counted by halves
    waits_s: list[float] = field(default_factory=list)

    @property
    def stall(self) -> float:
        """Return the median share of time that steps waited."""
        return statistics.median(self.stalls)

    @property
    def wait_s(self) -> float:
        """Return the seconds that a step waited, in the median window."""
        return self.step_s * self.stall / (1 - self.stall)


def main() -> int:
    """Carry out the trial that the command line holds, and print what it found as a line of JSON."""
    trial = LoadTrial(**json.loads(sys.argv[1]))
    try:
        found = read_items(trial) if trial.workers is None else load_batches(trial)
    except UsageError as error:
        print(f"{ERROR_MARK}{error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(found)))
    return 0


def read_items(trial: LoadTrial) -> Profile:
    """Read items one by one for a few seconds; what they wait for a processor that others keep busy is left out."""
    from torch.utils.data import IterableDataset

    from query_mutator.sizing.datasets import Endless, as_loader

    loader = as_loader(trial.source, batch_size=trial.batch_size)
    size = None if isinstance(loader.dataset, IterableDataset) else len(loader.dataset)  # type: ignore[arg-type]
    order: Iterator[Any] = iter(loader.dataset) if size is None else iter(Endless(size, first=trial.first))
    batch_size, take = trial.batch_size or loader.batch_size or 8, _step(trial)
    collate = loader.collate_fn
    item_s: list[float] = []
    collate_s: list[float] = []
    step_s: list[float] = []
    batch: Any = None
    busy, ends = 0.0, time.perf_counter() + PROFILE_WINDOWS * trial.window_s
    while time.perf_counter() < ends or len(collate_s) < 2:
        items = []
        for _ in range(batch_size):
            began, cpu, queued = time.perf_counter(), time.process_time(), _queued_s()
            items.append(next(order) if size is None else loader.dataset[next(order)])
            used = time.process_time() - cpu
            item_s.append(max(used, time.perf_counter() - began - (_queued_s() - queued)))
            busy += used
        made = time.perf_counter()
        batch = collate(items)
        taken = time.perf_counter()
        take(batch)
        collate_s.append(taken - made)
        step_s.append(time.perf_counter() - taken)
    return Profile(
        item_s=item_s,
        collate_s=statistics.median(collate_s),
        step_s=statistics.median(step_s),
        batch_size=batch_size,
        batch_bytes=_bytes(batch),
        cpu_share=min(1.0, busy / max(sum(item_s), 1e-9)),
        size=size,
    )


def _queued_s() -> float:
    """Return the seconds that this thread was ready to run and had no processor; 0 where that is not told."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def load_batches(trial: LoadTrial) -> Loaded:
    """Load batches with workers while a consumer takes its time with each."""
    workers, take, loader = trial.workers or 0, _step(trial), _loader(trial)
    began = time.perf_counter()
    batches = iter(loader)
    batch = next(batches)
    startup_s, batch_size = time.perf_counter() - began, trial.batch_size or loader.batch_size or 8
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
    from query_mutator.sizing.datasets import as_loader, ready_batches, with_workers

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
    """Return the waits of a window and the seconds its steps took."""
    waits: list[float] = []
    worked, ends = 0.0, time.perf_counter() + trial.window_s
    while time.perf_counter() < ends or len(waits) < min(least, 200):
        asked = time.perf_counter()
        batch = next(batches)
        there = time.perf_counter()
        take(batch)
        waits.append(there - asked)
        worked += time.perf_counter() - there
    return waits, worked


def _step(trial: LoadTrial) -> Callable[[Any], None]:
    from query_mutator.sizing.target import load_target

    if trial.step is not None:
        found = load_target(trial.step)
        if not callable(found):
            raise UsageError(f"--step {trial.step} is a {type(found).__name__}; it should be a function of a batch")
        return found  # type: ignore[no-any-return]
    return lambda batch: time.sleep(trial.step_s)


def _bytes(batch: Any) -> int:
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    size = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            size += leaf.numel() * leaf.element_size()
        elif hasattr(leaf, "nbytes"):
            size += int(leaf.nbytes)
        elif isinstance(leaf, (bytes, str)):
            size += len(leaf)
    return size


def _memory(pid: int) -> int:
    """Return the bytes of a process, what it shares with others counted by its share; 0 where that cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    sys.exit(main())
