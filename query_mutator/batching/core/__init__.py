"""Buckets, the token-budget sampler, and what batches cost."""

from query_mutator.batching.core.batch_spec import BatchSpec
from query_mutator.batching.core.buckets import BucketId, BucketSpec, BucketStats
from query_mutator.batching.core.metrics import BatchMetrics, BatchShapeHistogram
from query_mutator.batching.core.overlong import OverlongPolicy, OverlongReport
from query_mutator.batching.core.sampler import TokenBudgetBatchSampler

__all__ = [
    "BatchMetrics",
    "BatchShapeHistogram",
    "BatchSpec",
    "BucketId",
    "BucketSpec",
    "BucketStats",
    "OverlongPolicy",
    "OverlongReport",
    "TokenBudgetBatchSampler",
]
