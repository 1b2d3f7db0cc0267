"""How batches are formed, as one checked record."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Self

from pydantic import Field, model_validator

from query_mutator.batching.core.buckets import BucketSpec
from query_mutator.batching.core.overlong import OverlongPolicy
from query_mutator.batching.files import json_bytes, sha256_of
from query_mutator.batching.records import Record


class PadPolicy(StrEnum):
    """Padded length of a batch: its bucket's longest length, or its own longest row, rounded up."""

    PAD_TO_BUCKET = "pad_to_bucket"
    PAD_TO_MAX = "pad_to_max"
    PAD_TO_MAX_IN_BATCH = "pad_to_max"  # the same under its longer name


class BatchingMode(StrEnum):
    """Few fixed shapes, or as little padding as possible."""

    PREDICTABLE = "predictable"
    THROUGHPUT = "throughput"


class BatchingConfig(Record):
    """All settings that decide which samples form a batch.

    `window` shuffled samples are sorted by length at a time; padded lengths are multiples of `pad_multiple`;
    `max_samples` and `loss_token_budget` bound a batch in addition to `token_budget`.
    """

    mode: BatchingMode = BatchingMode.THROUGHPUT
    pad_policy: PadPolicy = PadPolicy.PAD_TO_MAX
    token_budget: int = Field(default=4096, ge=1)
    bucket_edges: tuple[int, ...] = (128, 256, 512, 1024)
    overflow_max: int = Field(default=2048, ge=1)
    seed: int = Field(default=42, ge=0)
    drop_last: bool = False
    interleave_buckets: bool = True
    bucket_max_lengths: dict[int, int] | None = None
    window: int = Field(default=4096, ge=1)
    pad_multiple: int = Field(default=8, ge=1)
    overlong: OverlongPolicy = OverlongPolicy.ERROR
    max_samples: int | None = Field(default=None, ge=1)
    loss_token_budget: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        spec = self.bucket_spec
        wanted = PadPolicy.PAD_TO_BUCKET if self.is_predictable else PadPolicy.PAD_TO_MAX
        if self.pad_policy is not wanted:
            raise ValueError(f"mode={self.mode.value} needs pad_policy={wanted.value}")
        for bucket, length in (self.bucket_max_lengths or {}).items():
            if not 0 <= bucket < spec.num_buckets or length < spec.get_bucket_max_length(bucket):
                raise ValueError(f"bucket_max_lengths[{bucket}]={length} does not cover the bucket's longest length")
        return self

    @classmethod
    def predictable(cls, **fields: Any) -> Self:
        """Return settings for few fixed shapes: batches are padded to, and counted by, their bucket's longest length.

        No sample is dropped unless `drop_last=True`.
        """
        return cls(**{"mode": BatchingMode.PREDICTABLE, "pad_policy": PadPolicy.PAD_TO_BUCKET, **fields})

    @classmethod
    def throughput(cls, **fields: Any) -> Self:
        """Return settings for little padding: sorted windows, padded to the longest row of the batch."""
        return cls(**{"mode": BatchingMode.THROUGHPUT, "pad_policy": PadPolicy.PAD_TO_MAX, **fields})

    @property
    def is_predictable(self) -> bool:
        """Whether batches have fixed shapes."""
        return self.mode is BatchingMode.PREDICTABLE

    @property
    def bucket_spec(self) -> BucketSpec:
        """The buckets as a record."""
        return BucketSpec(edges=self.bucket_edges, overflow_max=self.overflow_max)

    @property
    def limit(self) -> int:
        """Longest sample that fits a batch: within the budget and within the buckets."""
        return min(self.token_budget, self.overflow_max)

    @property
    def bucket_pads(self) -> tuple[int, ...] | None:
        """Padded length of each bucket; None if batches are padded to their longest row."""
        if not self.is_predictable:
            return None
        return tuple(self.get_pad_length(bucket, 0) for bucket in range(self.bucket_spec.num_buckets))

    def get_pad_length(self, bucket_id: int, max_in_batch: int) -> int:
        """Return the padded length of a batch, given its bucket and its longest row; at most `limit`."""
        if self.is_predictable:
            lengths = self.bucket_max_lengths or {}
            return min(lengths.get(bucket_id, self.bucket_spec.get_bucket_max_length(bucket_id)), self.limit)
        return min(-(-max_in_batch // self.pad_multiple) * self.pad_multiple, self.limit)

    @property
    def config_hash(self) -> str:
        """Hexadecimal sha256 of all settings."""
        return sha256_of([json_bytes(self.model_dump(mode="json"))])
