"""Length buckets: which lengths are batched together, one batch of a bucket, and samples too long for any."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from query_mutator.batching.lengths import LengthTable
from query_mutator.batching.records import IndexArray, Ratio, Record
from query_mutator.errors import UsageError

BucketId = int


class BucketSpec(Record):
    """Bucket i covers the lengths edges[i-1]+1 .. edges[i]; longer ones up to `overflow_max` form the overflow bucket.

    With `overflow_max` equal to the last edge (the value when it is left out) there is no overflow bucket.
    """

    edges: tuple[int, ...] = Field(min_length=1)
    overflow_max: int = Field(default_factory=lambda fields: max(fields["edges"]))
    min_length: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.edges[0] < self.min_length:
            raise ValueError(f"edges begin at {self.edges[0]}, below min_length={self.min_length}")
        if any(left >= right for left, right in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError(f"edges must be ascending, got {self.edges}; try {tuple(sorted(set(self.edges)))}")
        if self.overflow_max < self.edges[-1]:
            raise ValueError(f"overflow_max={self.overflow_max} is below the last edge {self.edges[-1]}")
        return self

    @property
    def num_buckets(self) -> int:
        """Number of buckets, the overflow bucket included where there is one."""
        return len(self.edges) + self.has_overflow

    @property
    def has_overflow(self) -> bool:
        """Whether lengths beyond the last edge have a bucket."""
        return self.overflow_max > self.edges[-1]

    @property
    def overflow_bucket_id(self) -> BucketId:
        """The number of the overflow bucket, one past the edges."""
        return len(self.edges)

    @property
    def upper_bounds(self) -> NDArray[np.int64]:
        """The longest length of every bucket, int64 [num_buckets]."""
        return np.array([*self.edges, self.overflow_max][: self.num_buckets], np.int64)

    def get_bucket_id(self, length: int) -> BucketId:
        """Return the bucket of a length; raise ValueError for a length outside all buckets."""
        if self.should_skip(length):
            raise ValueError(f"length {length} is outside the buckets {self.min_length}..{self.overflow_max}")
        return int(self.bucket_ids(np.array([length]))[0])

    get_bucket = get_bucket_id

    def bucket_ids(self, lengths: NDArray[Any]) -> NDArray[np.int64]:
        """Return the bucket of every length [n]; lengths beyond all buckets get `num_buckets`."""
        return np.searchsorted(self.upper_bounds, lengths, side="left")

    def get_bucket_max_length(self, bucket_id: BucketId) -> int:
        """Return the longest length of a bucket."""
        return int(self.upper_bounds[self._known(bucket_id)])

    def get_bucket_range(self, bucket_id: BucketId) -> tuple[int, int]:
        """Return the shortest and longest length of a bucket, both included."""
        shortest = self.min_length if self._known(bucket_id) == 0 else int(self.upper_bounds[bucket_id - 1]) + 1
        return shortest, self.get_bucket_max_length(bucket_id)

    def is_overflow(self, bucket_id: BucketId) -> bool:
        """Return whether this is the overflow bucket."""
        return self.has_overflow and bucket_id == self.overflow_bucket_id

    def should_skip(self, length: int) -> bool:
        """Return whether a length is outside all buckets."""
        return not self.min_length <= length <= self.overflow_max

    def _known(self, bucket_id: BucketId) -> BucketId:
        if not 0 <= bucket_id < self.num_buckets:
            raise ValueError(f"bucket {bucket_id} does not exist; there are {self.num_buckets}, counted from 0")
        return bucket_id

    @classmethod
    def default(cls) -> Self:
        """Return edges 128, 256, 512, 1024 and an overflow bucket up to 2048."""
        return cls(edges=(128, 256, 512, 1024), overflow_max=2048)

    @classmethod
    def from_max_length(cls, max_length: int, num_buckets: int = 4) -> Self:
        """Return evenly spaced buckets whose last edge is `max_length`."""
        if not 1 <= num_buckets <= max_length:
            raise ValueError(f"num_buckets={num_buckets} must lie between 1 and max_length={max_length}")
        edges = tuple(max_length * number // num_buckets for number in range(1, num_buckets + 1))
        return cls(edges=edges, overflow_max=max_length)


class BucketStats(Record):
    """Samples and tokens of one bucket; every ratio is 0 when there is nothing to divide by."""

    bucket_id: BucketId
    bucket_max_length: int = Field(ge=1)
    sample_count: int = Field(default=0, ge=0)
    total_tokens: int = Field(default=0, ge=0)
    padded_tokens: int = Field(default=0, ge=0)

    padding_ratio: ClassVar = Ratio("padding_tokens", "padded_tokens")
    efficiency: ClassVar = Ratio("total_tokens", "padded_tokens")
    avg_length: ClassVar = Ratio("total_tokens", "sample_count")

    @property
    def padding_tokens(self) -> int:
        """Tokens that are padding."""
        return self.padded_tokens - self.total_tokens

    def add_sample(self, length: int) -> Self:
        """Return the counts with one more sample, padded to the bucket's longest length."""
        return self.plus(sample_count=1, total_tokens=length, padded_tokens=self.bucket_max_length)


class BatchSpec(Record):
    """Ids of the samples, the bucket, the padded length of every row, and the real tokens in the batch."""

    sample_ids: tuple[str, ...] = Field(min_length=1)
    bucket_id: BucketId = Field(ge=0)
    max_length: int = Field(ge=1)
    token_count: int = Field(ge=0)

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return len(self.sample_ids)

    @property
    def padded_token_count(self) -> int:
        """Tokens with padding."""
        return self.batch_size * self.max_length


class OverlongPolicy(StrEnum):
    """Policy for a sample longer than the budget or the longest bucket."""

    ERROR = "error"
    DROP = "drop"
    TRUNCATE = "truncate"


class OverlongReport(Record):
    """Number of samples over `limit`, how they were handled, and the tokens left out of all batches."""

    policy: OverlongPolicy
    limit: int = Field(ge=1)
    num_overlong: int = 0
    num_dropped: int = 0
    num_truncated: int = 0
    tokens_lost: int = 0


class FittedLengths(NamedTuple):
    """Lengths [n] in tokens, none over the limit; the positions that take part [k]; what happened to the others."""

    lengths: NDArray[np.int32]
    kept: IndexArray
    report: OverlongReport


def fit_lengths(table: LengthTable, limit: int, policy: OverlongPolicy) -> FittedLengths:
    """Apply the policy to every sample longer than `limit`; raise UsageError with the first under "error"."""
    lengths, policy = table.lengths, OverlongPolicy(policy)
    over = np.flatnonzero(lengths > limit)
    every = np.arange(len(lengths), dtype=np.int32)
    report = OverlongReport(policy=policy, limit=limit, num_overlong=len(over))
    if not len(over):
        return FittedLengths(lengths, every, report)
    if policy is OverlongPolicy.ERROR:
        raise UsageError(
            f"{len(over)} of {len(table)} samples are longer than {limit} tokens (first {table.ids[int(over[0])]!r}, "
            f"longest {lengths[over].max()}); raise the budget and the last bucket, or choose an over-long policy: "
            "drop or truncate"
        )
    tokens = int(lengths[over].sum(dtype=np.int64))
    if policy is OverlongPolicy.DROP:
        return FittedLengths(lengths, np.delete(every, over), report.changed(num_dropped=len(over), tokens_lost=tokens))
    lost = tokens - limit * len(over)
    return FittedLengths(
        np.minimum(lengths, limit).astype(np.int32), every, report.changed(num_truncated=len(over), tokens_lost=lost)
    )
