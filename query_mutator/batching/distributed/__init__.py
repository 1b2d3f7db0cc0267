"""Plans on several ranks: which rank runs which microbatch, and how to resume on the same or other ranks.

Offers DistributedConfig (rank and world size from the environment), shard_batch_plan, shard statistics, and
CheckpointPosition. Imports `planning`.
"""

__all__ = ["checkpoint", "config", "sharding"]
