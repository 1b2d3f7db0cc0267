"""Cost of a choice of buckets, compared with other batch layouts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.analyze.edges import BucketSuggestion, OptimizationGoal, suggest_bucket_edges
from query_mutator.batching.analyze.histogram import LengthHistogram, compute_length_histogram
from query_mutator.batching.arrays import permutation
from query_mutator.batching.core.buckets import BucketSpec
from query_mutator.batching.core.config import BatchingConfig
from query_mutator.batching.core.filling import Items, fill_batches
from query_mutator.batching.lengths import LengthSource, as_lengths
from query_mutator.batching.planning.binpacking import pack_decreasing
from query_mutator.batching.records import Record
from query_mutator.errors import UsageError

_PROBE_SAMPLES = 1 << 17  # larger data sets are represented by a random sample of this size


class BucketEfficiency(Record):
    """Samples of one bucket, and their tokens with and without padding."""

    bucket_id: int
    min_length: int
    max_length: int
    sample_count: int
    total_tokens: int
    padded_tokens: int
    efficiency: float
    waste_percentage: float


class BucketAnalysis(Record):
    """All buckets; samples outside them are counted only in `num_left_out`."""

    bucket_spec: BucketSpec
    buckets: tuple[BucketEfficiency, ...]
    overall_efficiency: float = Field(ge=0, le=1)
    overall_waste: float
    empty_buckets: int
    num_left_out: int = 0

    def to_ascii(self) -> str:
        """Return a table, one line per bucket."""
        lines = ["bucket        lengths     samples      tokens      padded  efficiency"]
        lines += [
            f"{one.bucket_id:>6} {one.min_length:>6} -{one.max_length:>6} {one.sample_count:>11} "
            f"{one.total_tokens:>11} {one.padded_tokens:>11} {one.efficiency:>10.1%}"
            for one in self.buckets
        ]
        lines.append(f"overall efficiency {self.overall_efficiency:.1%}, {self.overall_waste:.1f}% padding")
        if self.num_left_out:
            lines.append(f"{self.num_left_out} samples are outside all buckets")
        return "\n".join(lines)


class LayoutCost(Record):
    """Cost of an epoch in one batch layout: batches, tokens with padding, squared lengths, largest batch.

    `squared_lengths` is the cost of attention in total, `peak_squared_lengths` the attention scores of one batch.
    """

    name: str
    batches: int
    padded_tokens: int
    efficiency: float
    squared_lengths: int
    peak_tokens: int
    peak_squared_lengths: int


class BatchingEfficiencyReport(Record):
    """Histogram, buckets, suggestions for the three goals, costs of the layouts, and advice."""

    length_histogram: LengthHistogram
    bucket_analysis: BucketAnalysis
    suggestions: tuple[BucketSuggestion, ...]
    layouts: tuple[LayoutCost, ...]
    recommendations: tuple[str, ...]
    token_budget: int
    total_samples: int
    total_tokens: int
    total_padded: int
    overall_efficiency: float

    def to_ascii(self) -> str:
        """Return the report as text."""
        rows = [
            f"{one.name:<18} {one.batches:>9} {one.padded_tokens:>13} {one.efficiency:>10.1%} "
            f"{one.squared_lengths:>12.3g} {one.peak_tokens:>11} {one.peak_squared_lengths:>12.3g}"
            for one in self.layouts
        ]
        head = f"{'budget ' + str(self.token_budget):<18} {'batches':>9} {'padded':>13} {'efficiency':>10} "
        head += f"{'attention':>12} {'peak tokens':>11} {'peak scores':>12}"
        edges = [
            f"{one.optimization_goal.value:<16} {one.estimated_efficiency:>6.1%}  {','.join(map(str, one.edges))}"
            for one in self.suggestions
        ]
        parts = [self.length_histogram.to_ascii(), self.bucket_analysis.to_ascii(), "\n".join([head, *rows])]
        return "\n\n".join([*parts, "\n".join(edges), "\n".join(f"- {one}" for one in self.recommendations)])


def analyze_bucket_efficiency(lengths: LengthSource, bucket_spec: BucketSpec) -> BucketAnalysis:
    """Return samples and padding of every bucket, each sample padded to its bucket's longest length."""
    counts = np.bincount(as_lengths(lengths).lengths, minlength=bucket_spec.overflow_max + 1)
    sizes = np.arange(len(counts))
    buckets = []
    for bucket in range(bucket_spec.num_buckets):
        low, high = bucket_spec.get_bucket_range(bucket)
        here = counts[low : high + 1]
        samples, tokens = int(here.sum()), int(here @ sizes[low : high + 1])
        efficiency = tokens / (samples * high) if samples else 0.0
        buckets.append(
            BucketEfficiency(
                bucket_id=bucket,
                min_length=low,
                max_length=high,
                sample_count=samples,
                total_tokens=tokens,
                padded_tokens=samples * high,
                efficiency=efficiency,
                waste_percentage=100 * (1 - efficiency) if samples else 0.0,
            )
        )
    padded = sum(one.padded_tokens for one in buckets)
    overall = sum(one.total_tokens for one in buckets) / padded if padded else 0.0
    return BucketAnalysis(
        bucket_spec=bucket_spec,
        buckets=tuple(buckets),
        overall_efficiency=overall,
        overall_waste=100 * (1 - overall) if padded else 0.0,
        empty_buckets=sum(one.sample_count == 0 for one in buckets),
        num_left_out=int(counts.sum()) - sum(one.sample_count for one in buckets),
    )


def create_efficiency_report(
    lengths: LengthSource, bucket_spec: BucketSpec, *, token_budget: int | None = None, num_bins: int = 10
) -> BatchingEfficiencyReport:
    """Return the full report on these lengths and buckets; the default budget is eight of the longest rows."""
    table = as_lengths(lengths)
    analysis = analyze_bucket_efficiency(table, bucket_spec)
    budget = token_budget or 8 * bucket_spec.overflow_max
    if budget < bucket_spec.overflow_max:
        raise UsageError(f"token_budget={budget} must be at least the longest length {bucket_spec.overflow_max}")
    longest = bucket_spec.overflow_max
    goals = list(OptimizationGoal)
    suggestions = tuple(
        suggest_bucket_edges(table, bucket_spec.num_buckets, goal, max_length=longest) for goal in goals
    )
    layouts = compare_layouts(table.lengths, bucket_spec, budget, suggested=suggestions[0])
    return BatchingEfficiencyReport(
        length_histogram=compute_length_histogram(table, num_bins=num_bins),
        bucket_analysis=analysis,
        suggestions=suggestions,
        layouts=layouts,
        recommendations=_advice(analysis, layouts, suggestions[0]),
        token_budget=budget,
        total_samples=len(table),
        total_tokens=sum(one.total_tokens for one in analysis.buckets),
        total_padded=sum(one.padded_tokens for one in analysis.buckets),
        overall_efficiency=analysis.overall_efficiency,
    )


def compare_layouts(
    lengths: NDArray[np.int32], bucket_spec: BucketSpec, token_budget: int, *, suggested: BucketSuggestion
) -> tuple[LayoutCost, ...]:
    """Return the cost of an epoch with these buckets, the suggested ones, sorted windows, and packs.

    Windows and packs are formed from at most 131,072 samples, drawn at random, and scaled up.
    """
    kept = lengths[lengths <= bucket_spec.overflow_max]
    if not len(kept):
        raise UsageError(f"no sample fits the buckets up to {bucket_spec.overflow_max}")
    probe = kept[permutation(len(kept), 0)[:_PROBE_SAMPLES]]
    scale = len(kept) / len(probe)
    better = BucketSpec(edges=suggested.edges)
    return (
        _bucket_cost("buckets", kept, bucket_spec, token_budget),
        _bucket_cost("suggested buckets", kept, better, token_budget),
        _window_cost(probe, bucket_spec, token_budget, scale),
        _pack_cost(probe, bucket_spec.overflow_max, token_budget, scale),
    )


def _bucket_cost(name: str, lengths: NDArray[np.int32], spec: BucketSpec, budget: int) -> LayoutCost:
    bounds = spec.upper_bounds
    samples = np.bincount(spec.bucket_ids(lengths), minlength=spec.num_buckets)
    rows = budget // bounds  # of a full batch of each bucket
    batches = -(-samples // rows)
    # All batches of a bucket are full except its last one.
    sizes, lengths_padded = np.repeat(rows, batches), np.repeat(bounds, batches)
    last = np.cumsum(batches)[batches > 0] - 1
    sizes[last] -= (batches * rows - samples)[batches > 0]
    tokens = sizes * lengths_padded
    return _measured(name, lengths, tokens, tokens * lengths_padded)


def _window_cost(lengths: NDArray[np.int32], spec: BucketSpec, budget: int, scale: float) -> LayoutCost:
    config = BatchingConfig(token_budget=budget, bucket_edges=spec.edges, overflow_max=spec.overflow_max)
    batches = fill_batches(Items(lengths), config, seed=(0, 0))
    tokens = np.diff(batches.offsets) * batches.max_len
    return _measured("sorted windows", lengths, tokens, tokens * batches.max_len, scale)


def _pack_cost(lengths: NDArray[np.int32], longest: int, budget: int, scale: float) -> LayoutCost:
    packs = pack_decreasing(lengths, longest)
    rows = budget // longest
    squares = np.add.reduceat(lengths[packs.order].astype(np.int64) ** 2, packs.offsets[:-1])
    begins = np.arange(0, len(squares), rows)
    tokens = np.diff(begins, append=len(squares)) * longest
    return _measured("packed", lengths, tokens, np.add.reduceat(squares, begins), scale)


def _measured(
    name: str, lengths: NDArray[np.int32], tokens: NDArray[np.int64], squares: NDArray[np.int64], scale: float = 1.0
) -> LayoutCost:
    """Return the cost of batches with these tokens with padding and squared lengths, both [B]."""
    return LayoutCost(
        name=name,
        batches=round(len(tokens) * scale),
        padded_tokens=round(int(tokens.sum()) * scale),
        efficiency=int(lengths.sum(dtype=np.int64)) / int(tokens.sum()),
        squared_lengths=round(int(squares.sum()) * scale),
        peak_tokens=int(tokens.max()),
        peak_squared_lengths=int(squares.max()),
    )


def _advice(analysis: BucketAnalysis, layouts: tuple[LayoutCost, ...], suggested: BucketSuggestion) -> tuple[str, ...]:
    """Return recommendations with their gain in steps and their cost in memory."""
    now, better, windows, packed = layouts
    advice = []
    if suggested.estimated_efficiency > analysis.overall_efficiency + 0.01:
        edges = ",".join(map(str, suggested.edges))
        advice.append(
            f"Edges {edges} need {_fewer(better.padded_tokens, now.padded_tokens)} tokens than these buckets."
        )
    if windows.batches < now.batches:
        advice.append(
            f"Sorted windows (mode throughput) take {windows.batches} steps instead of {now.batches} "
            f"({_fewer(windows.batches, now.batches)}), at most {windows.peak_tokens} tokens per step."
        )
    if packed.batches < 0.98 * windows.batches:
        advice.append(
            f"Packing takes {packed.batches} steps ({_fewer(packed.batches, windows.batches)} than sorted windows), "
            f"each of {packed.peak_tokens} tokens, and needs an attention mask that separates segments."
        )
    if analysis.empty_buckets:
        advice.append(f"{analysis.empty_buckets} buckets are empty; remove their edges.")
    if analysis.num_left_out:
        advice.append(f"{analysis.num_left_out} samples are longer than every bucket; choose an over-long policy.")
    return tuple(advice) or ("No other layout is much better than these buckets.",)


def _fewer(new: float, old: float) -> str:
    return f"{100 * (1 - new / old):.0f}% fewer"


def visualize_buckets(lengths: LengthSource, bucket_spec: BucketSpec, width: int = 50) -> str:
    """Return one bar of up to `width` characters per bucket, real tokens as #, padding as dots."""
    analysis = analyze_bucket_efficiency(lengths, bucket_spec)
    most = max(one.padded_tokens for one in analysis.buckets)
    lines = []
    for one in analysis.buckets:
        bar = round(one.padded_tokens / most * width) if most else 0
        real = round(one.efficiency * bar)
        picture = "#" * real + "." * (bar - real)
        lines.append(f"{one.min_length:>6} -{one.max_length:>6} | {picture:<{width}} {one.sample_count} samples")
    return "\n".join([*lines, "# real tokens, . padding"])
