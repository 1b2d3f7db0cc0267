"""Costs of lengths and buckets: a histogram, padding per bucket, better edges, and a full report."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.core.buckets import BucketSpec
from query_mutator.batching.lengths import LengthSource, as_lengths
from query_mutator.batching.records import Record
from query_mutator.errors import UsageError

PERCENTILES = (10, 25, 50, 75, 90, 95, 99)


class HistogramBin(Record):
    """Samples of at least `min_length` and less than `max_length` tokens; `percentage` is of all samples."""

    min_length: int
    max_length: int
    count: int
    percentage: float

    @property
    def label(self) -> str:
        """Shortest and longest length of the bin."""
        return f"{self.min_length}-{self.max_length - 1}"


class LengthHistogram(Record):
    """Bins and statistics of lengths; percentiles are interpolated."""

    bins: tuple[HistogramBin, ...]
    total_samples: int = Field(ge=0)
    min_length: int
    max_length: int
    mean_length: float
    median_length: float
    std_length: float
    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float

    def to_ascii(self, width: int = 50) -> str:
        """Return one line per bin with a bar of up to `width` characters, and the statistics below."""
        most = max((one.count for one in self.bins), default=0)
        labels = max((len(one.label) for one in self.bins), default=0)
        counts = len(str(most))
        lines = [
            f"{one.label:>{labels}} | {_bar(one.count, most, width):<{width}} {one.count:>{counts}} "
            f"{one.percentage:5.1f}%"
            for one in self.bins
        ]
        percentiles = ", ".join(
            f"{name} {getattr(self, name):.0f}" for name in ("p25", "p50", "p75", "p90", "p95", "p99")
        )
        lines.append(f"{self.total_samples} samples, {self.min_length} to {self.max_length} tokens, ")
        lines[-1] += f"mean {self.mean_length:.1f}, deviation {self.std_length:.1f}"
        lines.append(percentiles)
        return "\n".join(lines)


def _bar(count: int, most: int, width: int) -> str:
    return "#" * (max(1, round(count / most * width)) if count else 0)


def compute_length_histogram(
    lengths: LengthSource, num_bins: int = 10, bin_width: int | None = None
) -> LengthHistogram:
    """Return `num_bins` bins of nearly equal width (fewer when there are fewer lengths), or bins of `bin_width`."""
    values = as_lengths(lengths).lengths
    if not len(values):
        raise UsageError("there are no lengths to count; check the input")
    if num_bins < 1 or (bin_width is not None and bin_width < 1):
        raise UsageError(f"num_bins={num_bins} and bin_width={bin_width} must be at least 1")
    shortest, longest = int(values.min()), int(values.max())
    if bin_width is None:
        number = min(num_bins, longest - shortest + 1)
        edges = [shortest + (longest + 1 - shortest) * one // number for one in range(number + 1)]
    else:
        begin = shortest // bin_width * bin_width
        edges = list(range(begin, longest + bin_width + 1, bin_width))
    in_bin = np.histogram(values, [*edges[:-1], max(edges[-1], longest + 1)])[0].tolist()
    bins = tuple(
        HistogramBin(min_length=low, max_length=high, count=count, percentage=100 * count / len(values))
        for low, high, count in zip(edges[:-1], edges[1:], in_bin, strict=True)
    )
    ranks = np.percentile(values, PERCENTILES).tolist()
    return LengthHistogram(
        bins=bins,
        total_samples=len(values),
        min_length=shortest,
        max_length=longest,
        mean_length=float(values.mean()),
        median_length=float(np.median(values)),
        std_length=float(values.std()),
        **{f"p{percent}": rank for percent, rank in zip(PERCENTILES, ranks, strict=True)},
    )


# --- edges -----------------------------------------------------------------------------------------------------------


class OptimizationGoal(StrEnum):
    """Objective of the edges."""

    MINIMIZE_WASTE = "minimize_waste"  # fewest padding tokens
    BALANCE_BUCKETS = "balance_buckets"  # equally many samples in each bucket
    MINIMIZE_MEMORY = "minimize_memory"  # smallest sum of squared padded lengths: the attention scores of all rows


class BucketSuggestion(Record):
    """Edges up to the longest length covered, and `max_length` as `overflow_max`; `num_left_out` samples are longer."""

    edges: tuple[int, ...]
    overflow_max: int
    rationale: str
    estimated_efficiency: float = Field(ge=0, le=1)
    optimization_goal: OptimizationGoal
    num_left_out: int = 0


def suggest_bucket_edges(
    lengths: LengthSource,
    num_buckets: int = 4,
    goal: OptimizationGoal | str = OptimizationGoal.MINIMIZE_WASTE,
    max_length: int | None = None,
) -> BucketSuggestion:
    """Return the best `num_buckets` edges (fewer if there are fewer lengths) for a goal."""
    if num_buckets < 1:
        raise UsageError(f"num_buckets={num_buckets} must be at least 1")
    values = as_lengths(lengths).lengths
    counts = np.bincount(values)
    covered = counts if max_length is None else counts[: max_length + 1]
    if not covered.any():
        raise UsageError("there are no lengths to choose edges for; raise max_length or check the input")
    goal = OptimizationGoal(goal)
    sizes = np.flatnonzero(covered)  # only lengths that occur can be optimal edges
    shares = covered[sizes]
    if goal is OptimizationGoal.BALANCE_BUCKETS:
        chosen = _quantiles(shares, num_buckets)
    else:
        weights = sizes if goal is OptimizationGoal.MINIMIZE_WASTE else sizes**2
        chosen = _optimal(weights.astype(np.float64), np.cumsum(shares), num_buckets)
    edges = sizes[chosen]
    padded = int(np.diff(np.cumsum(shares)[chosen], prepend=0) @ edges)
    return BucketSuggestion(
        edges=tuple(edges.tolist()),
        overflow_max=max(int(edges[-1]), max_length or 0),
        rationale=_RATIONALES[goal].format(edges=len(edges), lengths=len(sizes)),
        estimated_efficiency=int(covered @ np.arange(len(covered))) / padded,
        optimization_goal=goal,
        num_left_out=int(counts.sum() - covered.sum()),
    )


_RATIONALES = {
    OptimizationGoal.MINIMIZE_WASTE: "dynamic programming over {lengths} lengths: no other {edges} edges pad less",
    OptimizationGoal.BALANCE_BUCKETS: "quantiles over {lengths} lengths: {edges} buckets of about equally many samples",
    OptimizationGoal.MINIMIZE_MEMORY: "dynamic programming over {lengths} lengths: no other {edges} edges need fewer "
    "attention scores for the padded rows",
}


def _quantiles(shares: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """Return the positions of edges with as equal shares of the samples as the lengths allow."""
    upto = np.cumsum(shares)
    wanted = upto[-1] * np.arange(1, num_buckets + 1) / num_buckets
    above = np.searchsorted(upto, wanted)
    below = np.maximum(above - 1, 0)
    nearest = np.where(wanted - upto[below] < upto[above] - wanted, below, above)
    return np.unique(np.append(nearest[:-1], len(shares) - 1))


def _optimal(weights: NDArray[np.float64], upto: NDArray[np.int64], num_buckets: int) -> NDArray[np.int64]:
    """Return the positions of edges that minimize the sum over buckets of weight at the edge * samples in the bucket.

    Dynamic programming: best[j] = min over i < j of before[i] + weights[j] * (upto[j] - upto[i]).
    """
    best = weights * upto
    choices: list[NDArray[np.int64]] = []
    for _ in range(min(num_buckets, len(weights)) - 1):
        best, chosen = _one_more_edge(weights, upto, best)
        choices.append(chosen)
    # Walk back from the last edge through the choices of each round.
    places = [len(weights) - 1]
    for chosen in reversed(choices):
        if chosen[places[-1]] >= 0:
            places.append(int(chosen[places[-1]]))
    return np.array(places[::-1], np.int64)


def _one_more_edge(
    weights: NDArray[np.float64], upto: NDArray[np.int64], before: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the minimal cost up to each position with one more edge, and the position of the edge before it.

    The best edge before a position never moves back as the position rises, so the middle position halves the choices
    of those on either side of it (divide and conquer).
    """
    best, chosen = before.copy(), np.full(len(before), -1)
    spans = [(1, len(before), 0, len(before))]  # positions, and where their edge before may be
    while spans:
        first, end, low, high = spans.pop()
        if first >= end:
            continue
        place = (first + end) // 2
        choices = slice(low, min(high, place))
        costs = before[choices] + weights[place] * (upto[place] - upto[choices])
        at = int(costs.argmin())
        if costs[at] < best[place]:
            best[place], chosen[place] = costs[at], low + at
        spans += [(first, place, low, low + at + 1), (place + 1, end, low + at, high)]
    return best, chosen


# --- buckets ---------------------------------------------------------------------------------------------------------


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


class BatchingEfficiencyReport(Record):
    """Histogram, buckets, suggestions for the three goals, and advice."""

    length_histogram: LengthHistogram
    bucket_analysis: BucketAnalysis
    suggestions: tuple[BucketSuggestion, ...]
    recommendations: tuple[str, ...]
    total_samples: int
    total_tokens: int
    total_padded: int
    overall_efficiency: float

    def to_ascii(self) -> str:
        """Return the report as text."""
        edges = [
            f"{one.optimization_goal.value:<16} {one.estimated_efficiency:>6.1%}  {','.join(map(str, one.edges))}"
            for one in self.suggestions
        ]
        advice = [f"- {one}" for one in self.recommendations]
        parts = (self.length_histogram.to_ascii(), self.bucket_analysis.to_ascii(), "\n".join(edges), "\n".join(advice))
        return "\n\n".join(parts)


def create_efficiency_report(
    lengths: LengthSource, bucket_spec: BucketSpec, *, num_bins: int = 10
) -> BatchingEfficiencyReport:
    """Return the full report on these lengths and buckets."""
    table = as_lengths(lengths)
    analysis = analyze_bucket_efficiency(table, bucket_spec)
    suggestions = tuple(
        suggest_bucket_edges(table, bucket_spec.num_buckets, goal, max_length=bucket_spec.overflow_max)
        for goal in OptimizationGoal
    )
    return BatchingEfficiencyReport(
        length_histogram=compute_length_histogram(table, num_bins=num_bins),
        bucket_analysis=analysis,
        suggestions=suggestions,
        recommendations=_advice(analysis, suggestions[0]),
        total_samples=len(table),
        total_tokens=sum(one.total_tokens for one in analysis.buckets),
        total_padded=sum(one.padded_tokens for one in analysis.buckets),
        overall_efficiency=analysis.overall_efficiency,
    )


def _advice(analysis: BucketAnalysis, suggested: BucketSuggestion) -> tuple[str, ...]:
    """Return recommendations with their gain."""
    advice = []
    if suggested.estimated_efficiency > analysis.overall_efficiency + 0.01:
        edges = ",".join(map(str, suggested.edges))
        fewer = 1 - analysis.overall_efficiency / suggested.estimated_efficiency
        advice.append(f"Edges {edges} need {fewer:.0%} fewer tokens than these buckets.")
    if analysis.overall_efficiency < 0.9:
        advice.append("Sorted windows (mode throughput) and packs need fewer still: compare them with `qm bench`.")
    if analysis.empty_buckets:
        advice.append(f"{analysis.empty_buckets} buckets are empty; remove their edges.")
    if analysis.num_left_out:
        advice.append(f"{analysis.num_left_out} samples are longer than every bucket; choose an over-long policy.")
    return tuple(advice) or ("These buckets are nearly as good as any.",)


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
