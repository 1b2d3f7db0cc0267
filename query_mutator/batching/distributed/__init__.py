"""Plans on several ranks: which rank this is, its part of a plan, and how to resume on the same or other ranks."""

from query_mutator.batching.distributed.config import DistributedConfig, get_rank, get_world_size, is_main_process
from query_mutator.batching.distributed.sharding import (
    CheckpointPosition,
    compute_shard_stats,
    interleave_microbatches,
    iter_from_checkpoint,
    load_checkpoint_position,
    resume_shard,
    save_checkpoint_position,
    shard_batch_plan,
)

__all__ = [
    "CheckpointPosition", "DistributedConfig", "compute_shard_stats", "get_rank", "get_world_size",
    "interleave_microbatches", "is_main_process", "iter_from_checkpoint", "load_checkpoint_position", "resume_shard",
    "save_checkpoint_position", "shard_batch_plan",
]  # fmt: skip
