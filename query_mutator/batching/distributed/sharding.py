"""Each rank's part of a plan, and how evenly the parts are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Unpack

from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.planning.sharding import ShardReport, ShardSettings, ShardSpec, report_epoch
from query_mutator.batching.records import Record


def shard_batch_plan(
    plan: BatchPlan, config: DistributedConfig | None = None, **settings: Unpack[ShardSettings]
) -> BatchPlan:
    """Return the part of the plan for this process (or for `config`); see `BatchPlan.shard`."""
    config = config or DistributedConfig.get_global()
    return plan.shard(config.rank, config.world_size, **settings)


def interleave_microbatches(microbatches: Sequence[MicrobatchSpec]) -> list[MicrobatchSpec]:
    """Return the microbatches round-robin by bucket, shortest bucket first."""
    buckets: dict[int, list[MicrobatchSpec]] = {}
    for microbatch in microbatches:
        buckets.setdefault(microbatch.bucket_id, []).append(microbatch)
    rounds = zip_longest(*(buckets[bucket] for bucket in sorted(buckets)))
    return [microbatch for one in rounds for microbatch in one if microbatch is not None]


class ShardStats(Record):
    """Totals of one rank over all epochs, also by name, as `stats["num_batches"]`.

    Fillers count as microbatches, not as samples or tokens.
    """

    rank: int
    num_microbatches: int
    num_padding: int
    total_samples: int
    total_tokens: int
    total_loss_tokens: int
    padded_tokens: int

    @property
    def num_batches(self) -> int:
        """Number of microbatches."""
        return self.num_microbatches

    def __getitem__(self, name: str) -> int:
        if name != "num_batches" and name not in type(self).model_fields:
            raise KeyError(name)
        value: int = getattr(self, name)
        return value


def compute_shard_stats(plan: BatchPlan, world_size: int, **settings: Unpack[ShardSettings]) -> dict[int, ShardStats]:
    """Return the totals of every rank."""
    stats = {}
    for rank in range(world_size):
        epochs = list(plan.shard(rank, world_size, **settings).epochs.values())
        stats[rank] = ShardStats(
            rank=rank,
            num_microbatches=sum(epoch.num_microbatches for epoch in epochs),
            num_padding=sum(0 if epoch.padding is None else int(epoch.padding.sum()) for epoch in epochs),
            total_samples=sum(epoch.total_samples for epoch in epochs),
            total_tokens=sum(epoch.total_tokens for epoch in epochs),
            total_loss_tokens=sum(epoch.total_loss_tokens for epoch in epochs),
            padded_tokens=sum(int(epoch.padded_tokens.sum()) for epoch in epochs),
        )
    return stats


def report_shards(plan: BatchPlan, world_size: int, **settings: Unpack[ShardSettings]) -> dict[int, ShardReport]:
    """Return how evenly each epoch is distributed over `world_size` ranks, by default with equal steps."""
    settings.setdefault("equal_steps", True)
    spec = ShardSpec.of(0, world_size, **settings)
    return {number: report_epoch(epoch, spec) for number, epoch in plan.epochs.items()}
