"""Buckets, the token-budget sampler, and how batches are filled.

Offers BucketSpec, BatchSpec, TokenBudgetBatchSampler, BatchMetrics and OverlongPolicy, and to the other folders
`filling`: shuffle, sort within windows, cut at the budget. Imports only the modules directly under `batching`.
"""

__all__ = ["batch_spec", "buckets", "filling", "metrics", "overlong", "sampler"]
