"""Plans on several ranks: which rank this process is, its part of a plan, and the position of training in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError, model_validator

from query_mutator.batching.planning.batch_plan import BatchPlan, MicrobatchSpec, ShardSpec
from query_mutator.batching.records import Record
from query_mutator.errors import CheckpointError, UsageError
from query_mutator.files import read_checked_json, write_checked_json

__all__ = [
    "CheckpointPosition", "DistributedConfig", "compute_shard_stats", "get_rank", "get_world_size",
    "interleave_microbatches", "is_main_process", "iter_from_checkpoint", "load_checkpoint_position",
    "save_checkpoint_position", "shard_batch_plan",
]  # fmt: skip

# Variables of each launcher: rank, world size, local rank, local world size.
_LAUNCHERS: dict[str, tuple[str, str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "torchrun (WORLD_RANK)": ("WORLD_RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


class DistributedConfig(Record):
    """Rank of this process among `world_size`, and among those on its machine."""

    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    local_rank: int = Field(default=0, ge=0)
    local_world_size: int = Field(default=1, ge=1)

    _global: ClassVar[DistributedConfig | None] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for what in ("", "local_"):
            rank, size = getattr(self, f"{what}rank"), getattr(self, f"{what}world_size")
            if rank >= size:
                raise ValueError(f"{what}rank={rank} must be below {what}world_size={size}")
        return self

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world_size > 1

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read torchrun's variables, else those of MPI or SLURM; without any, return a single process.

        Raises UsageError for a rank without a world size and for a value that is not a number.
        """
        env = os.environ if environ is None else environ
        for launcher, (rank, size, local_rank, local_size) in _LAUNCHERS.items():
            if rank not in env:
                continue
            if size not in env:
                if launcher == "SLURM":  # the shell of a batch script, not a step started by srun
                    continue
                raise UsageError(f"{rank} is set but {size} is not; set both, or neither for a single process")
            world, here = _number(env, size), _number(env, rank)
            local = _number(env, local_rank) if local_rank in env else 0
            local_world = _number(env, local_size) if local_size in env else local + 1
            fields = {"rank": here, "world_size": world, "local_rank": local, "local_world_size": local_world}
            try:
                return cls(**fields)
            except ValueError as error:
                raise UsageError(
                    f"the environment of {launcher} is inconsistent: {fields}; correct or unset its variables"
                ) from error
        return cls()

    def set_global(self) -> None:
        """Make this what `get_global` returns in the process."""
        DistributedConfig._global = self

    @classmethod
    def get_global(cls) -> DistributedConfig:
        """Return the configuration of `set_global`, else of torch.distributed, else of the environment."""
        return DistributedConfig._global or _from_torch() or cls.from_env()


def _number(env: Mapping[str, str], name: str) -> int:
    # SLURM writes "4(x2),3" for tasks per node; use the first node's count.
    text = env[name].split("(")[0].split(",")[0]
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={env[name]!r} is not a whole number") from None


def _from_torch() -> DistributedConfig | None:
    torch = sys.modules.get("torch")  # without torch imported there is no process group
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    local = DistributedConfig.from_env()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return local.model_copy(update={"rank": rank, "world_size": size})


def get_rank() -> int:
    """Return the rank of this process."""
    return DistributedConfig.get_global().rank


def get_world_size() -> int:
    """Return the number of processes."""
    return DistributedConfig.get_global().world_size


def is_main_process() -> bool:
    """Return whether this is rank 0."""
    return DistributedConfig.get_global().is_main


# --- parts and positions ---------------------------------------------------------------------------------------------


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
        return cls(
            epoch=epoch,
            microbatch_idx=microbatch_idx,
            global_step=global_step,
            plan_fingerprint=plan.meta.parent_fingerprint or plan.fingerprint,
            shard=plan.meta.shard or ShardSpec(),
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
        """Load the position written by `save`; raise UsageError for a broken file."""
        try:
            return cls.from_dict(read_checked_json(path))
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


save_checkpoint_position = CheckpointPosition.save
load_checkpoint_position = CheckpointPosition.load


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
                    f"the checkpoint has {name}={theirs}, this plan {ours}; resume with the plan and ranks it was "
                    "saved with"
                )
    return plan.iter_from(position.epoch, position.microbatch_idx)
