"""Where training stands in a plan, so that it goes on there: on as many ranks as before, or on others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from query_mutator.batching.distributed.config import DistributedConfig
from query_mutator.batching.files import BatchFileError, read_checked_json, write_checked_json
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.epoch_plan import MicrobatchSpec
from query_mutator.batching.planning.sharding import Segment, ShardSpec, UnevenPolicy
from query_mutator.batching.records import Record
from query_mutator.errors import CheckpointError


class CheckpointPosition(Record):
    """The next microbatch: its epoch and its place in the rank's part of it.

    `plan_fingerprint` is the whole plan's. `done` lists what ranks of other numbers did of this epoch before.
    """

    epoch: int = Field(ge=0)
    microbatch_idx: int = Field(ge=0)
    global_step: int = Field(default=0, ge=0)
    plan_fingerprint: str | None = None
    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    equal_steps: bool = False
    uneven: UnevenPolicy = UnevenPolicy.PAD
    done: tuple[Segment, ...] = ()

    @classmethod
    def at(cls, plan: BatchPlan, epoch: int, microbatch_idx: int, global_step: int = 0) -> Self:
        """Return the position in a plan or shard, with everything a later resume compares."""
        shard = plan.meta.shard or ShardSpec(rank=0, world_size=1)
        return cls(
            epoch=epoch,
            microbatch_idx=microbatch_idx,
            global_step=global_step,
            plan_fingerprint=plan.meta.parent_fingerprint or plan.fingerprint,
            rank=shard.rank,
            world_size=shard.world_size,
            equal_steps=shard.equal_steps,
            uneven=shard.uneven,
            done=shard.done_in(epoch),
        )

    @property
    def shard_spec(self) -> ShardSpec:
        """The part of the plan that the position stands in."""
        return ShardSpec(
            rank=self.rank,
            world_size=self.world_size,
            equal_steps=self.equal_steps,
            uneven=self.uneven,
            first_epoch=self.epoch,
            done=self.done,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the position of `to_dict`; what is no position is a CheckpointError."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise CheckpointError(f"no position in a plan: {error.errors()[0]['msg']}") from error

    def save(self, path: str | Path) -> None:
        """Write the position as JSON with a checksum."""
        write_checked_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the position of `save`; a broken file is a BatchFileError that names it."""
        body = read_checked_json(path)
        try:
            return cls.from_dict(body)
        except CheckpointError as error:
            raise BatchFileError(f"{path}: {error}") from error


def save_checkpoint_position(position: CheckpointPosition, path: str | Path) -> None:
    """Write a position as JSON with a checksum."""
    position.save(path)


def load_checkpoint_position(path: str | Path) -> CheckpointPosition:
    """Read the position of `save_checkpoint_position`."""
    return CheckpointPosition.load(path)


def resume_shard(
    plan: BatchPlan, position: CheckpointPosition, config: DistributedConfig | None = None
) -> tuple[BatchPlan, int]:
    """Return this rank's part of the WHOLE plan from a position on, and the place in it to begin at.

    On as many ranks as before every rank goes on as if never stopped. On another number of ranks, what all ranks
    together had not done of the epoch is dealt out anew, so that every microbatch still runs once. A position in
    another plan is a CheckpointError.
    """
    config = config or DistributedConfig(rank=position.rank, world_size=position.world_size)
    if position.plan_fingerprint not in (None, plan.fingerprint):
        raise CheckpointError(
            f"the checkpoint stands in plan {str(position.plan_fingerprint)[:16]}, this is {plan.fingerprint[:16]}"
        )
    stood = position.shard_spec
    steps = plan.shard_by(stood).get_epoch(position.epoch).num_microbatches
    if position.microbatch_idx > steps:
        raise CheckpointError(f"the checkpoint has done {position.microbatch_idx} of {steps} microbatches")
    done, begin = position.done, position.microbatch_idx
    if config.world_size != position.world_size:
        done, begin = (*done, Segment(world_size=position.world_size, steps=begin)), 0
    here = {"rank": config.rank, "world_size": config.world_size, "done": done}
    return plan.shard_by(stood.changed(**here)), begin


def iter_from_checkpoint(
    plan: BatchPlan, position: CheckpointPosition | None = None
) -> Iterator[tuple[int, int, MicrobatchSpec]]:
    """Yield (epoch, place, microbatch) from a position on, or from the start; `plan` is the plan or shard it stands in.

    A position in another plan, or of another rank or world size, is a CheckpointError that says so.
    """
    if position is None:
        return plan.iter_from(next(iter(plan.epochs), 0), 0)
    here = CheckpointPosition.at(plan, position.epoch, position.microbatch_idx)
    if position.plan_fingerprint is not None:
        for name in ("plan_fingerprint", "rank", "world_size", "equal_steps", "done"):
            theirs, ours = getattr(position, name), getattr(here, name)
            if theirs != ours:
                raise CheckpointError(
                    f"the checkpoint has {name}={theirs}, this plan {ours}; resume_shard resumes on other ranks"
                )
    return plan.iter_from(position.epoch, position.microbatch_idx)
