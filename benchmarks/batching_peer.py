"""The existing library, chuk-lazarus, on the rows of benchmarks/batching.py that it ends within seconds.

It is measured where it can be imported. Its dependencies exclude versions that we need, so install it next to them:

    pip install --no-deps chuk-lazarus mlx mlx-cpu mlx-lm aiofiles tabulate typer wasmtime

Where it is not there, the figures in benchmarks/batching.py stand: packing 100k lengths takes it minutes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

Run = Callable[[], dict[str, float]]


def peer_run(name: str, lengths: list[int], *, edges: tuple[int, ...], budget: int) -> Run | None:
    """Return what the library does for a row on these lengths; None where it cannot be imported or takes minutes."""
    make = PEER_ROWS.get(name)
    if make is None or importlib.util.find_spec("chuk_lazarus") is None:
        return None
    try:
        import chuk_lazarus.data.batching  # noqa: F401
    except ImportError:
        return None
    return make({f"s{place}": length for place, length in enumerate(lengths)}, edges, budget)


def _plan(lengths: dict[str, int], edges: tuple[int, ...], budget: int) -> Run:
    from chuk_lazarus.data.batching import BatchingConfig, BatchPlanBuilder, save_batch_plan

    config = BatchingConfig(token_budget=budget, bucket_edges=edges[:-1], overflow_max=edges[-1])

    def run() -> dict[str, float]:
        plan = asyncio.run(BatchPlanBuilder(lengths, config, "data", "tokenizer").build(1))
        with tempfile.TemporaryDirectory() as folder:
            save_batch_plan(plan, Path(folder))
            size = sum(one.stat().st_size for one in Path(folder).rglob("*") if one.is_file())
        padded = sum(batch.max_len * batch.batch_size for batch in plan.get_epoch(0).microbatches)
        return {"MB": size / 1e6, "efficiency": sum(lengths.values()) / padded}

    return run


def _iterate(lengths: dict[str, int], edges: tuple[int, ...], budget: int) -> Run:
    from chuk_lazarus.data.batching import BatchingConfig, BatchPlanBuilder

    shortened = {name: min(length, 2048) for name, length in islice(lengths.items(), 100_000)}
    config = BatchingConfig(token_budget=2048, bucket_edges=(128, 256, 512, 1024), overflow_max=2048)
    epoch = asyncio.run(BatchPlanBuilder(shortened, config, "data", "tokenizer").build(1)).get_epoch(0)
    return lambda: {"samples": sum(batch.batch_size for batch in epoch), "microbatches": epoch.num_microbatches}


def _report(lengths: dict[str, int], edges: tuple[int, ...], budget: int) -> Run:
    from chuk_lazarus.data.batching import BucketSpec, create_efficiency_report

    spec = BucketSpec(edges=edges[:-1], overflow_max=edges[-1])
    return lambda: {"efficiency": create_efficiency_report(lengths, spec).bucket_analysis.overall_efficiency}


def _suggest(lengths: dict[str, int], edges: tuple[int, ...], budget: int) -> Run:
    from chuk_lazarus.data.batching import OptimizationGoal, suggest_bucket_edges

    goal = OptimizationGoal.MINIMIZE_WASTE
    return lambda: {"efficiency": suggest_bucket_edges(lengths, 6, goal).estimated_efficiency}


PEER_ROWS: dict[str, Callable[[dict[str, int], tuple[int, ...], int], Run]] = {
    "plan 1M": _plan,
    "iterate 100k": _iterate,
    "report 1M": _report,
    "suggest waste 1M": _suggest,
}
