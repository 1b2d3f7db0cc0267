"""Read the items of a data set one by one in a child process, and measure what they, batches and steps cost."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import load_target
from query_mutator.lab.sizing.workers import Profile

__all__ = ["as_loader", "read_items"]

_USUAL_BATCH = 8


def read_items(*, source: str, batch_size: int | None, step: str | None, seconds: float) -> dict[str, Any]:
    """Return the fields of a Profile; time in which other programs had the processor is left out."""
    loader, take = as_loader(source, batch_size=batch_size), _step(step)
    batch_size, items = batch_size or loader.batch_size or _USUAL_BATCH, _items(loader.dataset)
    item_s: list[float] = []
    collate_s: list[float] = []
    step_s: list[float] = []
    batch: Any = None
    busy, ends = 0.0, time.perf_counter() + seconds
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
    leaves = tree_leaves(batch)
    profile = Profile(
        item_s=item_s,
        collate_s=median(collate_s),
        step_s=median(step_s),
        batch_size=batch_size,
        batch_bytes=sum(len(one) if isinstance(one, (bytes, str)) else getattr(one, "nbytes", 0) for one in leaves),
        cpu_share=min(1.0, busy / max(sum(item_s), 1e-9)),
    )
    return asdict(profile)


def _items(data: Any) -> Iterator[Any]:
    """Yield items without end, those of a data set with a length in a shuffled order."""
    while True:
        if isinstance(data, IterableDataset):
            yield from data
        else:
            yield from (data[at] for at in random.Random(0).sample(range(len(data)), len(data)))


def _step(name: str | None) -> Callable[[Any], Any]:
    found = (lambda batch: None) if name is None else load_target(name)
    if not callable(found):
        raise UsageError(f"--step {name} is a {type(found).__name__}; it should be a function of a batch")
    return found


def _queued_s() -> float:
    """Return the seconds that this thread was ready to run without a processor; 0 if the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


# --- data sets --------------------------------------------------------------------------------------------------------


def as_loader(source: str, *, batch_size: int | None) -> DataLoader[Any]:
    """Return the loader of a source, with its own batches; UsageError if there is none.

    A source is lerobot:REPO, or package.module:name of a data set, of a DataLoader, or of a function that
    returns one.
    """
    found = _open(source)
    if isinstance(found, DataLoader):
        return found
    if not (hasattr(found, "__getitem__") or isinstance(found, IterableDataset)):
        raise UsageError(f"{source} is a {type(found).__name__}; it should be a data set or a DataLoader")
    return DataLoader(found, batch_size=batch_size or _USUAL_BATCH, collate_fn=_stacked)


def _open(source: str) -> Any:
    if source.startswith("lerobot:"):
        if importlib.util.find_spec("lerobot") is None:
            raise UsageError(f"--dataset {source} needs LeRobot: pip install lerobot")
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        return LeRobotDataset(source.removeprefix("lerobot:"))
    found = load_target(source)
    return found if isinstance(found, (Dataset, DataLoader)) or not callable(found) else found()


def _stacked(items: list[Any]) -> Any:
    """Return items as one batch, or as a list if they differ in shape or are not numbers."""
    try:
        return default_collate(items)
    except (RuntimeError, TypeError):
        return items
