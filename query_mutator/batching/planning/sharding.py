"""Which rank runs which microbatch at which step, also after the number of ranks has changed.

B microbatches, S steps, W ranks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from query_mutator.batching.arrays import permutation
from query_mutator.batching.planning.epoch_plan import EpochPlan
from query_mutator.batching.records import Record

_ABSENT = -1


class UnevenPolicy(StrEnum):
    """How `equal_steps` equalizes the steps of all ranks: pad with fillers, drop or repeat microbatches."""

    PAD = "pad"
    DROP = "drop"
    WRAP = "wrap"


class Segment(Record):
    """A finished stretch of an epoch: `steps` steps on `world_size` ranks."""

    world_size: int = Field(ge=1)
    steps: int = Field(ge=0)


class RankPart(Record):
    """One rank of `world_size`, how microbatches are assigned, and what earlier runs have done of the first epoch.

    Everything that decides which microbatch a rank runs at which step is a field here, so that a position has it too.
    """

    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    equal_steps: bool = False
    uneven: UnevenPolicy = UnevenPolicy.PAD
    linear: float = Field(default=1.0, ge=0)
    quadratic: float = Field(default=2e-4, ge=0)  # about 1 / (6 d) for a transformer of width d = 768
    done: tuple[Segment, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank={self.rank} must be below world_size={self.world_size}")
        return self

    @property
    def part(self) -> dict[str, Any]:
        """The fields of RankPart, for another record that has them."""
        return {name: getattr(self, name) for name in RankPart.model_fields}


class ShardSettings(TypedDict, total=False):
    """Optional settings of a shard, see `ShardSpec`."""

    equal_steps: bool
    uneven: UnevenPolicy | str
    linear: float
    quadratic: float


class ShardSpec(RankPart):
    """Which part of a plan a rank has.

    Without `equal_steps`, or on one rank, rank r has microbatches r, r + W, ... of each epoch. With it every rank has
    the same number of steps, and at each step the ranks have microbatches of one bucket and of nearly equal cost
    linear * tokens + quadratic * squared lengths. `done` refers to epoch `first_epoch`.
    """

    first_epoch: int = Field(default=0, ge=0)

    @classmethod
    def of(cls, rank: int, world_size: int, **settings: Unpack[ShardSettings]) -> Self:
        """Return the spec of a rank."""
        return cls.model_validate({"rank": rank, "world_size": world_size, **settings})

    def done_in(self, epoch: int) -> tuple[Segment, ...]:
        """Return the finished stretches of an epoch."""
        return self.done if epoch == self.first_epoch else ()


class Steps(NamedTuple):
    """Microbatches by step and rank [S, W], −1 for none; which are fillers [S, W]; dropped ones; number of repeats."""

    batches: NDArray[np.int64]
    padding: NDArray[np.bool_]
    dropped: NDArray[np.int64]
    wrapped: int = 0


class ShardReport(Record):
    """Distribution of an epoch over ranks; `imbalance` is the mean over steps of largest cost / mean cost − 1."""

    world_size: int
    steps: int
    num_microbatches: int
    num_padding: int
    num_dropped: int
    num_wrapped: int
    same_bucket: float
    imbalance: float
    tokens_per_rank: tuple[int, ...]


def epoch_steps(epoch: EpochPlan, spec: ShardSpec) -> Steps:
    """Return the steps of an epoch for all ranks, without the finished microbatches."""
    # Replay what earlier numbers of ranks have run, in order, and remove it.
    left = np.arange(epoch.num_microbatches)
    for segment in spec.done_in(epoch.epoch):
        steps = _arrange(epoch, left, segment.world_size, spec)
        run = steps.batches[: segment.steps]
        left = np.setdiff1d(left, run[(run != _ABSENT) & ~steps.padding[: segment.steps]])
    return _arrange(epoch, left, spec.world_size, spec)


def shard_epoch(epoch: EpochPlan, spec: ShardSpec) -> EpochPlan:
    """Return the part of an epoch that one rank runs."""
    steps = epoch_steps(epoch, spec)
    mine = steps.batches[:, spec.rank]
    present = mine != _ABSENT
    loss = np.where(steps.padding | (steps.batches == _ABSENT), 0, epoch.loss_tokens[steps.batches])
    return epoch.take(
        mine[present],
        padding=steps.padding[present, spec.rank],
        step_loss_tokens=loss.sum(axis=1, dtype=np.int64)[present],
    )


def report_epoch(epoch: EpochPlan, spec: ShardSpec) -> ShardReport:
    """Return how evenly an epoch is distributed over the ranks."""
    steps = epoch_steps(epoch, spec)
    present = steps.batches != _ABSENT
    costs = np.where(present, epoch.costs(linear=spec.linear, quadratic=spec.quadratic)[steps.batches], 0.0)
    buckets = np.where(present, epoch.bucket[steps.batches], epoch.bucket[steps.batches[:, :1]])
    tokens = np.where(present & ~steps.padding, epoch.tokens[steps.batches], 0)
    means = costs.mean(axis=1)
    return ShardReport(
        world_size=spec.world_size,
        steps=len(steps.batches),
        num_microbatches=epoch.num_microbatches,
        num_padding=int(steps.padding.sum()),
        num_dropped=len(steps.dropped),
        num_wrapped=steps.wrapped,
        same_bucket=float((buckets == buckets[:, :1]).all(axis=1).mean()) if len(means) else 1.0,
        imbalance=float((costs.max(axis=1) / means - 1).mean()) if len(means) else 0.0,
        tokens_per_rank=tuple(tokens.sum(axis=0).tolist()),
    )


def _arrange(epoch: EpochPlan, left: NDArray[np.int64], world_size: int, spec: ShardSpec) -> Steps:
    if not spec.equal_steps or world_size == 1:
        batches = np.full((-(-len(left) // world_size), world_size), _ABSENT, np.int64)
        batches.reshape(-1)[: len(left)] = left
        return Steps(batches, np.zeros(batches.shape, bool), left[:0])
    steps = _balanced(epoch, left, world_size, spec)
    # Shuffle the steps, and the ranks within each step, so that no rank always has the largest microbatch.
    count = len(steps.batches)
    by_step = permutation(count, epoch.seed, world_size, 0)
    ranks = permutation(count * world_size, epoch.seed, world_size, 1).reshape(count, world_size).argsort(axis=1)
    return steps._replace(
        batches=np.take_along_axis(steps.batches[by_step], ranks, axis=1),
        padding=np.take_along_axis(steps.padding[by_step], ranks, axis=1),
    )


def _balanced(epoch: EpochPlan, left: NDArray[np.int64], world_size: int, spec: ShardSpec) -> Steps:
    """Return steps of microbatches that are neighbors by cost within their bucket."""
    costs = epoch.costs(linear=spec.linear, quadratic=spec.quadratic)[left]
    by_cost = left[np.lexsort((costs, epoch.bucket[left]))]
    buckets = epoch.bucket[by_cost]
    limits = np.flatnonzero(np.diff(buckets, prepend=-1, append=np.iinfo(np.int32).max))
    whole, filled, padding, spare = [], [], [], []
    wrapped = 0
    # Full steps of each bucket first; what is left of it becomes one filled step, or is pooled across buckets.
    for begin, end in zip(limits[:-1].tolist(), limits[1:].tolist(), strict=True):
        split = end - (end - begin) % world_size
        whole.append(by_cost[begin:split].reshape(-1, world_size))
        rest = by_cost[split:end]
        if len(rest) == 0:
            continue
        if spec.uneven is UnevenPolicy.DROP:
            spare.append(rest)
            continue
        missing = world_size - len(rest)
        # Fill the step with the bucket's last microbatches, whose cost is nearest, repeated as needed.
        repeats = np.resize(by_cost[max(begin, end - world_size) : end][::-1], missing)
        filled.append(np.concatenate([rest, repeats]))
        # Policy "wrap" runs none of them more than twice; a bucket with too few gets fillers as well.
        twice = min(missing, end - begin) if spec.uneven is UnevenPolicy.WRAP else 0
        padding.append(np.arange(world_size) >= len(rest) + twice)
        wrapped += twice
    # Policy "drop": pooled rests form steps across buckets; fewer than W of them are dropped.
    pooled = np.concatenate(spare) if spare else left[:0]
    keep = len(pooled) // world_size * world_size
    rows = [*whole, pooled[:keep].reshape(-1, world_size), *(row[None] for row in filled)]
    batches = np.concatenate(rows) if rows else np.empty((0, world_size), np.int64)
    # The filled steps come last, so their fillers are marked there.
    marks = np.zeros(batches.shape, bool)
    if padding:
        marks[-len(padding) :] = np.stack(padding)
    return Steps(batches, marks, pooled[keep:], wrapped)
