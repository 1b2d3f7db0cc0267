"""Rank of this process, read from the environment variables of its launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from query_mutator.batching.records import Record
from query_mutator.errors import UsageError

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
