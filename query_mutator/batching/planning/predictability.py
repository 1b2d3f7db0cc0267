"""How batches are formed, as one checked record, and fingerprints of the batches that came out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from query_mutator.batching.core.batch_spec import BatchSpec
from query_mutator.batching.core.buckets import BucketSpec
from query_mutator.batching.core.filling import FillSettings
from query_mutator.batching.core.overlong import OverlongPolicy
from query_mutator.batching.files import json_bytes, read_checked_json, sha256_of, write_checked_json
from query_mutator.batching.records import Record
from query_mutator.batching.sync import to_async


class PadPolicy(StrEnum):
    """How far a batch is padded: to its bucket's longest length, or to its own longest, rounded up."""

    PAD_TO_BUCKET = "pad_to_bucket"
    PAD_TO_MAX = "pad_to_max"


class BatchingMode(StrEnum):
    """Few fixed shapes, or as little padding as possible."""

    PREDICTABLE = "predictable"
    THROUGHPUT = "throughput"


class BatchingConfig(Record):
    """Everything that decides which samples form a batch.

    `window` samples are sorted by length at a time after the shuffle; `pad_multiple` rounds padded lengths up;
    `max_samples` and `loss_token_budget` bound a batch besides `token_budget`.
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
            raise ValueError(f"mode={self.mode.value} goes with pad_policy={wanted.value}")
        for bucket, length in (self.bucket_max_lengths or {}).items():
            if not 0 <= bucket < spec.num_buckets or length < spec.get_bucket_max_length(bucket):
                raise ValueError(f"bucket_max_lengths[{bucket}]={length} does not cover the bucket's longest length")
        return self

    @classmethod
    def predictable(cls, **fields: Any) -> Self:
        """Return settings for few fixed shapes: every batch is padded to, and counted by, its bucket's longest length.

        No sample is dropped unless `drop_last=True` asks for full batches alone.
        """
        return cls(**{"mode": BatchingMode.PREDICTABLE, "pad_policy": PadPolicy.PAD_TO_BUCKET, **fields})

    @classmethod
    def throughput(cls, **fields: Any) -> Self:
        """Return settings for little padding: sorted windows, padded to the longest of the batch."""
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
        """The longest sample that fits a batch: within the budget and within the buckets."""
        return min(self.token_budget, self.overflow_max)

    def get_pad_length(self, bucket_id: int, max_in_batch: int) -> int:
        """Return how long the rows of a batch are, from its bucket and its longest sample; never above `limit`."""
        if self.is_predictable:
            lengths = self.bucket_max_lengths or {}
            return min(lengths.get(bucket_id, self.bucket_spec.get_bucket_max_length(bucket_id)), self.limit)
        return min(-(-max_in_batch // self.pad_multiple) * self.pad_multiple, self.limit)

    @property
    def fill_settings(self) -> FillSettings:
        """What the filling of batches needs of these settings."""
        bounds = tuple(self.bucket_spec.upper_bounds.tolist())
        pads = tuple(self.get_pad_length(bucket, bound) for bucket, bound in enumerate(bounds))
        return FillSettings(
            token_budget=self.token_budget,
            limit=self.limit,
            bounds=bounds,
            bucket_pads=pads if self.is_predictable else None,
            pad_multiple=self.pad_multiple,
            window=self.window,
            drop_last=self.drop_last,
            interleave=self.interleave_buckets,
            max_samples=self.max_samples,
            loss_token_budget=self.loss_token_budget,
        )

    @property
    def config_hash(self) -> str:
        """Hexadecimal sha256 of all settings."""
        return sha256_of([json_bytes(self.model_dump(mode="json"))])


class BatchFingerprint(Record):
    """What a sequence of batches and its settings hash to; `num_batches` of them were covered."""

    fingerprint: str = Field(min_length=16, max_length=16)
    full_hash: str
    num_batches: int = Field(ge=0)
    total_samples: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    config_hash: str
    version: int = 2

    def matches(self, other: BatchFingerprint) -> bool:
        """Say whether batches and settings are the same."""
        return self.full_hash == other.full_hash

    def matches_config(self, other: BatchFingerprint) -> bool:
        """Say whether the settings are the same, whatever the batches."""
        return self.config_hash == other.config_hash


def compute_batch_fingerprint(
    batches: Iterable[BatchSpec], config: BatchingConfig | None = None, n_batches: int | None = None
) -> BatchFingerprint:
    """Hash batches in their order, the samples of each in theirs; `n_batches` takes only the first so many."""
    taken = list(islice(batches, n_batches))
    config_hash = config.config_hash if config else ""
    rows = (json_bytes([list(one.sample_ids), one.bucket_id, one.max_length, one.token_count]) for one in taken)
    full = sha256_of([b"batches 2", config_hash.encode(), str(len(taken)).encode(), *rows])
    return BatchFingerprint(
        fingerprint=full[:16],
        full_hash=full,
        num_batches=len(taken),
        total_samples=sum(one.batch_size for one in taken),
        total_tokens=sum(one.token_count for one in taken),
        config_hash=config_hash,
    )


def verify_batch_fingerprint(
    batches: Iterable[BatchSpec], expected: BatchFingerprint | str, config: BatchingConfig | None = None
) -> tuple[bool, str]:
    """Compare ALL these batches with a fingerprint (a record, or its 16 or 64 digits) and say what differs."""
    found = compute_batch_fingerprint(batches, config)
    if isinstance(expected, str):
        known = {16: found.fingerprint, 64: found.full_hash}.get(len(expected))
        if known is None:
            return False, f"a fingerprint has 16 or 64 digits, this one has {len(expected)}"
        return (True, "the batches match") if known == expected else (False, f"expected {expected}, found {known}")
    if found.config_hash != expected.config_hash:
        return False, "the batches were made with other settings"
    if found.num_batches != expected.num_batches:
        return False, f"{found.num_batches} batches where {expected.num_batches} were fingerprinted"
    if not found.matches(expected):
        return False, f"the batches differ: expected {expected.fingerprint}, found {found.fingerprint}"
    return True, "the batches match"


def save_fingerprint(fingerprint: BatchFingerprint, path: str | Path) -> None:
    """Write a fingerprint as JSON with a checksum."""
    write_checked_json(path, fingerprint.model_dump(mode="json"))


def load_fingerprint(path: str | Path) -> BatchFingerprint:
    """Read the fingerprint of `save_fingerprint`."""
    return BatchFingerprint.model_validate(read_checked_json(path))


compute_batch_fingerprint_async = to_async(compute_batch_fingerprint)
save_fingerprint_async = to_async(save_fingerprint)
load_fingerprint_async = to_async(load_fingerprint)
