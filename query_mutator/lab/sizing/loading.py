"""Load data in a child process, and measure how long training steps wait for it.

wait    from requesting a batch until it arrives
step    what training does with it: a pause of a given length, or a function called with the batch
stall   wait / (wait + step)

The first batches are left out: meanwhile workers start, import and fill their queues. Synthetic sets have a known cost:

synthetic:io       items wait 4 ms, as for a disk or a network: workers help beyond the number of processors
synthetic:cpu      items compute for 4 ms: workers help up to the number of processors
synthetic:bursty   items wait 1 ms, one in 32 for 60 ms: batches ahead help
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from ppo.checkpoint import load_tensors
from query_mutator.errors import UsageError
from query_mutator.lab.sizing.machine import load_target
from query_mutator.lab.sizing.workers import Loaded, LoadTrial, Profile

__all__ = ["SYNTHETIC", "Files", "Synthetic", "as_loader", "load_batches", "read_items", "run", "with_workers"]

PROFILE_WINDOWS = 2  # windows in which items are read one by one
_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_ITEMS = 4096  # of a synthetic set
_USUAL_BATCH = 8


def run(**fields: Any) -> dict[str, Any]:
    """Run a trial and return the fields of a Profile or a Loaded: the child's half of `workers.run_trial`."""
    trial = LoadTrial(**fields)
    return asdict(read_items(trial) if trial.workers is None else load_batches(trial))


def read_items(trial: LoadTrial) -> Profile:
    """Read items one by one for a few seconds; time in which other programs had the processor is left out."""
    loader, take = as_loader(trial.source, batch_size=trial.batch_size), _step(trial)
    data: Any = loader.dataset
    items = iter(data) if isinstance(data, IterableDataset) else (data[at] for at in _Endless(_shuffled(data, first=0)))
    batch_size = trial.batch_size or loader.batch_size or _USUAL_BATCH
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
    leaves = tree_leaves(batch)
    return Profile(
        item_s=item_s,
        collate_s=median(collate_s),
        step_s=median(step_s),
        batch_size=batch_size,
        batch_bytes=sum(len(one) if isinstance(one, (bytes, str)) else getattr(one, "nbytes", 0) for one in leaves),
        cpu_share=min(1.0, busy / max(sum(item_s), 1e-9)),
    )


def load_batches(trial: LoadTrial) -> Loaded:
    """Load batches with workers while a consumer takes a step with each."""
    workers, take, loader = trial.workers or 0, _step(trial), as_loader(trial.source, batch_size=trial.batch_size)
    batch_size = trial.batch_size or loader.batch_size or _USUAL_BATCH
    if trial.ready:
        loader = DataLoader(range(64), batch_size=1, collate_fn=_Ready(next(iter(loader))))  # type: ignore[arg-type]
    loader = with_workers(
        loader, workers=workers, prefetch=trial.prefetch, start_method=trial.start_method, first=trial.first
    )
    began = time.perf_counter()
    batches = iter(loader)
    batch = next(batches)
    startup_s = time.perf_counter() - began
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
    if trial.step is None:
        return lambda batch: time.sleep(trial.step_s)
    found = load_target(trial.step)
    if not callable(found):
        raise UsageError(f"--step {trial.step} is a {type(found).__name__}; it should be a function of a batch")
    return found  # type: ignore[no-any-return]


def _queued_s() -> float:
    """Return the seconds that this thread was ready to run without a processor; 0 if the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _memory(pid: int) -> int:
    """Return the bytes of a process with its share of shared pages (Linux's PSS); 0 if they cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


# --- data sets and loaders --------------------------------------------------------------------------------------------


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
    return DataLoader(found, batch_size=batch_size or _USUAL_BATCH, collate_fn=_stacked)


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


def with_workers(
    loader: DataLoader[Any], *, workers: int, prefetch: int, start_method: str | None, first: int = 0
) -> DataLoader[Any]:
    """Return an endless loader of the same batches with other workers; shuffled indices begin at place `first`."""
    more: dict[str, Any] = {}
    if workers:
        more = {"prefetch_factor": prefetch, "multiprocessing_context": start_method, "persistent_workers": True}
    if isinstance(loader.dataset, IterableDataset):
        more["batch_size"] = loader.batch_size
    elif loader.batch_size is None and loader.batch_sampler is not None:
        more["batch_sampler"] = _Endless(loader.batch_sampler)
    else:
        more |= {"batch_size": loader.batch_size, "sampler": _Endless(_shuffled(loader.dataset, first=first))}
    return DataLoader(
        loader.dataset,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        **more,
    )


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
        return load_tensors(path) if path.suffix == ".pt" else path.read_bytes()


def _image(path: Path) -> Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(f"decoding {path.name} needs Pillow: pip install pillow") from None
    with Image.open(path) as image:
        return torch.from_numpy(np.asarray(image.convert("RGB")).copy())


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


class _Ready:
    """A collate function that returns one batch, so that loading costs only the transfer from the worker."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __call__(self, items: list[Any]) -> Any:
        return self.batch


class _Endless(Sampler[Any]):
    """Repeats the indices or batches of an iterable without end."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.source


def _shuffled(data: Any, *, first: int) -> list[int]:
    """Return indices in a shuffled order that starts at its place `first`: so trials do not read cached files."""
    size = len(data)
    order = random.Random(0).sample(range(size), size)
    return order[first % size :] + order[: first % size]


def _stacked(items: list[Any]) -> Any:
    """Return items as one batch, or as a list if they differ in shape or are not numbers."""
    try:
        return default_collate(items)
    except (RuntimeError, TypeError):
        return items
