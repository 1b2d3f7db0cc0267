"""Histograms, bucket figures and edges, against numpy and against trying everything."""

from __future__ import annotations

from itertools import combinations

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
from query_mutator.errors import UsageError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=60)


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
