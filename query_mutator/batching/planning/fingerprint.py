"""Fingerprints of a sequence of batches: computed, compared, saved and loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable
from itertools import islice
from pathlib import Path

from pydantic import Field

from query_mutator.batching.core.buckets import BatchSpec
from query_mutator.batching.core.config import BatchingConfig
from query_mutator.batching.files import json_bytes, read_checked_json, sha256_of, write_checked_json
from query_mutator.batching.records import Fingerprint
from query_mutator.batching.sync import to_async


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
        taken: list[BatchSpec] = []
        async for one in batches:
            if n_batches is not None and len(taken) >= n_batches:
                break
            taken.append(one)
        batches = taken
    return await asyncio.to_thread(compute_batch_fingerprint, batches, config, n_batches)


save_fingerprint_async = to_async(save_fingerprint)
load_fingerprint_async = to_async(load_fingerprint)
