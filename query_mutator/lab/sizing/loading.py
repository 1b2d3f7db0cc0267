"""Read the items of a data set one by one, and measure what they, batches and steps cost."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import load_target
from query_mutator.lab.sizing.workers import Profile

__all__ = ["profile_items"]

_USUAL_BATCH = 8


def profile_items(source: str, *, batch_size: int | None, step: str | None, seconds: float) -> Profile:
    """Return the cost of items, without time in which other programs had the processor; UsageError if that fails.

    A source is lerobot:REPO, or package.module:name of a data set, of a DataLoader, or of a function that returns one.
    A loader keeps its own batches.
    """
    try:
        loader = _as_loader(source, batch_size=batch_size)
        take = load_target(step) if step else lambda batch: None
        return _measured(loader, take, batch_size or loader.batch_size or _USUAL_BATCH, seconds)
    except UsageError:
        raise
    except Exception as error:  # of the user's own code
        raise UsageError(f"reading items of {source} failed: {type(error).__name__}: {error}") from error


def _measured(loader: DataLoader[Any], take: Any, batch_size: int, seconds: float) -> Profile:
    items = _items(loader.dataset)
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
    return Profile(
        item_s=item_s,
        collate_s=median(collate_s),
        step_s=median(step_s),
        batch_size=batch_size,
        batch_bytes=sum(len(one) if isinstance(one, (bytes, str)) else getattr(one, "nbytes", 0) for one in leaves),
        cpu_share=min(1.0, busy / max(sum(item_s), 1e-9)),
    )


def _items(data: Any) -> Iterator[Any]:
    """Yield items indefinitely; a data set with a length is shuffled."""
    while True:
        if isinstance(data, IterableDataset):
            yield from data
        else:
            yield from (data[at] for at in random.Random(0).sample(range(len(data)), len(data)))


def _queued_s() -> float:
    """Return the seconds that this thread was ready to run without a processor; 0 if the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _as_loader(source: str, *, batch_size: int | None) -> DataLoader[Any]:
    if source.startswith("lerobot:"):
        if importlib.util.find_spec("lerobot") is None:
            raise UsageError(f"--dataset {source} needs LeRobot: pip install lerobot")
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        found = LeRobotDataset(source.removeprefix("lerobot:"))
    else:
        found = load_target(source)
        if callable(found) and not isinstance(found, (Dataset, DataLoader)):
            found = found()
    if isinstance(found, DataLoader):
        return found
    if not (hasattr(found, "__getitem__") or isinstance(found, IterableDataset)):
        raise UsageError(f"{source} is a {type(found).__name__}; it should be a data set or a DataLoader")
    return DataLoader(found, batch_size=batch_size or _USUAL_BATCH, collate_fn=_stacked)


def _stacked(items: list[Any]) -> Any:
    """Return items as one batch, or as a list if they differ in shape or are not numbers."""
    try:
        return default_collate(items)
    except (RuntimeError, TypeError):
        return items
