"""Batches filled to a token budget, straight from lengths, without a stored plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from query_mutator.batching.core.batch_spec import BatchSpec
from query_mutator.batching.core.buckets import BucketId, BucketSpec, BucketStats
from query_mutator.batching.core.filling import Batches, FillSettings, Items, fill_batches
from query_mutator.batching.core.metrics import BatchMetrics, BatchShapeHistogram
from query_mutator.batching.core.overlong import OverlongPolicy, OverlongReport, fit_units
from query_mutator.batching.lengths import LengthSource, as_lengths, as_values
from query_mutator.batching.sync import to_async_iterator
from query_mutator.errors import UsageError


class TokenBudgetBatchSampler:
    """Forms every epoch's batches so that rows times padded length never exceed `token_budget`.

    Samples are shuffled, sorted by length within windows, cut at the budget, and the batches shuffled; with
    `pad_to_bucket` every batch has the padded length of its bucket instead. Iterating over the sampler itself yields
    lists of ids for the epoch of `set_epoch`, as torch's DataLoader wants from a batch sampler.
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
        if token_budget < 1 or window < 1 or pad_multiple < 1:
            raise UsageError(
                f"token_budget={token_budget}, window={window} and pad_multiple={pad_multiple} must be ≥ 1"
            )
        if seed < 0:
            raise UsageError(f"seed={seed} must not be negative")
        self.bucket_spec = bucket_spec
        self.token_budget = token_budget
        self.seed = seed
        limit = min(token_budget, bucket_spec.overflow_max)
        bounds = tuple(bucket_spec.upper_bounds.tolist())
        self._settings = FillSettings(
            token_budget=token_budget,
            limit=limit,
            bounds=bounds,
            bucket_pads=tuple(min(bound, limit) for bound in bounds) if pad_to_bucket else None,
            pad_multiple=pad_multiple,
            window=window,
            drop_last=drop_last,
        )
        self._table = as_lengths(lengths)
        self._units = fit_units(self._table, limit, OverlongPolicy(overlong))
        kept = np.arange(len(self._units.lengths)) if self._units.kept is None else self._units.kept
        self._kept = kept[self._units.lengths[kept] >= bucket_spec.min_length]
        self._epoch, self._next, self._resumed = 0, 0, False
        self._cache: tuple[tuple[int, bool], Batches] | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples, or pieces of split ones, in an epoch."""
        return len(self._kept)

    @property
    def num_skipped(self) -> int:
        """Number of samples left out: too long under policy "drop", or below the shortest length."""
        too_short = int(np.count_nonzero(self._table.lengths < self.bucket_spec.min_length))
        return self._units.report.num_dropped + too_short

    @property
    def overlong(self) -> OverlongReport:
        """What became of over-long samples."""
        return self._units.report

    @property
    def bucket_sizes(self) -> dict[BucketId, int]:
        """Number of samples in every bucket."""
        ids = self.bucket_spec.bucket_ids(self._units.lengths[self._kept])
        return dict(enumerate(np.bincount(ids, minlength=self.bucket_spec.num_buckets).tolist()))

    def get_bucket_distribution(self) -> dict[BucketId, float]:
        """Return the fraction of samples in every bucket."""
        return {bucket: size / max(self.num_samples, 1) for bucket, size in self.bucket_sizes.items()}

    def iter_epoch_sync(self, epoch: int = 0, interleave_buckets: bool = True) -> Iterator[BatchSpec]:
        """Yield the batches of an epoch, buckets mixed at random or, without `interleave_buckets`, shortest first."""
        batches = self._batches(epoch, interleave_buckets)
        for number in range(len(batches.max_len)):
            yield self._spec(batches, number)

    iter_epoch = to_async_iterator(iter_epoch_sync)

    def estimate_batches_per_epoch(self) -> int:
        """Return the number of batches in the current epoch (exact; it differs a little between epochs)."""
        return len(self)

    def compute_metrics(
        self, loss_tokens_per_sample: Mapping[str, int] | NDArray[Any] | None = None, *, epoch: int = 0
    ) -> BatchMetrics:
        """Return padding, fill and bucket figures of an epoch as it is really padded."""
        batches = self._batches(epoch, True)
        sizes = np.diff(batches.offsets)
        lengths = self._units.lengths[batches.order].astype(np.int64)
        loss = int((lengths - 1).sum())
        if loss_tokens_per_sample is not None:
            samples = self._units.cuts.resolve(batches.order)[0]
            loss = int(as_values(loss_tokens_per_sample, self._table, "loss_tokens_per_sample")[samples].sum())
        tokens = np.add.reduceat(lengths, batches.offsets[:-1]) if len(sizes) else sizes
        return BatchMetrics(
            total_tokens=int(lengths.sum()),
            padded_tokens=int((sizes * batches.max_len).sum()),
            loss_tokens=loss,
            total_samples=len(lengths),
            skipped_samples=self.num_skipped,
            total_batches=len(sizes),
            bucket_stats=self._bucket_stats(batches, sizes, tokens),
            shape_histogram=self._shapes(batches, sizes),
        )

    def _bucket_stats(self, batches: Batches, sizes: NDArray[Any], tokens: NDArray[Any]) -> dict[BucketId, BucketStats]:
        padded = sizes * batches.max_len
        stats = {}
        for bucket in np.unique(batches.bucket).tolist():
            here = batches.bucket == bucket
            stats[bucket] = BucketStats(
                bucket_id=bucket,
                bucket_max_length=self.bucket_spec.get_bucket_max_length(bucket),
                sample_count=int(sizes[here].sum()),
                total_tokens=int(tokens[here].sum()),
                padded_tokens=int(padded[here].sum()),
            )
        return stats

    @staticmethod
    def _shapes(batches: Batches, sizes: NDArray[Any]) -> BatchShapeHistogram:
        buckets = np.unique(batches.bucket).tolist()
        return BatchShapeHistogram(
            bucket_counts={one: int(np.count_nonzero(batches.bucket == one)) for one in buckets},
            bucket_samples={one: int(sizes[batches.bucket == one].sum()) for one in buckets},
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that iteration yields, from its beginning."""
        self._epoch, self._next, self._resumed = epoch, 0, False

    def __len__(self) -> int:
        return len(self._batches(self._epoch, True).max_len)

    def __iter__(self) -> Iterator[list[str]]:
        batches = self._batches(self._epoch, True)
        first = self._next if self._resumed else 0
        self._resumed = False
        for number in range(first, len(batches.max_len)):
            self._next = number + 1
            yield list(self._spec(batches, number).sample_ids)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of batches already yielded in it."""
        return {"epoch": self._epoch, "next_batch": self._next, "seed": self.seed, "num_samples": self.num_samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken; a state of other data or another seed is a UsageError."""
        if (state["seed"], state["num_samples"]) != (self.seed, self.num_samples):
            raise UsageError("this state belongs to another seed or other samples")
        self._epoch, self._next, self._resumed = state["epoch"], state["next_batch"], True

    def _batches(self, epoch: int, interleave: bool) -> Batches:
        key = (epoch, interleave)
        if self._cache is None or self._cache[0] != key:
            if epoch < 0:
                raise UsageError(f"epoch={epoch} must not be negative")
            items = Items(self._units.lengths[self._kept])
            settings = replace(self._settings, interleave=interleave)
            batches = fill_batches(items, settings, seed=(self.seed, epoch))
            self._cache = (key, batches._replace(order=self._kept[batches.order]))
        return self._cache[1]

    def _spec(self, batches: Batches, number: int) -> BatchSpec:
        units = batches.order[batches.offsets[number] : batches.offsets[number + 1]]
        samples, starts, stops = self._units.cuts.resolve(units)
        return BatchSpec(
            sample_ids=tuple(self._table.ids.take(samples)),
            bucket_id=int(batches.bucket[number]),
            max_length=int(batches.max_len[number]),
            token_count=int(self._units.lengths[units].sum()),
            starts=starts,
            stops=stops,
        )
