"""Cost of streams, caches and stores: `python benchmarks/batching_streams.py [--json] [--quick] [--cpu]`.

    length cache   1M string ids, written and loaded: 0.5 s each
    replay buffer  at 100k samples, every eviction policy: add 20 us, sample(32) 200 us
    batch store    bytes per real token, and batches read per second

Medians of three runs, by the clock on the wall; `--cpu` counts processor time instead, which a machine busy with
other work changes less. `--quick` is a tenth of the size, without targets. Exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from query_mutator.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    BatchReader,
    BatchWriter,
    BufferEvictionPolicy,
    LengthCache,
    ReplayBuffer,
    ReplayBufferConfig,
    StreamSample,
    TokenRow,
)

RUNS = 3


class Clock:
    """What time is read from."""

    now: Callable[[], float] = staticmethod(time.perf_counter)


CLOCK = Clock()


class Figure(NamedTuple):
    """One measured number and the most it may be, if there is a limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def met(self) -> bool:
        """Return whether it is within its limit."""
        return self.limit is None or self.value <= self.limit


def main() -> int:
    """Measure, print, and return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, no targets")
    parser.add_argument("--cpu", action="store_true", help="processor time in place of wall time")
    options = parser.parse_args()
    if options.cpu:
        CLOCK.now = time.process_time
    scale = 10 if options.quick else 1
    figures = [*length_cache(1_000_000 // scale), *replay(100_000 // scale), *batch_store(20_000 // scale)]
    if options.quick:
        figures = [figure._replace(limit=None) for figure in figures]
    if options.json:
        print(json.dumps({figure.name: figure._asdict() for figure in figures}, indent=2))
    else:
        for figure in figures:
            limit = "" if figure.limit is None else f"  (at most {figure.limit:g}{'' if figure.met else ', MISSED'})"
            print(f"{figure.name:42s} {figure.value:10.3f} {figure.unit}{limit}")
    return 0 if all(figure.met for figure in figures) else 1


def median_s(work: Callable[[], object]) -> float:
    """Return the median of the seconds `work` takes."""
    times = []
    for _ in range(RUNS):
        begin = CLOCK.now()
        work()
        times.append(CLOCK.now() - begin)
    return statistics.median(times)


def log_normal_lengths(count: int) -> np.ndarray:
    """Return lengths with median 200 and sigma 1, clipped to 1..4096."""
    return np.clip(np.random.default_rng(0).lognormal(np.log(200), 1.0, count), 1, 4096).astype(np.int32)


def length_cache(count: int) -> list[Figure]:
    """Write and load a cache of string ids; loading includes the array of lengths."""
    ids = [f"sample_{number:08d}" for number in range(count)]
    lengths = log_normal_lengths(count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.bin"

        def write() -> None:
            with LengthCache.create(path, "tokenizer") as cache:
                cache.add_many_sync(ids, lengths)

        def load() -> None:
            cache = LengthCache.load_sync(path, "tokenizer")
            assert len(cache) == len(cache.lengths) == count

        written, loaded = median_s(write), median_s(load)
        size = path.stat().st_size / count
    return [
        Figure(f"length cache, {count} ids, written", written, "s", 0.5),
        Figure(f"length cache, {count} ids, loaded", loaded, "s", 0.5),
        Figure("length cache, bytes per entry", size, "B"),
    ]


def replay(size: int) -> list[Figure]:
    """Add to and draw from a full buffer under every policy."""
    rng = np.random.default_rng(0)
    samples = make_samples(2 * size)
    priorities = rng.random(2 * size).tolist()
    figures = []
    for policy in BufferEvictionPolicy:
        buffer = ReplayBuffer(ReplayBufferConfig(max_size=size, eviction_policy=policy))
        buffer.add_batch(samples[:size], priorities[:size])
        add = median_s(lambda buffer=buffer: buffer.add_batch(samples[size:], priorities[size:]))  # type: ignore[misc]
        draw = median_s(lambda buffer=buffer: [buffer.sample(32) for _ in range(500)])  # type: ignore[misc]
        figures.append(Figure(f"replay at {size}, {policy}, add", add / size * 1e6, "us", 20))
        figures.append(Figure(f"replay at {size}, {policy}, sample(32)", draw / 500 * 1e6, "us", 200))
    return figures


def make_samples(count: int) -> list[StreamSample]:
    """Return samples that share their tokens and differ in id and numbers."""
    ids, mask = np.arange(40, dtype=np.int32), np.ones(40, dtype=np.uint8)
    first = StreamSample(input_ids=ids, loss_mask=mask, sample_id="s", dataset_id="d", source="gym", difficulty=0.5)
    return [first.model_copy(update={"sample_id": f"s{number}", "reward": float(number)}) for number in range(count)]


def batch_store(count: int) -> list[Figure]:
    """Write a store of log-normal lengths and read every batch."""
    rng = np.random.default_rng(0)
    lengths = log_normal_lengths(count)
    rows = {
        f"s{number}": TokenRow(rng.integers(0, 50_000, length).astype(np.int32), np.ones(length, np.uint8))
        for number, length in enumerate(lengths.tolist())
    }
    config = BatchingConfig.throughput(token_budget=16_384, bucket_edges=(512, 1024, 2048), overflow_max=4096)
    plan = BatchPlanBuilder({name: row.length for name, row in rows.items()}, config, "d", "t").build_sync(num_epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        begin = CLOCK.now()
        files = BatchWriter(plan, rows, folder).write_all()
        written = CLOCK.now() - begin
        size = sum(file.stat().st_size for file in files)
        reader = BatchReader(folder)
        read = median_s(lambda: sum(batch.batch_size for batch in reader.iter_epoch(0)))
    epoch = plan.get_epoch(0)
    return [
        Figure(f"batch store, {count} samples, two epochs, written", written, "s"),
        Figure("batch store, bytes per real token", size / int(lengths.sum()), "B"),
        Figure("batch store, read", epoch.total_tokens / read / 1e6, "M tokens/s"),
    ]


if __name__ == "__main__":
    sys.exit(main())
