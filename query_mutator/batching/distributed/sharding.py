"""Each rank's part of a plan, and the position of training in it, to resume from on the same or other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.files import BatchFileError, read_checked_json
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.epoch_plan import MicrobatchSpec
from query_mutator.batching.planning.sharding import ShardSpec
from query_mutator.batching.records import Record
from query_mutator.errors import CheckpointError
from query_mutator.files import write_checked_json


def shard_batch_plan(
    plan: BatchPlan, config: DistributedConfig | None = None, *, equal_steps: bool = False
) -> BatchPlan:
    """Return the part of the plan for this process (or for `config`); see `BatchPlan.shard`."""
    config = config or DistributedConfig.get_global()
    return plan.shard(config.rank, config.world_size, equal_steps=equal_steps)


def interleave_microbatches(microbatches: Sequence[MicrobatchSpec]) -> list[MicrobatchSpec]:
    """Return the microbatches round-robin by bucket, shortest bucket first."""
    buckets: dict[int, list[MicrobatchSpec]] = {}
    for microbatch in microbatches:
        buckets.setdefault(microbatch.bucket_id, []).append(microbatch)
    rounds = zip_longest(*(buckets[bucket] for bucket in sorted(buckets)))
    return [microbatch for one in rounds for microbatch in one if microbatch is not None]


def compute_shard_stats(plan: BatchPlan, world_size: int, *, equal_steps: bool = False) -> dict[int, dict[str, int]]:
    """Return the totals of every rank over all epochs; fillers count as batches, not as samples or tokens."""
    stats = {}
    for rank in range(world_size):
        epochs = list(plan.shard(rank, world_size, equal_steps=equal_steps).epochs.values())
        stats[rank] = {
            "num_batches": sum(epoch.num_microbatches for epoch in epochs),
            "num_padding": sum(0 if epoch.padding is None else int(epoch.padding.sum()) for epoch in epochs),
            "total_samples": sum(epoch.total_samples for epoch in epochs),
            "total_tokens": sum(epoch.total_tokens for epoch in epochs),
        }
    return stats


class CheckpointPosition(Record):
    """The next microbatch to run: its epoch and its position in the rank's part of the epoch, which `shard` describes.

    `plan_fingerprint` is that of the whole plan.
    """

    epoch: int = Field(ge=0)
    microbatch_idx: int = Field(ge=0)
    global_step: int = Field(default=0, ge=0)
    plan_fingerprint: str | None = None
    shard: ShardSpec = ShardSpec()

    @classmethod
    def at(cls, plan: BatchPlan, epoch: int, microbatch_idx: int, global_step: int = 0) -> Self:
        """Return the position in a plan or shard, with everything that a later resume compares."""
        shard = plan.meta.shard or ShardSpec()
        return cls(
            epoch=epoch,
            microbatch_idx=microbatch_idx,
            global_step=global_step,
            plan_fingerprint=plan.meta.parent_fingerprint or plan.fingerprint,
            shard=shard.changed(first_epoch=epoch, done=shard.done_in(epoch)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the position of `to_dict`; raise CheckpointError for anything else."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise CheckpointError(f"not a position in a plan: {error.errors()[0]['msg']}") from error

    def save(self, path: str | Path) -> None:
        """Write the position as JSON with a checksum."""
        write_checked_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the position written by `save`; raise BatchFileError for a broken file."""
        body = read_checked_json(path)
        try:
            return cls.from_dict(body)
        except CheckpointError as error:
            raise BatchFileError(f"{path}: {error}") from error


save_checkpoint_position = CheckpointPosition.save
load_checkpoint_position = CheckpointPosition.load


def resume_shard(
    plan: BatchPlan, position: CheckpointPosition, config: DistributedConfig | None = None
) -> tuple[BatchPlan, int]:
    """Return this rank's part of the WHOLE plan from a position on, and the microbatch in it to begin with.

    On the same number of ranks every rank resumes where it stopped. On another number, the microbatches of the epoch
    that no rank has run are distributed again, so that every microbatch runs once. Raises CheckpointError for a
    position in another plan.
    """
    config = config or DistributedConfig(rank=position.shard.rank, world_size=position.shard.world_size)
    if position.plan_fingerprint not in (None, plan.fingerprint):
        raise CheckpointError(
            f"the checkpoint belongs to plan {str(position.plan_fingerprint)[:16]}, this is {plan.fingerprint[:16]}; "
            "load the plan it was saved with"
        )
    before = position.shard.changed(first_epoch=position.epoch)
    steps = plan.shard_by(before).get_epoch(position.epoch).num_microbatches
    if position.microbatch_idx > steps:
        raise CheckpointError(f"the checkpoint is at microbatch {position.microbatch_idx}, its epoch has {steps}")
    # Another number of ranks: record what the old ranks have done and start at the beginning of the rest.
    done, begin = before.done, position.microbatch_idx
    if config.world_size != before.world_size:
        done, begin = (*done, (before.world_size, begin)), 0
    here = {"rank": config.rank, "world_size": config.world_size, "done": done}
    return plan.shard_by(before.changed(**here)), begin


def iter_from_checkpoint(
    plan: BatchPlan, position: CheckpointPosition | None = None
) -> Iterator[tuple[int, int, MicrobatchSpec]]:
    """Yield (epoch, position, microbatch) from a position in this plan or shard, or from the start.

    Raises CheckpointError for a position in another plan, or of another part of it.
    """
    if position is None:
        return plan.iter_from(next(iter(plan.epochs), 0), 0)
    here = CheckpointPosition.at(plan, position.epoch, position.microbatch_idx)
    if position.plan_fingerprint is not None:
        for name in ("plan_fingerprint", "shard"):
            theirs, ours = getattr(position, name), getattr(here, name)
            if theirs != ours:
                raise CheckpointError(
                    f"the checkpoint has {name}={theirs}, this plan {ours}; resume on other ranks with resume_shard"
                )
    return plan.iter_from(position.epoch, position.microbatch_idx)
