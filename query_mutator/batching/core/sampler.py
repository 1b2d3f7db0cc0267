"""Batches filled to a token budget, straight from lengths, without a stored plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from query_mutator.batching.core.buckets import (
    BatchSpec,
    BucketId,
    BucketSpec,
    BucketStats,
    OverlongPolicy,
    OverlongReport,
)
from query_mutator.batching.core.metrics import BatchMetrics, BatchShapeHistogram
from query_mutator.batching.lengths import LengthSource, as_lengths
from query_mutator.batching.planning.batch_plan import EpochPlan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.predictability import BatchingConfig
from query_mutator.batching.records import settings_errors
from query_mutator.batching.sync import to_async_iterator
from query_mutator.errors import UsageError


class TokenBudgetBatchSampler:
    """Form the batches of each epoch so that rows times padded length never exceed `token_budget`.

    Samples are shuffled, sorted by length within windows, cut at the budget, and the batches shuffled; with
    `pad_to_bucket` every batch has the padded length of its bucket.
    """

    def __init__(
        self,
        lengths: LengthSource,
        bucket_spec: BucketSpec,
        token_budget: int,
        seed: int = 42,
        drop_last: bool = False,
        *,
        overlong: OverlongPolicy | str = OverlongPolicy.ERROR,
        pad_to_bucket: bool = False,
        window: int = 4096,
        pad_multiple: int = 8,
    ) -> None:
        self.bucket_spec = bucket_spec
        self.token_budget = token_budget
        self.seed = seed
        with settings_errors():
            self._config = (BatchingConfig.predictable if pad_to_bucket else BatchingConfig.throughput)(
                token_budget=token_budget,
                bucket_edges=bucket_spec.edges,
                overflow_max=bucket_spec.overflow_max,
                seed=seed,
                drop_last=drop_last,
                overlong=OverlongPolicy(overlong),
                window=window,
                pad_multiple=pad_multiple,
            )
        self._table = as_lengths(lengths)
        self._long_enough = np.flatnonzero(self._table.lengths >= bucket_spec.min_length)
        all_fit = len(self._long_enough) == len(self._table)
        self._fitting = self._table if all_fit else self._table.take(self._long_enough)
        self._builder = BatchPlanBuilder(self._fitting, self._config)
        self._cache: tuple[tuple[int, bool], EpochPlan] | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self._builder.kept_lengths)

    @property
    def num_skipped(self) -> int:
        """Number of samples left out: too long under policy "drop", or below the shortest length."""
        return self.overlong.num_dropped + len(self._table) - len(self._long_enough)

    @property
    def overlong(self) -> OverlongReport:
        """Counts of over-long samples and how they were handled."""
        return self._builder.overlong

    def bucket_sizes(self) -> dict[BucketId, int]:
        """Return the number of samples in every bucket."""
        ids = self.bucket_spec.bucket_ids(self._builder.kept_lengths)
        return dict(enumerate(np.bincount(ids, minlength=self.bucket_spec.num_buckets).tolist()))

    def get_bucket_distribution(self) -> dict[BucketId, float]:
        """Return the fraction of samples in every bucket."""
        return {bucket: size / max(self.num_samples, 1) for bucket, size in self.bucket_sizes().items()}

    def iter_epoch_sync(self, epoch: int = 0, interleave_buckets: bool = True) -> Iterator[BatchSpec]:
        """Yield the batches of an epoch, buckets mixed at random or, without `interleave_buckets`, shortest first."""
        for batch in self._plan(epoch, interleave_buckets):
            yield BatchSpec(
                sample_ids=batch.samples,
                bucket_id=batch.bucket_id,
                max_length=batch.max_len,
                token_count=batch.total_tokens,
            )

    iter_epoch = to_async_iterator(iter_epoch_sync)

    def estimate_batches_per_epoch(self) -> int:
        """Return the number of batches in the first epoch; it differs a little between epochs."""
        return len(self)

    def compute_metrics(
        self, loss_tokens_per_sample: Mapping[str, int] | None = None, *, epoch: int = 0
    ) -> BatchMetrics:
        """Return padding, fill and bucket figures of an epoch with its actual padding.

        Without `loss_tokens_per_sample` every token but the first of each sample has a loss.
        """
        plan = self._plan(epoch)
        loss = plan.total_tokens - plan.total_samples
        if loss_tokens_per_sample is not None:
            loss = sum(loss_tokens_per_sample[name] for name in plan.ids.take(plan.order))
        # bucket -> which batches belong to it
        buckets = {int(bucket): plan.bucket == bucket for bucket in np.unique(plan.bucket)}
        stats = {
            bucket: BucketStats(
                bucket_id=bucket,
                bucket_max_length=self.bucket_spec.get_bucket_max_length(bucket),
                sample_count=int(plan.sizes[here].sum()),
                total_tokens=int(plan.tokens[here].sum()),
                padded_tokens=int(plan.padded_tokens[here].sum()),
            )
            for bucket, here in buckets.items()
        }
        return BatchMetrics(
            total_tokens=plan.total_tokens,
            padded_tokens=int(plan.padded_tokens.sum()),
            loss_tokens=loss,
            total_samples=plan.total_samples,
            skipped_samples=self.num_skipped,
            total_batches=len(plan),
            bucket_stats=stats,
            shape_histogram=BatchShapeHistogram(
                bucket_counts={bucket: int(np.count_nonzero(here)) for bucket, here in buckets.items()},
                bucket_samples={bucket: one.sample_count for bucket, one in stats.items()},
            ),
        )

    def __len__(self) -> int:
        return len(self._plan(0))

    def _plan(self, epoch: int, interleave: bool = True) -> EpochPlan:
        key = (epoch, interleave)
        if self._cache is None or self._cache[0] != key:
            if epoch < 0:
                raise UsageError(f"epoch={epoch} must not be negative")
            builder = self._builder
            if not interleave:
                builder = BatchPlanBuilder(self._fitting, self._config.changed(interleave_buckets=False))
            self._cache = (key, builder.build_epoch(epoch))
        return self._cache[1]
