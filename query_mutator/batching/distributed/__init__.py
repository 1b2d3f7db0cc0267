"""Plans on several ranks: which rank runs which microbatch, and how to resume on the same or other ranks.

Offers DistributedConfig (rank and world size from the environment), shard_batch_plan, shard statistics, and
CheckpointPosition. Imports `planning`.
"""

from query_mutator.batching.distributed.checkpoint import (
    CheckpointPosition,
    iter_from_checkpoint,
    load_checkpoint_position,
    resume_shard,
    save_checkpoint_position,
)
from query_mutator.batching.distributed.config import DistributedConfig, get_rank, get_world_size, is_main_process
from query_mutator.batching.distributed.sharding import (
    compute_shard_stats,
    interleave_microbatches,
    report_shards,
    shard_batch_plan,
)

__all__ = [
    "CheckpointPosition", "DistributedConfig", "compute_shard_stats", "get_rank", "get_world_size",
    "interleave_microbatches", "is_main_process", "iter_from_checkpoint", "load_checkpoint_position", "report_shards",
    "resume_shard", "save_checkpoint_position", "shard_batch_plan",
]  # fmt: skip
