"""Data sets whose loading can be sized: folders of files, objects of a program, LeRobot's, synthetic ones.

The synthetic ones have a known cost, to check the search for workers against a known answer:

synthetic:io       items wait 4 ms, as for a disk or a network: workers help beyond the number of processors
synthetic:cpu      items compute for 4 ms: workers help up to the number of processors
synthetic:bursty   items wait 1 ms, one in 32 for 60 ms: prefetching helps
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from ppo.checkpoint import load_tensors
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.child import load_target
from query_mutator.lab.sizing.stalls import ENOUGH, PREFETCHES, batch_times, predicted_stall

__all__ = [
    "STEP_MS", "SYNTHETIC", "Endless", "Files", "Known", "Synthetic", "as_loader", "known_answer", "ready_batches",
    "shuffled", "with_workers",
]  # fmt: skip

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
USUAL_BATCH = 8


class Files(Dataset[Any]):
    """The files under a folder: images decoded (with Pillow), .npy and .pt loaded, others as bytes."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        if not self.files:
            raise UsageError(f"--dataset {folder}: the folder holds no files; give one that does")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        """Return the content of a file."""
        path = self.files[index]
        if path.suffix.lower() in _IMAGES:
            return _image(path)
        if path.suffix == ".npy":
            return np.load(path)
        if path.suffix == ".pt":
            return load_tensors(path)
        return path.read_bytes()


class Endless(Sampler[Any]):
    """Repeats the indices or batches of an iterable without end."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.source


def shuffled(size: int, *, first: int) -> list[int]:
    """Return indices in a shuffled order that starts at its place `first`: so trials do not read cached files."""
    order = random.Random(0).sample(range(size), size)
    return order[first % size :] + order[: first % size]


def as_loader(source: str, *, batch_size: int | None) -> DataLoader[Any]:
    """Return the loader of a source, with its own batches; UsageError if there is none.

    A source is a folder, a name of SYNTHETIC, lerobot:REPO, or package.module:name of a data set, of a DataLoader, or
    of a function that returns one.
    """
    found = _open(source)
    if isinstance(found, DataLoader):
        return found
    if not (hasattr(found, "__getitem__") or isinstance(found, IterableDataset)):
        raise UsageError(f"{source} is a {type(found).__name__}; it should be a data set or a DataLoader")
    return DataLoader(found, batch_size=batch_size or USUAL_BATCH, collate_fn=_stacked)


def with_workers(
    loader: DataLoader[Any], *, workers: int, prefetch: int, start_method: str | None, first: int = 0
) -> DataLoader[Any]:
    """Return an endless loader of the same batches with other workers."""
    more: dict[str, Any] = {}
    if workers:
        more = {"prefetch_factor": prefetch, "multiprocessing_context": start_method, "persistent_workers": True}
    if isinstance(loader.dataset, IterableDataset):
        more["batch_size"] = loader.batch_size
    elif loader.batch_size is None and loader.batch_sampler is not None:
        more["batch_sampler"] = Endless(loader.batch_sampler)
    else:
        size = len(loader.dataset)  # type: ignore[arg-type]
        more |= {"batch_size": loader.batch_size, "sampler": Endless(shuffled(size, first=first))}
    return DataLoader(
        loader.dataset,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        **more,
    )


class _Ready:
    """A collate function that returns one batch, so that loading costs only the transfer from the worker."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __call__(self, items: list[Any]) -> Any:
        return self.batch


def ready_batches(batch: Any, *, start_method: str | None) -> DataLoader[Any]:
    """Return an endless loader whose one worker sends the same batch again and again."""
    blank: DataLoader[Any] = DataLoader(range(64), batch_size=1, collate_fn=_Ready(batch))  # type: ignore[arg-type]
    return with_workers(blank, workers=1, prefetch=4, start_method=start_method)


def _open(source: str) -> Any:
    if source in SYNTHETIC:
        return SYNTHETIC[source]()
    if source.startswith("lerobot:"):
        if importlib.util.find_spec("lerobot") is None:
            raise UsageError(f"--dataset {source} needs LeRobot: pip install lerobot")
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        return LeRobotDataset(source.removeprefix("lerobot:"))
    if Path(source).is_dir():
        return Files(Path(source))
    if ":" not in source:
        raise UsageError(f"--dataset {source}: no such folder; or give package.module:name, {', '.join(SYNTHETIC)}")
    found = load_target(source)
    return found if isinstance(found, (Dataset, DataLoader)) or not callable(found) else found()


def _image(path: Path) -> Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(f"decoding {path.name} needs Pillow: pip install pillow") from None
    with Image.open(path) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB")).copy())


def _stacked(items: list[Any]) -> Any:
    """Return items as one batch, or as a list if they differ in shape or are not numbers."""
    try:
        return default_collate(items)
    except (RuntimeError, TypeError):
        return items


# --- synthetic sets --------------------------------------------------------------------------------------------------

_ITEMS = 4096


class Synthetic(Dataset[Tensor]):
    """Items that take a known time: `ms` each, one in `burst_every` at random `burst_ms`; they wait or compute."""

    def __init__(self, ms: float, *, computing: bool = False, burst_every: int = 0, burst_ms: float = 0.0) -> None:
        rng = random.Random(0)
        bursts = [burst_every > 0 and rng.random() < 1 / burst_every for _ in range(_ITEMS)]
        self.seconds = [(burst_ms if burst else ms) / 1000 for burst in bursts]
        self.computing = computing

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> Tensor:
        """Return 1024 numbers after the item's time."""
        if self.computing:
            ends = time.process_time() + self.seconds[index]
            while time.process_time() < ends:
                pass
        else:
            time.sleep(self.seconds[index])
        return torch.zeros(1024)


SYNTHETIC = {
    "synthetic:io": lambda: Synthetic(4.0),
    "synthetic:cpu": lambda: Synthetic(4.0, computing=True),
    "synthetic:bursty": lambda: Synthetic(1.0, burst_every=32, burst_ms=60.0),
}
#: Milliseconds of a step at which the answer is clear: 3 workers, 2 (with two processors or more), and 1 with 4 ahead
STEP_MS = {"synthetic:io": 14.0, "synthetic:cpu": 24.0, "synthetic:bursty": 35.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The answer that a search should find: workers, and batches ahead of each."""

    workers: int
    prefetch: int
    enough: bool


def known_answer(name: str, *, batch_size: int, step_s: float, cpus: float) -> Known:
    """Return the smallest number of workers that is enough, simulated from the true times of the set's items."""
    items = SYNTHETIC[name]()
    batch_s = batch_times(items.seconds, batch_size=batch_size)
    most = max(1, int(cpus)) if items.computing else 64
    share = 1.0 if items.computing else 0.0
    for workers in range(most + 1):
        for prefetch in PREFETCHES if workers else PREFETCHES[:1]:
            stall = predicted_stall(
                batch_s, workers=workers, prefetch=prefetch, step_s=step_s, cpus=cpus, cpu_share=share
            )
            if stall <= ENOUGH:
                return Known(workers=workers, prefetch=prefetch, enough=True)
    return Known(workers=most, prefetch=PREFETCHES[0], enough=False)
