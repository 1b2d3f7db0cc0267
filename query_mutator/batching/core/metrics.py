"""Cost of batches: padding, fill and throughput, per bucket and in total."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field

from query_mutator.batching.core.buckets import BucketId, BucketStats
from query_mutator.batching.records import Ratio, Record


class BatchShapeHistogram(Record):
    """Number of batches, and of samples in them, per bucket."""

    bucket_counts: dict[BucketId, int] = Field(default_factory=dict)
    bucket_samples: dict[BucketId, int] = Field(default_factory=dict)

    def record_batch(self, bucket_id: BucketId, batch_size: int) -> Self:
        """Return the histogram with one more batch."""
        counts = {**self.bucket_counts, bucket_id: self.bucket_counts.get(bucket_id, 0) + 1}
        samples = {**self.bucket_samples, bucket_id: self.bucket_samples.get(bucket_id, 0) + batch_size}
        return self.model_copy(update={"bucket_counts": counts, "bucket_samples": samples})

    @property
    def total_batches(self) -> int:
        """Number of batches."""
        return sum(self.bucket_counts.values())

    @property
    def total_samples(self) -> int:
        """Number of samples."""
        return sum(self.bucket_samples.values())

    def bucket_fraction(self, bucket_id: BucketId) -> float:
        """Return the fraction of samples in a bucket, 0 when empty."""
        return self.bucket_samples.get(bucket_id, 0) / self.total_samples if self.total_samples else 0.0


class BatchMetrics(Record):
    """Counts of samples, tokens, batches and time; every ratio is 0 when there is nothing to divide by."""

    total_tokens: int = Field(default=0, ge=0)
    padded_tokens: int = Field(default=0, ge=0)
    loss_tokens: int = Field(default=0, ge=0)
    total_samples: int = Field(default=0, ge=0)
    skipped_samples: int = Field(default=0, ge=0)
    total_batches: int = Field(default=0, ge=0)
    total_time_seconds: float = Field(default=0.0, ge=0.0)
    bucket_stats: dict[BucketId, BucketStats] = Field(default_factory=dict)
    shape_histogram: BatchShapeHistogram = Field(default_factory=BatchShapeHistogram)

    padding_waste: ClassVar = Ratio("padding_tokens", "padded_tokens")
    efficiency: ClassVar = Ratio("total_tokens", "padded_tokens")
    loss_efficiency: ClassVar = Ratio("loss_tokens", "padded_tokens")
    avg_batch_size: ClassVar = Ratio("total_samples", "total_batches")
    skip_rate: ClassVar = Ratio("skipped_samples", "seen_samples")
    tokens_per_second: ClassVar = Ratio("total_tokens", "total_time_seconds")
    effective_tokens_per_second: ClassVar = Ratio("loss_tokens", "total_time_seconds")
    samples_per_second: ClassVar = Ratio("total_samples", "total_time_seconds")

    @property
    def padding_tokens(self) -> int:
        """Tokens that are padding."""
        return self.padded_tokens - self.total_tokens

    @property
    def seen_samples(self) -> int:
        """Samples in batches and skipped ones."""
        return self.total_samples + self.skipped_samples

    def record_batch(self, bucket_id: BucketId, batch_size: int) -> Self:
        """Return the counts with one more batch, whose samples `record_sample` counts."""
        shapes = self.shape_histogram.record_batch(bucket_id, batch_size)
        return self.plus(total_batches=1).model_copy(update={"shape_histogram": shapes})

    def record_sample(self, bucket_id: BucketId, length: int, loss_tokens: int, bucket_max_length: int) -> Self:
        """Return the counts with one more sample, padded to its bucket's longest length."""
        empty = BucketStats(bucket_id=bucket_id, bucket_max_length=bucket_max_length)
        bucket = self.bucket_stats.get(bucket_id, empty).add_sample(length)
        counts = self.plus(
            total_tokens=length, padded_tokens=bucket_max_length, loss_tokens=loss_tokens, total_samples=1
        )
        return counts.model_copy(update={"bucket_stats": {**self.bucket_stats, bucket_id: bucket}})

    def record_skip(self, count: int = 1) -> Self:
        """Return the counts with this many more skipped samples."""
        return self.plus(skipped_samples=count)

    def record_time(self, seconds: float) -> Self:
        """Return the counts with more time spent."""
        return self.plus(total_time_seconds=seconds)

    def summary(self) -> dict[str, float]:
        """Return all figures by name, as numbers."""
        names = ("total_samples", "skipped_samples", "total_batches", "total_tokens", "padded_tokens", "loss_tokens")
        rates = ("padding_waste", "efficiency", "loss_efficiency", "avg_batch_size", "skip_rate")
        speeds = ("tokens_per_second", "effective_tokens_per_second", "samples_per_second")
        return {name: getattr(self, name) for name in (*names, *rates, *speeds)}

    def bucket_summary(self) -> list[dict[str, float]]:
        """Return the figures of every bucket, as numbers, shortest bucket first."""
        return [
            {
                "bucket_id": bucket_id,
                "max_length": stats.bucket_max_length,
                "samples": stats.sample_count,
                "efficiency": stats.efficiency,
                "avg_length": stats.avg_length,
            }
            for bucket_id, stats in sorted(self.bucket_stats.items())
        ]
