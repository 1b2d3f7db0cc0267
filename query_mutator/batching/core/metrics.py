"""What batches cost: padding, fill, throughput, per bucket and in all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import Field

from query_mutator.batching.core.batch_spec import BatchSpec
from query_mutator.batching.core.buckets import BucketId, BucketStats
from query_mutator.batching.records import Record


class BatchShapeHistogram(Record):
    """How many batches, and samples in them, each bucket has."""

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
        """Return the fraction of batches in a bucket, 0 when empty."""
        return self.bucket_counts.get(bucket_id, 0) / self.total_batches if self.total_batches else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class BatchMetrics(Record):
    """Counts of samples, tokens, batches and time; every derived figure is 0 when there is nothing to divide by."""

    total_tokens: int = Field(default=0, ge=0)
    padded_tokens: int = Field(default=0, ge=0)
    loss_tokens: int = Field(default=0, ge=0)
    total_samples: int = Field(default=0, ge=0)
    skipped_samples: int = Field(default=0, ge=0)
    total_batches: int = Field(default=0, ge=0)
    total_time_seconds: float = Field(default=0.0, ge=0.0)
    bucket_stats: dict[BucketId, BucketStats] = Field(default_factory=dict)
    shape_histogram: BatchShapeHistogram = Field(default_factory=BatchShapeHistogram)

    @classmethod
    def from_batches(cls, batches: Iterable[BatchSpec], *, skipped: int = 0, loss_tokens: int = 0) -> Self:
        """Return the counts of these batches, padding as they are really padded."""
        metrics = cls(skipped_samples=skipped, loss_tokens=loss_tokens)
        for batch in batches:
            metrics = metrics.record_batch(batch)
        return metrics

    def record_batch(self, batch: BatchSpec, *, loss_tokens: int = 0) -> Self:
        """Return the counts with one more batch."""
        bucket = self.bucket_stats.get(batch.bucket_id)
        if bucket is None or bucket.bucket_max_length < batch.max_length:
            fields = {"bucket_id": batch.bucket_id, "bucket_max_length": batch.max_length}
            bucket = BucketStats(**fields) if bucket is None else bucket.model_copy(update=fields)
        bucket = bucket.add(samples=batch.batch_size, tokens=batch.token_count, padded_tokens=batch.padded_token_count)
        return self.model_copy(
            update={
                "total_tokens": self.total_tokens + batch.token_count,
                "padded_tokens": self.padded_tokens + batch.padded_token_count,
                "loss_tokens": self.loss_tokens + loss_tokens,
                "total_samples": self.total_samples + batch.batch_size,
                "total_batches": self.total_batches + 1,
                "bucket_stats": {**self.bucket_stats, batch.bucket_id: bucket},
                "shape_histogram": self.shape_histogram.record_batch(batch.bucket_id, batch.batch_size),
            }
        )

    def record_sample(self, bucket_id: BucketId, length: int, loss_tokens: int, bucket_max_length: int) -> Self:
        """Return the counts with one more sample, padded to its bucket's longest length."""
        bucket = self.bucket_stats.get(bucket_id) or BucketStats(
            bucket_id=bucket_id, bucket_max_length=bucket_max_length
        )
        return self.model_copy(
            update={
                "total_tokens": self.total_tokens + length,
                "padded_tokens": self.padded_tokens + bucket_max_length,
                "loss_tokens": self.loss_tokens + loss_tokens,
                "total_samples": self.total_samples + 1,
                "bucket_stats": {**self.bucket_stats, bucket_id: bucket.add_sample(length)},
            }
        )

    def record_skip(self, count: int = 1) -> Self:
        """Return the counts with this many more skipped samples."""
        return self.model_copy(update={"skipped_samples": self.skipped_samples + count})

    def record_time(self, seconds: float) -> Self:
        """Return the counts with more time spent."""
        return self.model_copy(update={"total_time_seconds": self.total_time_seconds + seconds})

    @property
    def padding_tokens(self) -> int:
        """Tokens that are padding."""
        return self.padded_tokens - self.total_tokens

    @property
    def padding_waste(self) -> float:
        """Padding as a fraction of all tokens."""
        return _ratio(self.padding_tokens, self.padded_tokens)

    @property
    def efficiency(self) -> float:
        """Real tokens as a fraction of all tokens."""
        return _ratio(self.total_tokens, self.padded_tokens)

    @property
    def loss_efficiency(self) -> float:
        """Tokens with a loss as a fraction of all tokens."""
        return _ratio(self.loss_tokens, self.padded_tokens)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second."""
        return _ratio(self.total_tokens, self.total_time_seconds)

    @property
    def effective_tokens_per_second(self) -> float:
        """Tokens with a loss per second."""
        return _ratio(self.loss_tokens, self.total_time_seconds)

    @property
    def samples_per_second(self) -> float:
        """Samples per second."""
        return _ratio(self.total_samples, self.total_time_seconds)

    @property
    def avg_batch_size(self) -> float:
        """Samples per batch."""
        return _ratio(self.total_samples, self.total_batches)

    @property
    def skip_rate(self) -> float:
        """Skipped samples as a fraction of all samples."""
        return _ratio(self.skipped_samples, self.total_samples + self.skipped_samples)

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
