"""Buckets, settings, metrics, and how batches are filled.

Offers BucketSpec, BatchSpec, BatchingConfig, BatchMetrics and OverlongPolicy, and to the other folders `filling`:
shuffle, sort within windows, cut at the budget. Imports only the modules directly under `batching`.
"""

__all__ = ["buckets", "config", "filling", "metrics", "overlong"]
