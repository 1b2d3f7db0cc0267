"""Which rank runs which microbatch at which step, also after the number of ranks has changed.

B microbatches, S steps, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from query_mutator.batching.planning.epoch_plan import EpochPlan
from query_mutator.batching.records import Record, permutation

_ABSENT = -1
_QUADRATIC = 2e-4  # cost of a squared length in tokens: about 1 / (6 d) for a transformer of width d = 768


class ShardSpec(Record):
    """Which part of a plan a rank has, and what earlier runs have done of epoch `first_epoch`.

    Without `equal_steps`, or on one rank, rank r has microbatches r, r + W, ... of each epoch. With it every rank has
    the same number of steps, and at each step the ranks have microbatches of one bucket and of nearly equal cost.
    `done` lists finished stretches as (ranks, steps).
    """

    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    equal_steps: bool = False
    first_epoch: int = Field(default=0, ge=0)
    done: tuple[tuple[int, int], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank={self.rank} must be below world_size={self.world_size}")
        return self

    def done_in(self, epoch: int) -> tuple[tuple[int, int], ...]:
        """Return the finished stretches of an epoch."""
        return self.done if epoch == self.first_epoch else ()


class Steps(NamedTuple):
    """Microbatches by step and rank [S, W], −1 for none; which are fillers [S, W]."""

    batches: NDArray[np.int64]
    padding: NDArray[np.bool_]


def epoch_steps(epoch: EpochPlan, spec: ShardSpec) -> Steps:
    """Return the steps of an epoch for all ranks, without the finished microbatches."""
    # Replay what earlier numbers of ranks have run, in order, and remove it.
    left = np.arange(epoch.num_microbatches)
    for world_size, count in spec.done_in(epoch.epoch):
        batches, padding = _arrange(epoch, left, world_size, equal_steps=spec.equal_steps)
        run = batches[:count]
        left = np.setdiff1d(left, run[(run != _ABSENT) & ~padding[:count]])
    return _arrange(epoch, left, spec.world_size, equal_steps=spec.equal_steps)


def shard_epoch(epoch: EpochPlan, spec: ShardSpec) -> EpochPlan:
    """Return the part of an epoch that one rank runs."""
    steps = epoch_steps(epoch, spec)
    mine = steps.batches[:, spec.rank]
    present = mine != _ABSENT
    return epoch.take(mine[present], padding=steps.padding[present, spec.rank])


def _arrange(epoch: EpochPlan, left: NDArray[np.int64], world_size: int, *, equal_steps: bool) -> Steps:
    if not equal_steps or world_size == 1:
        batches = np.full((-(-len(left) // world_size), world_size), _ABSENT, np.int64)
        batches.reshape(-1)[: len(left)] = left
        return Steps(batches, np.zeros(batches.shape, bool))
    steps = _balanced(epoch, left, world_size)
    # Shuffle the steps, and the ranks within each step, so that no rank always has the largest microbatch.
    count = len(steps.batches)
    by_step = permutation(count, epoch.seed, world_size, 0)
    ranks = permutation(count * world_size, epoch.seed, world_size, 1).reshape(count, world_size).argsort(axis=1)
    return Steps(
        np.take_along_axis(steps.batches[by_step], ranks, axis=1),
        np.take_along_axis(steps.padding[by_step], ranks, axis=1),
    )


def _balanced(epoch: EpochPlan, left: NDArray[np.int64], world_size: int) -> Steps:
    """Return steps of microbatches that are neighbors by cost within their bucket.

    The last step of a bucket is filled with the bucket's last microbatches, whose cost is nearest, as often as needed.
    """
    costs = (epoch.padded_tokens + _QUADRATIC * epoch.squares)[left]
    by_cost = left[np.lexsort((costs, epoch.bucket[left]))]
    limits = np.flatnonzero(np.diff(epoch.bucket[by_cost])) + 1
    rows, fillers = [np.empty(0, np.int64)], [np.empty(0, bool)]
    for bucket in np.split(by_cost, limits):
        missing = -len(bucket) % world_size
        rows.append(np.concatenate([bucket, np.resize(bucket[::-1][:world_size], missing)]))
        fillers.append(np.arange(len(bucket) + missing) >= len(bucket))
    return Steps(np.concatenate(rows).reshape(-1, world_size), np.concatenate(fillers).reshape(-1, world_size))
