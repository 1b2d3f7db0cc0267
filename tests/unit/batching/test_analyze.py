"""Histograms, bucket figures and edges against numpy; length caches in both formats."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from query_mutator.batching import (
    BucketSpec,
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
    visualize_buckets,
)
from query_mutator.batching.files import BatchFileError
from query_mutator.batching.generation.length_cache import LengthCache
from query_mutator.errors import UsageError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)
SUFFIXES = ["lengths.jsonl", "lengths.json", "lengths.bin"]


@given(lengths=LENGTHS, bins=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_histogram_counts_everything_once(lengths: list[int], bins: int) -> None:
    histogram = compute_length_histogram(lengths, num_bins=bins)
    assert len(histogram.bins) == min(bins, max(lengths) - min(lengths) + 1)
    assert sum(one.count for one in histogram.bins) == len(lengths)
    for one in histogram.bins:
        assert one.count == sum(one.min_length <= length < one.max_length for length in lengths)
    assert histogram.mean_length == pytest.approx(np.mean(lengths))
    assert histogram.std_length == pytest.approx(np.std(lengths))
    for name in ("p10", "p25", "p50", "p75", "p90", "p95", "p99"):
        assert getattr(histogram, name) == pytest.approx(np.percentile(lengths, float(name[1:])))


def test_a_histogram_of_fixed_width_is_drawn() -> None:
    histogram = compute_length_histogram([3, 12, 14, 27], bin_width=10)
    assert [(one.label, one.count) for one in histogram.bins] == [("0-9", 1), ("10-19", 2), ("20-29", 1)]
    lines = histogram.to_ascii(width=8).splitlines()
    assert lines[1] == "10-19 | ######## 2  50.0%"
    assert "4 samples, 3 to 27 tokens" in lines[3]
    with pytest.raises(UsageError):
        compute_length_histogram([])


def test_bucket_efficiency_by_hand() -> None:
    analysis = analyze_bucket_efficiency({"a": 5, "b": 10, "c": 15, "d": 99}, BucketSpec(edges=(10, 20, 30)))
    assert [one.sample_count for one in analysis.buckets] == [2, 1, 0]
    assert [one.padded_tokens for one in analysis.buckets] == [20, 20, 0]
    assert [one.padded_tokens - one.total_tokens for one in analysis.buckets] == [5, 5, 0]
    assert (analysis.overall_efficiency, analysis.overall_waste) == (0.75, 25.0)
    assert (analysis.empty_buckets, analysis.num_left_out) == (1, 1)
    assert "overall efficiency 75.0%" in analysis.to_ascii()
    assert analyze_bucket_efficiency([99], BucketSpec(edges=(10,))).overall_efficiency == 0.0


def cost(edges: tuple[int, ...], lengths: list[int], power: int) -> int:
    return sum(min(edge for edge in edges if edge >= length) ** power for length in lengths)


@given(lengths=LENGTHS, number=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize(("goal", "power"), [("minimize_waste", 1), ("minimize_memory", 2)])
def test_suggested_edges_are_the_best_there_are(goal: str, power: int, lengths: list[int], number: int) -> None:
    suggestion = suggest_bucket_edges(lengths, number, goal)
    *below, longest = sorted(set(lengths))
    every = combinations(below, min(number, len(below) + 1) - 1)
    assert cost(suggestion.edges, lengths, power) == min(cost((*one, longest), lengths, power) for one in every)
    assert suggestion.estimated_efficiency == pytest.approx(sum(lengths) / cost(suggestion.edges, lengths, 1))


def test_balanced_edges_share_samples_out() -> None:
    suggestion = suggest_bucket_edges(list(range(1, 101)), 4, OptimizationGoal.BALANCE_BUCKETS)
    assert suggestion.edges == (25, 50, 75, 100)
    assert suggest_bucket_edges([7, 7, 7], 4, "balance_buckets").edges == (7,)


def test_edges_keep_to_a_multiple_and_a_longest_length() -> None:
    suggestion = suggest_bucket_edges([5, 17, 30, 99], 3, max_length=40, multiple=8)
    assert (suggestion.edges, suggestion.num_left_out, suggestion.overflow_max) == ((8, 24, 32), 1, 40)
    assert suggest_bucket_edges([10, 100], 2, max_length=4096).overflow_max == 4096
    assert suggest_bucket_edges([10, 100], 2).overflow_max == 100
    with pytest.raises(UsageError):
        suggest_bucket_edges([99], 2, max_length=40)


def test_a_report_adds_up() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5, 1, 3000)), 1, 1024).astype(np.int32)
    report = create_efficiency_report(lengths, BucketSpec(edges=(64, 512, 1024)), token_budget=4096)
    assert (report.total_samples, report.total_tokens) == (3000, int(lengths.sum()))
    assert report.overall_efficiency == pytest.approx(report.total_tokens / report.total_padded)
    assert [one.optimization_goal for one in report.suggestions] == list(OptimizationGoal)
    buckets, suggested, windows, packed = report.layouts
    assert suggested.padded_tokens <= buckets.padded_tokens
    assert packed.efficiency > windows.efficiency > suggested.efficiency
    assert packed.batches < windows.batches < buckets.batches
    assert all(one.peak_tokens <= 4096 for one in report.layouts)
    assert any(f"take {windows.batches} steps instead of {buckets.batches}" in one for one in report.recommendations)
    assert "sorted windows" in report.to_ascii()


def test_the_picture_shows_padding() -> None:
    picture = visualize_buckets([5, 10, 20], BucketSpec(edges=(10, 20)), width=20).splitlines()
    assert picture[0].split("|")[1].strip() == "###############..... 2 samples"
    assert len(picture) == 3


@pytest.fixture(params=SUFFIXES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def build(path: Path, entries: dict[object, int], tokenizer_hash: str = "tok") -> None:
    with LengthCache.create(path, tokenizer_hash) as cache:
        for name, length in entries.items():
            cache.add_sync(name, length)


def test_what_was_added_is_read_back_in_order(path: Path) -> None:
    build(path, {"b": 3, "ä/ö": 0, 0: 7})
    cache = LengthCache.load_sync(path, "tok")
    assert list(cache.items()) == [("b", 3), ("ä/ö", 0), ("0", 7)]
    assert cache.get(0) == 7
    assert cache.get("nobody") is None
    assert len(cache) == 3
    assert "b" in cache
    assert cache.lengths.tolist() == [3, 0, 7]


def test_async_methods_are_the_sync_ones(path: Path) -> None:
    async def run() -> None:
        async with LengthCache.create(path, "tok") as cache:
            await cache.add("a", 1)
            await cache.add_many(["b", "c"], [2, 3])
        loaded = await LengthCache.load(path)
        assert loaded.get_all() == {"a": 1, "b": 2, "c": 3}
        assert [entry async for entry in LengthCache.stream(path)] == list(LengthCache.stream_sync(path))
        assert await loaded.validate({"a", "z"}) == ({"z"}, {"b", "c"})
        assert len(await LengthCache.load_or_create(path, "tok")) == 3

    asyncio.run(run())


def test_adding_to_a_loaded_cache_keeps_what_was_there(path: Path) -> None:
    build(path, {"a": 1})
    with LengthCache.load_sync(path) as cache:
        cache.add_sync("b", 2)
        cache.add_many_sync(["c"], np.array([3]))
    assert LengthCache.load_sync(path).get_all() == {"a": 1, "b": 2, "c": 3}


def test_an_interrupted_build_leaves_the_file_that_was_there(path: Path) -> None:
    build(path, {"a": 1})

    def interrupted() -> None:
        with LengthCache.create(path, "tok") as cache:
            cache.add_sync("b", 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert LengthCache.load_sync(path).get_all() == {"a": 1}
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_truncated_file_is_an_error_that_names_it(path: Path, cut: int) -> None:
    build(path, {f"sample{index}": index for index in range(9)})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(BatchFileError, match=path.name):
        LengthCache.load_sync(path)


def test_an_edited_file_is_an_error_that_names_it(path: Path) -> None:
    build(path, {"sample_one": 5, "sample_two": 6})
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=path.name):
        LengthCache.load_sync(path)


def test_another_tokenizer_is_refused_and_begun_anew_when_asked(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build(path, {"a": 1}, tokenizer_hash="old")
    with pytest.raises(UsageError, match=r"tokenizer old, not new"):
        LengthCache.load_sync(path, "new")
    assert len(LengthCache.load_or_create_sync(path, "new")) == 0
    assert "built again" in caplog.text
    assert LengthCache.load_sync(path).get("a") == 1


def test_an_id_comes_once_and_a_refused_batch_adds_nothing(path: Path) -> None:
    cache = LengthCache.create(path, "tok")
    cache.add_sync("1", 4)
    with pytest.raises(UsageError, match="'1'"):
        cache.add_sync(1, 4)
    with pytest.raises(UsageError, match="occurs twice"):
        cache.add_many_sync(["2", "3", "2"], [1, 1, 1])
    assert len(cache) == 1


@pytest.mark.parametrize("length", [-1, 1.5, True, 2**31, "7"])
def test_lengths_are_whole_numbers(path: Path, length: object) -> None:
    with pytest.raises(UsageError):
        LengthCache.create(path, "tok").add_sync("a", length)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", None, 1.0, True])
def test_ids_are_text_or_whole_numbers(path: Path, name: object) -> None:
    with pytest.raises(UsageError, match="sample id"):
        LengthCache.create(path, "tok").add_sync(name, 1)


def test_lines_without_header_count_or_version_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    row = json.dumps({"sample_id": "a", "tokenizer_hash": "tok", "length": 3})
    path.write_text(row + "\n")
    with pytest.raises(BatchFileError, match="header"):
        LengthCache.load_sync(path)
    path.write_text('{"tokenizer_hash": "tok", "version": 2}\n' + row)
    with pytest.raises(BatchFileError, match="version 2"):
        LengthCache.load_sync(path)
    path.write_text('{"tokenizer_hash": "tok", "version": 1}\n' + row)
    with pytest.raises(BatchFileError, match="interrupted"):
        LengthCache.load_sync(path)
    assert LengthCache.load_sync(path, allow_unfinished=True).get("a") == 3


def test_a_missing_or_foreign_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"none\.bin"):
        LengthCache.load_sync(tmp_path / "none.bin")
    (tmp_path / "other.bin").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(BatchFileError, match=r"other\.bin"):
        LengthCache.load_sync(tmp_path / "other.bin")


def test_the_binary_file_is_small(tmp_path: Path) -> None:
    path = tmp_path / "lengths.bin"
    with LengthCache.create(path, "tok") as cache:
        cache.add_many_sync([f"s{index:06d}" for index in range(10_000)], np.arange(10_000))
    assert path.stat().st_size < 10_000 * (8 + 4) + 1_000


def test_a_changed_hash_in_the_header_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    with LengthCache.create(path, "0123abcd") as cache:
        cache.add_sync("a", 3)
    path.write_text(path.read_text().replace("0123abcd", "0133abcd", 1))
    with pytest.raises(BatchFileError, match="checksum"):
        LengthCache.load_sync(path)
