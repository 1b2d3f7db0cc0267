"""Settings of batches as one checked record, and fingerprints of the batches made with them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from query_mutator.batching.core.buckets import BatchSpec, BucketSpec, OverlongPolicy
from query_mutator.batching.files import json_bytes, sha256_of
from query_mutator.batching.records import Fingerprint, Record
from query_mutator.batching.sync import to_async
from query_mutator.files import read_checked_json, write_checked_json


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
    `max_samples` bounds a batch in addition to `token_budget`.
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


class BatchFingerprint(Fingerprint):
    """Hash of a sequence of batches and their settings; it covers `num_batches` batches."""

    num_batches: int = Field(ge=0)
    total_samples: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    config_hash: str
    version: int = 2

    def matches_config(self, other: BatchFingerprint) -> bool:
        """Return whether the settings are the same; the batches may differ."""
        return self.config_hash == other.config_hash


def compute_batch_fingerprint(
    batches: Iterable[BatchSpec], config: BatchingConfig | None = None, n_batches: int | None = None
) -> BatchFingerprint:
    """Hash batches and their samples, in order; with `n_batches` only the first ones."""
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
) -> tuple[bool, str | None]:
    """Return whether all batches have a fingerprint (a record, or its 16 or 64 digits), and what differs or None."""
    found = compute_batch_fingerprint(batches, config)
    if isinstance(expected, str):
        known = {16: found.fingerprint, 64: found.full_hash}.get(len(expected))
        if known is None:
            return False, f"a fingerprint has 16 or 64 digits, not {len(expected)}"
        return (True, None) if known == expected else (False, f"expected {expected}, found {known}")
    if found.config_hash != expected.config_hash:
        return False, "the batches were made with other settings"
    if found.num_batches != expected.num_batches:
        return False, f"{found.num_batches} batches where {expected.num_batches} were fingerprinted"
    if not found.matches(expected):
        return False, f"the batches differ: expected {expected.fingerprint}, found {found.fingerprint}"
    return True, None


def save_fingerprint(fingerprint: BatchFingerprint, path: str | Path) -> None:
    """Write a fingerprint as JSON with a checksum."""
    write_checked_json(path, fingerprint.model_dump(mode="json"))


def load_fingerprint(path: str | Path) -> BatchFingerprint:
    """Load the fingerprint written by `save_fingerprint`."""
    return BatchFingerprint.model_validate(read_checked_json(path))


async def compute_batch_fingerprint_async(
    batches: Iterable[BatchSpec] | AsyncIterable[BatchSpec],
    config: BatchingConfig | None = None,
    n_batches: int | None = None,
) -> BatchFingerprint:
    """Return `compute_batch_fingerprint` of batches that may come from an async generator."""
    if isinstance(batches, AsyncIterable):
        batches = [one async for one in batches]
    return await asyncio.to_thread(compute_batch_fingerprint, batches, config, n_batches)


save_fingerprint_async = to_async(save_fingerprint)
load_fingerprint_async = to_async(load_fingerprint)
