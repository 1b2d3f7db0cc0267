"""One batch as the sampler yields it."""

from __future__ import annotations

from pydantic import Field

from query_mutator.batching.core.buckets import BucketId
from query_mutator.batching.records import Int32Array, Record


class BatchSpec(Record):
    """Ids of the samples, the bucket, the padded length of every row, and the real tokens in the batch.

    Where an over-long policy cut samples, `starts` and `stops` say which tokens count (stop −1: to the end).
    """

    sample_ids: tuple[str, ...] = Field(min_length=1)
    bucket_id: BucketId = Field(ge=0)
    max_length: int = Field(ge=1)
    token_count: int = Field(ge=0)
    starts: Int32Array | None = None
    stops: Int32Array | None = None

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return len(self.sample_ids)

    @property
    def padded_token_count(self) -> int:
        """Tokens with padding."""
        return self.batch_size * self.max_length
