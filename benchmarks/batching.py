"""How fast and how full: plans, packing and analysis at 1 and 10 million lengths, next to the target figures.

    python benchmarks/batching.py                 all rows
    python benchmarks/batching.py --only pack     rows whose name contains "pack"
    python benchmarks/batching.py --json          one object, for a machine

Every row runs in a separate process, so that peak memory is the row's; times are medians of --repeats. Lengths are
log-normal (median 200, sigma 1) clipped to 1..4096, packs hold 2048. The figures of the existing library
(chuk-lazarus, two cores, the same lengths) stand next to ours; with --peer it is measured where it can be imported
(benchmarks/batching_peer.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MILLION = 1_000_000
EDGES = (128, 256, 512, 1024, 2048, 4096)
BUDGET = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one row measured: seconds (wall, and this process's own work) and whatever else it counts."""

    name: str
    wall_s: float
    cpu_s: float
    peak_mb: float
    extra: dict[str, float]
    goal: str
    peer: str


def make_lengths(count: int, *, longest: int = 4096) -> NDArray[np.int32]:
    """Return log-normal lengths, the same for the same count."""
    rng = np.random.default_rng(0)
    lengths = np.empty(count, np.int32)
    for begin in range(0, count, MILLION):
        part = rng.lognormal(np.log(200), 1.0, min(MILLION, count - begin))
        lengths[begin : begin + MILLION] = np.clip(part, 1, longest)
    return lengths


def plan_row(count: int) -> Callable[[], dict[str, float]]:
    from query_mutator.batching import BatchingConfig, BatchPlanBuilder, save_batch_plan

    lengths = make_lengths(count)
    config = BatchingConfig(token_budget=BUDGET, bucket_edges=EDGES, overflow_max=4096)

    def run() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            plan = BatchPlanBuilder(lengths, config, "data", "tokenizer").build_sync(1)
            save_batch_plan(plan, Path(folder) / "plan")
            size = sum(one.stat().st_size for one in (Path(folder) / "plan").iterdir())
        epoch = plan.get_epoch(0)
        means = epoch.tokens / epoch.sizes
        correlation = float(np.corrcoef(means[:-1], means[1:])[0, 1])
        return {"MB": size / 1e6, "efficiency": epoch.efficiency, "correlation": correlation, "batches": len(epoch)}

    return run


def plan_ids_row(count: int) -> Callable[[], dict[str, float]]:
    from query_mutator.batching import BatchingConfig, BatchPlanBuilder, save_batch_plan

    lengths = {f"sample_{place:07d}": length for place, length in enumerate(make_lengths(count).tolist())}
    config = BatchingConfig(token_budget=BUDGET, bucket_edges=EDGES, overflow_max=4096)

    def run() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            save_batch_plan(BatchPlanBuilder(lengths, config).build_sync(1), Path(folder) / "plan")
            return {"MB": sum(one.stat().st_size for one in (Path(folder) / "plan").iterdir()) / 1e6}

    return run


def iterate_row(count: int) -> Callable[[], dict[str, float]]:
    from query_mutator.batching import BatchingConfig, BatchPlanBuilder

    config = BatchingConfig(token_budget=2048, bucket_edges=(128, 256, 512, 1024), overflow_max=2048)
    epoch = BatchPlanBuilder(make_lengths(count, longest=2048), config).build_sync(1).get_epoch(0)
    return lambda: {"samples": sum(len(microbatch.samples) for microbatch in epoch), "microbatches": len(epoch)}


def pack_row(mode: str, count: int) -> Callable[[], dict[str, float]]:
    from query_mutator.batching import PackingConfig
    from query_mutator.batching.planning.packing import pack_lengths

    lengths = make_lengths(count, longest=2048)

    def run() -> dict[str, float]:
        packs = pack_lengths(lengths, PackingConfig(mode=mode, max_length=2048))  # type: ignore[arg-type]
        count_packs = len(packs.offsets) - 1
        return {"efficiency": int(lengths.sum(dtype=np.int64)) / (2048 * count_packs), "packs": count_packs}

    return run


def report_row(count: int) -> Callable[[], dict[str, float]]:
    from query_mutator.batching import BucketSpec, create_efficiency_report

    lengths = make_lengths(count)
    spec = BucketSpec(edges=EDGES)
    return lambda: {"efficiency": create_efficiency_report(lengths, spec).overall_efficiency}


def suggest_row(goal: str, count: int) -> Callable[[], dict[str, float]]:
    from query_mutator.batching import suggest_bucket_edges

    lengths = make_lengths(count)
    return lambda: {"efficiency": suggest_bucket_edges(lengths, 6, goal).estimated_efficiency}


def shard_row(count: int) -> Callable[[], dict[str, float]]:
    from query_mutator.batching import BatchingConfig, BatchPlanBuilder

    config = BatchingConfig(token_budget=BUDGET, bucket_edges=EDGES, overflow_max=4096)
    plan = BatchPlanBuilder(make_lengths(count), config).build_sync(1)

    def run() -> dict[str, float]:
        shards = [plan.shard(rank, 8, equal_steps=True).get_epoch(0) for rank in range(8)]
        costs = np.array([shard.padded_tokens for shard in shards])
        fillers = sum(int(shard.padding.sum()) for shard in shards if shard.padding is not None)
        return {"imbalance": float((costs.max(axis=0) / costs.mean(axis=0) - 1).mean()), "fillers": fillers}

    return run


# name -> (how to make it, what to reach, what the existing library takes)
ROWS: dict[str, tuple[Callable[[], Callable[[], dict[str, float]]], str, str]] = {
    "plan 1M": (lambda: plan_row(MILLION), "0.3 s, 5 MB, 0.95, |r| < 0.1", "3.39 s, 14.3 MB, 0.685"),
    "plan 1M, ids": (lambda: plan_ids_row(MILLION), "5 MB", "3.39 s, 14.3 MB"),
    "iterate 100k": (lambda: iterate_row(MILLION // 10), "0.1 s", "-"),
    "plan 10M": (lambda: plan_row(10 * MILLION), "4 s, 1500 MB", "-"),
    "pack greedy 100k": (lambda: pack_row("greedy", MILLION // 10), "0.1 s", "173.2 s, 0.99990"),
    "pack greedy 1M": (lambda: pack_row("greedy", MILLION), "1 s, 0.9999", "hours"),
    "pack first_fit 1M": (lambda: pack_row("first_fit", MILLION), "6 s", "hours"),
    "pack best_fit 1M": (lambda: pack_row("best_fit", MILLION), "6 s", "hours"),
    "report 1M": (lambda: report_row(MILLION), "0.5 s", "3.44 s"),
    "suggest waste 1M": (lambda: suggest_row("minimize_waste", MILLION), "0.1 s, 0.69", "1.33 s, 0.503"),
    "suggest balance 1M": (lambda: suggest_row("balance_buckets", MILLION), "-", "0.51 s"),
    "suggest memory 1M": (lambda: suggest_row("minimize_memory", MILLION), "-", "0.47 s"),
    "shard 1M on 8 ranks": (lambda: shard_row(MILLION), "same bucket, like cost", "same bucket 0.011"),
}


def measure(name: str, repeats: int, with_peer: bool) -> Row:
    """Run one row, and the existing library on the same lengths, and return the medians."""
    make, goal, known = ROWS[name]
    wall_s, cpu_s, extra = timed(make(), repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    peer = (measured_peer(name, repeats) if with_peer else None) or known
    return Row(name=name, wall_s=wall_s, cpu_s=cpu_s, peak_mb=peak, extra=extra, goal=goal, peer=peer)


def timed(run: Callable[[], dict[str, float]], repeats: int) -> tuple[float, float, dict[str, float]]:
    """Return medians of wall and processor seconds, and what the last run counted."""
    walls, cpus, extra = [], [], {}
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        extra = run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus), extra


def measured_peer(name: str, repeats: int) -> str | None:
    """Return the existing library's figures here, None where it is not installed."""
    from batching_peer import peer_run

    run = peer_run(name, make_lengths(MILLION).tolist(), edges=EDGES, budget=BUDGET)
    if run is None:
        return None
    wall_s, _, extra = timed(run, repeats)
    return ", ".join([f"here {wall_s:.2f} s", *(f"{what} {value:.4g}" for what, value in extra.items())])


def show(row: Row) -> str:
    extra = ", ".join(f"{name} {value:.5g}" for name, value in row.extra.items())
    head = f"{row.name:<25} {row.wall_s:>8.3f} {row.cpu_s:>8.3f} {row.peak_mb:>8.0f}  "
    return f"{head}{row.goal:<30} {row.peer:<24} {extra}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=3, help="how often each row runs")
    parser.add_argument("--peer", action="store_true", help="measure the existing library too, where it is installed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    names = [name for name in ROWS if arguments.only in name]
    if not names:
        parser.error(f"no row contains {arguments.only!r}; rows: {', '.join(ROWS)}")
    context = multiprocessing.get_context("spawn")
    rows = []
    if not arguments.json:
        print(f"{'':<25} {'wall s':>8} {'cpu s':>8} {'peak MB':>8}  {'to reach':<30} {'existing library':<24}")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for row in pool.map(measure, names, [arguments.repeats] * len(names), [arguments.peer] * len(names)):
            rows.append(row)
            if not arguments.json:
                print(show(row), flush=True)
    if arguments.json:
        json.dump({row.name: asdict(row) for row in rows}, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
