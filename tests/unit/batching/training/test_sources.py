"""The steps of a plan: each batch once an epoch, in the plan's order, and after a resume."""

from __future__ import annotations

import numpy as np
import pytest

from query_mutator.batching import BatchingConfig, BatchPlan, BatchPlanBuilder, TokenRow
from query_mutator.batching.training.sources import PlanSource
from query_mutator.errors import CheckpointError

ROWS = {
    f"r{number}": TokenRow(np.full(length, 5, np.int32), np.ones(length, np.uint8))
    for number, length in enumerate(np.random.default_rng(0).integers(1, 120, 300).tolist())
}
CONFIG = BatchingConfig(token_budget=256, bucket_edges=(32, 64, 128), overflow_max=128)


def plan_of(config: BatchingConfig = CONFIG) -> BatchPlan:
    return BatchPlanBuilder({name: row.length for name, row in ROWS.items()}, config).build_sync(2)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("later", [1, 3, 4])
def test_a_resumed_plan_runs_what_is_left_in_the_plans_order(accumulation: int, later: int) -> None:
    plan = plan_of()
    source = PlanSource(plan, ROWS, accumulation=accumulation)
    total, running = source.steps_left, source.steps()
    done = [one.spec for _ in range(40) for one in next(running)]  # in the first epoch, or the second
    assert source.steps_left == total - 40 or accumulation > 1
    resumed = PlanSource(plan, ROWS, accumulation=later)
    resumed.load_state_dict(source.state_dict())
    left = resumed.steps_left
    rest = list(resumed.steps())
    assert len(rest) == left
    assert [*done, *(one.spec for step in rest for one in step)] == [
        spec for n in (0, 1) for spec in plan.iter_epoch(n)
    ]
    with pytest.raises(CheckpointError, match="the same data and flags"):
        PlanSource(plan_of(CONFIG.changed(seed=7)), ROWS).load_state_dict(source.state_dict())
