"""Samples, buckets, ids, files, the sampler, and each name that is promised to users of chuk-lazarus, by its use."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from query_mutator.batching import (
    AsyncOfflineDatasetStream,
    BatchMetrics,
    BatchShapeHistogram,
    BatchSpec,
    BucketSpec,
    BucketStats,
    OfflineDatasetStream,
    PreferenceSample,
    Sample,
    SampleMeta,
    TokenBudgetBatchSampler,
    compute_dataset_fingerprint,
)
from query_mutator.batching.lengths import as_lengths
from query_mutator.errors import UsageError

META = SampleMeta.create("a", "data")


def sample(ids: list[int], mask: list[int], **fields: object) -> Sample:
    return Sample(input_ids=ids, loss_mask=mask, meta=META, **fields)  # type: ignore[arg-type]


def test_a_sample_counts_tokens_and_loss_and_is_read_only() -> None:
    one = sample([5, 6, 7, 8], [1, 0, 1, 1], segment_ids=[0, 0, 1, 1])
    assert (one.length, one.num_loss_tokens, one.num_target_tokens, one.num_segments) == (4, 3, 2, 2)
    assert (one.input_ids.dtype, one.loss_mask.dtype) == (np.int32, np.uint8)
    assert Sample.from_lists(json.loads(json.dumps(one.to_lists()))) == one
    with pytest.raises(ValueError, match="read-only"):
        one.input_ids[0] = 9
    with pytest.raises(ValidationError):
        one.meta = META  # type: ignore[misc]


@pytest.mark.parametrize(
    ("ids", "mask", "segments", "message"),
    [
        ([], [], None, "no tokens"),
        ([1, 2], [1], None, "2 input_ids but 1"),
        ([1, 2], [1, 2], None, "0 and 1"),
        ([1, 2], [1, 1], [0], "1 segment_ids"),
        ([1, 2], [1, 1], [1, 0], "non-decreasing"),
        ([1.5, 2], [1, 1], None, "integers"),
        ([2**40, 2], [1, 1], None, "outside the range of int32"),
    ],
)
def test_a_broken_sample_is_refused(ids: list[int], mask: list[int], segments: list[int] | None, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        sample(ids, mask, segment_ids=segments)


def test_a_preference_becomes_two_samples() -> None:
    chosen_fields = {"chosen_input_ids": [1, 2, 3], "chosen_loss_mask": [0, 0, 1]}
    rejected_fields = {"rejected_input_ids": [1, 2, 4, 5], "rejected_loss_mask": [0, 0, 1, 1]}
    pair = PreferenceSample(**chosen_fields, **rejected_fields, prompt_length=2, meta=META)
    chosen, rejected = pair.to_samples()
    assert (chosen.meta.sample_id, rejected.meta.sample_id) == ("a_chosen", "a_rejected")
    assert (pair.max_length, rejected.length) == (4, 4)
    with pytest.raises(ValidationError, match="same prompt"):
        PreferenceSample(**{**pair.model_dump(), "rejected_input_ids": [9, 2, 4, 5]})


def test_a_dataset_fingerprint_sees_meaning_not_spelling(tmp_path: Path) -> None:
    plain, spaced, other = (tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    plain.write_text('{"a":1,"b":2}\n{"a":3}\n')
    spaced.write_text('{ "b": 2, "a": 1 }\n\n{"a": 3}\n')
    other.write_text('{"a":1,"b":2}\n{"a":4}\n')
    first = compute_dataset_fingerprint(plain, "tok")
    assert compute_dataset_fingerprint(spaced, "tok").matches(first)
    assert compute_dataset_fingerprint(other, "tok").content_hash != first.content_hash
    assert compute_dataset_fingerprint(plain, "other").content_hash == first.content_hash
    assert not compute_dataset_fingerprint(plain, "other").matches(first)
    limited = compute_dataset_fingerprint(other, "tok", sample_limit=1)
    assert (limited.num_samples, limited.sample_limit) == (1, 1)
    assert not limited.matches(compute_dataset_fingerprint(plain, "tok"))


def test_buckets_cover_lengths_without_gaps() -> None:
    spec = BucketSpec(edges=(128, 256), overflow_max=512)
    assert [spec.get_bucket_id(one) for one in (1, 128, 129, 256, 257, 512)] == [0, 0, 1, 1, 2, 2]
    assert [spec.get_bucket_range(one) for one in range(3)] == [(1, 128), (129, 256), (257, 512)]
    assert spec.is_overflow(2)
    assert spec.should_skip(513)
    with pytest.raises(ValueError, match=r"outside the buckets 1\.\.512"):
        spec.get_bucket_id(513)
    exact = BucketSpec(edges=(128, 4096))
    assert (exact.num_buckets, exact.overflow_max, exact.is_overflow(2)) == (2, 4096, False)
    assert BucketSpec.from_max_length(1000, 4).edges == (250, 500, 750, 1000)
    assert BucketSpec.default().edges == (128, 256, 512, 1024)


def test_bucket_stats_and_metrics_by_hand() -> None:
    stats = BucketStats(bucket_id=0, bucket_max_length=10).add_sample(4).add_sample(6)
    assert (stats.total_tokens, stats.padded_tokens, stats.efficiency, stats.avg_length) == (10, 20, 0.5, 5.0)
    metrics = BatchMetrics().record_sample(0, 5, 4, 8).record_sample(0, 7, 6, 8).record_batch(0, 2)
    metrics = metrics.record_skip().record_time(2.0)
    assert (metrics.efficiency, metrics.padding_tokens, metrics.tokens_per_second) == (0.75, 4, 6.0)
    assert metrics.skip_rate == pytest.approx(1 / 3)
    assert (metrics.summary()["padded_tokens"], metrics.bucket_summary()[0]["samples"]) == (16, 2)
    assert (metrics.total_samples, metrics.loss_tokens, metrics.total_batches) == (2, 10, 1)
    assert (metrics.avg_batch_size, metrics.shape_histogram.bucket_samples) == (2.0, {0: 2})
    shapes = BatchShapeHistogram().record_batch(0, 6).record_batch(1, 2)
    assert (shapes.total_batches, shapes.total_samples, shapes.bucket_fraction(0)) == (2, 8, 0.75)
    assert BatchMetrics().efficiency == BucketStats(bucket_id=0, bucket_max_length=10).efficiency == 0.0


def test_lengths_are_positive_whole_numbers_and_their_order_does_not_matter() -> None:
    for bad in ({"a": 0}, {"a": -1}, {"a": 2.5}, {"a": "x"}, [0], np.array([1.0]), {"a": 2**31}):
        with pytest.raises(UsageError):
            as_lengths(bad)  # type: ignore[arg-type]
    one, two = as_lengths({"s10": 3, "s2": 5}), as_lengths({"s2": 5, "s10": 3})
    assert one.digest == two.digest
    assert one.ids.to_list() == ["s2", "s10"]
    assert one.digest != as_lengths({"s2": 3, "s10": 5}).digest


LENGTHS = {f"s{number}": 100 + number * 10 for number in range(50)}


def sampler(**fields: object) -> TokenBudgetBatchSampler:
    spec = BucketSpec(edges=(128, 256, 512), overflow_max=1024)
    settings = {"lengths": LENGTHS, "bucket_spec": spec, "token_budget": 2048, "seed": 42, **fields}
    return TokenBudgetBatchSampler(**settings)  # type: ignore[arg-type]


def test_the_sampler_fills_batches_within_the_budget() -> None:
    async def collect() -> list[BatchSpec]:
        return [batch async for batch in sampler().iter_epoch(epoch=0)]

    batches = asyncio.run(collect())
    assert batches == list(sampler().iter_epoch_sync(0))
    assert sorted(one for batch in batches for one in batch.sample_ids) == sorted(LENGTHS)
    assert all(batch.padded_token_count <= 2048 for batch in batches)
    assert all(batch.max_length >= max(LENGTHS[one] for one in batch.sample_ids) for batch in batches)
    assert all(batch.max_length % 8 == 0 for batch in batches)
    assert len(sampler()) == sampler().estimate_batches_per_epoch() == len(batches)
    metrics = sampler().compute_metrics()
    assert metrics.total_tokens == sum(LENGTHS.values())
    assert metrics.padded_tokens == sum(batch.padded_token_count for batch in batches)
    assert metrics.loss_tokens == sum(LENGTHS.values()) - 50
    assert sum(metrics.shape_histogram.bucket_counts.values()) == len(batches)


def test_bucket_padding_gives_few_shapes_and_small_windows_are_merged() -> None:
    batches = list(sampler(pad_to_bucket=True).iter_epoch_sync(0))
    assert {batch.max_length for batch in batches} == {128, 256, 512, 1024}
    ordered = [batch.bucket_id for batch in sampler().iter_epoch_sync(0, interleave_buckets=False)]
    assert ordered == sorted(ordered)
    merged = [batch.batch_size for batch in sampler(window=1).iter_epoch_sync(0)]
    assert (sum(merged), len(merged) < 20) == (50, True)


def test_overlong_samples_follow_the_named_policy_and_senseless_settings_are_refused() -> None:
    lengths = {"long": 1500, "short": 10}
    dropped = sampler(lengths=lengths, overlong="drop")
    assert (dropped.num_samples, dropped.num_skipped, dropped.overlong.tokens_lost) == (1, 1, 1500)
    cut = sampler(lengths=lengths, overlong="truncate")
    assert (cut.overlong.num_truncated, cut.overlong.tokens_lost) == (1, 476)
    for name, value, said in (
        ("lengths", lengths, "1 of 2 samples are longer than 1024 tokens"),
        ("token_budget", -5, "token_budget"),
        ("token_budget", 64, "64 tokens"),
        ("seed", -1, "seed"),
        ("window", 0, "window"),
    ):
        with pytest.raises(UsageError, match=said):
            sampler(**{name: value})


# --- streams and puzzles ---------------------------------------------------------------------------------------------


def test_rows_with_nested_meta_are_streamed(tmp_path: Path) -> None:
    nested = {"sample_id": "s7", "difficulty": "hard", "reward": 0.5, "success": True, "episode_id": "e1"}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3], "meta": nested}) + "\n", encoding="utf-8")
    stream = OfflineDatasetStream(path)
    (sample,) = stream
    assert (sample.sample_id, sample.difficulty, sample.reward) == ("s7", 0.75, 0.5)
    assert (sample.success, sample.episode_id) == (True, "e1")
    assert stream.get_length_distribution() == {"s7": 3}
    assert asyncio.run(AsyncOfflineDatasetStream(path).get_length_distribution()) == {"s7": 3}
