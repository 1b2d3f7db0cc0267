"""Buckets, settings, metrics, and how batches are filled.

Offers BucketSpec, BatchSpec, BatchingConfig, BatchMetrics, OverlongPolicy and the sampler made of them, and to the
other folders `filling`: shuffle, sort within windows, cut at the budget. Its modules import only those directly under
`batching`.
"""

from query_mutator.batching.core.buckets import BatchSpec, BucketId, BucketSpec, BucketStats
from query_mutator.batching.core.config import BatchingConfig, BatchingMode, PadPolicy
from query_mutator.batching.core.metrics import BatchMetrics, BatchShapeHistogram
from query_mutator.batching.core.overlong import OverlongPolicy
from query_mutator.batching.planning.sampler import TokenBudgetBatchSampler

__all__ = [
    "BatchMetrics", "BatchShapeHistogram", "BatchSpec", "BatchingConfig", "BatchingMode", "BucketId", "BucketSpec",
    "BucketStats", "OverlongPolicy", "PadPolicy", "TokenBudgetBatchSampler",
]  # fmt: skip
