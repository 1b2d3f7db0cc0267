"""Who runs what at which step: the same for any number of ranks, of one bucket, and after a change of that number."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from query_mutator.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, DistributedConfig, TokenRow
from query_mutator.batching.training.sources import Microbatch, PlanSource

ROWS = {
    f"r{number}": TokenRow(np.full(length, 5, np.int32), np.ones(length, np.uint8))
    for number, length in enumerate(np.random.default_rng(0).integers(1, 120, 300).tolist())
}
CONFIG = BatchingConfig(token_budget=256, bucket_edges=(32, 64, 128), overflow_max=128)


@pytest.fixture(scope="module")
def plan() -> BatchPlan:
    return BatchPlanBuilder({name: row.length for name, row in ROWS.items()}, CONFIG).build_sync(2)


def source_of(plan: BatchPlan, world_size: int, accumulation: int, rank: int = 0) -> PlanSource:
    ranks = DistributedConfig(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    return PlanSource(plan, ROWS, ranks=ranks, accumulation=accumulation)


def steps_of(plan: BatchPlan, world_size: int, accumulation: int) -> list[list[list[Microbatch]]]:
    """Return the microbatches of every rank at every step."""
    sources = [source_of(plan, world_size, accumulation, rank) for rank in range(world_size)]
    return [list(step) for step in zip(*(one.steps() for one in sources), strict=True)]


def names_of(microbatches: list[Microbatch]) -> list[str]:
    return [name for one in microbatches for name in one.spec.samples]


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_a_step_holds_the_same_on_any_number_of_ranks(plan: BatchPlan, world_size: int, accumulation: int) -> None:
    def contents(ranks: int, each: int) -> list[list[str]]:
        return [sorted(name for mine in step for name in names_of(mine)) for step in steps_of(plan, ranks, each)]

    assert contents(world_size, accumulation) == contents(1, 8)
    assert source_of(plan, world_size, accumulation).steps_left == len(contents(1, 8))


def test_ranks_at_one_step_run_one_bucket_at_like_cost(plan: BatchPlan) -> None:
    imbalance = []
    for step in steps_of(plan, 4, 1):
        assert len({one.spec.bucket_id for mine in step for one in mine}) == 1
        costs = [one.padded_tokens for mine in step for one in mine]
        imbalance.append(max(costs) / np.mean(costs) - 1)
    assert np.mean(imbalance) < 0.05


def test_alone_and_without_accumulation_the_plans_order_stands(plan: BatchPlan) -> None:
    indices = [one.spec.index for step in steps_of(plan, 1, 1) for mine in step for one in mine]
    assert indices == [spec.index for number in (0, 1) for spec in plan.iter_epoch(number)]


@pytest.mark.parametrize("later", [(2, 2), (3, 1), (1, 1)])
def test_resuming_on_other_ranks_runs_what_is_left(plan: BatchPlan, later: tuple[int, int]) -> None:
    first = source_of(plan, 1, 4)
    running = first.steps()
    done = [name for _ in range(5) for name in names_of(next(running))]
    states: list[dict[str, Any]] = [first.state_dict()]
    for _ in range(2):  # a second stop, on yet another number of ranks
        sources = [source_of(plan, *later, rank) for rank in range(later[0])]
        for one in sources:
            one.load_state_dict(states[-1])
        left, running_all = sources[0].steps_left, [one.steps() for one in sources]
        for _ in range(3):
            done += [name for one in running_all for name in names_of(next(one))]
        assert sources[0].steps_left == left - 3
        states.append(sources[0].state_dict())
        later = (later[0] + 1, later[1])
    last = source_of(plan, 1, 4)
    last.load_state_dict(states[-1])
    done += [name for step in last.steps() for name in names_of(step)]
    assert Counter(done) == dict.fromkeys(ROWS, 2)
