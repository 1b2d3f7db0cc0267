"""Buckets, the cost of batches, and batches straight from lengths."""

from query_mutator.batching.core.buckets import (
    BatchSpec,
    BucketId,
    BucketSpec,
    BucketStats,
    OverlongPolicy,
)
from query_mutator.batching.core.metrics import BatchMetrics, BatchShapeHistogram
from query_mutator.batching.core.sampler import TokenBudgetBatchSampler

__all__ = [
    "BatchMetrics", "BatchShapeHistogram", "BatchSpec", "BucketId", "BucketSpec", "BucketStats", "OverlongPolicy",
    "TokenBudgetBatchSampler",
]  # fmt: skip
