"""Histogram and statistics of the lengths of samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from query_mutator.batching.lengths import LengthSource, as_lengths
from query_mutator.batching.records import Record
from query_mutator.errors import UsageError


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
    counts = np.bincount(values)
    shortest, longest = int(np.flatnonzero(counts)[0]), len(counts) - 1
    if bin_width is None:
        number = min(num_bins, longest - shortest + 1)
        edges = [shortest + (longest + 1 - shortest) * one // number for one in range(number + 1)]
    else:
        begin = shortest // bin_width * bin_width
        edges = list(range(begin, longest + bin_width + 1, bin_width))
    # below[l] = samples shorter than l, so a bin's count is a difference of two entries.
    below = np.concatenate([[0], np.cumsum(counts)])
    in_bin = np.diff(below[np.minimum(edges, longest + 1)]).tolist()
    bins = tuple(
        HistogramBin(min_length=low, max_length=high, count=count, percentage=100 * count / len(values))
        for low, high, count in zip(edges[:-1], edges[1:], in_bin, strict=True)
    )
    return _with_statistics(bins, counts, shortest, longest)


def _with_statistics(
    bins: tuple[HistogramBin, ...], counts: NDArray[np.int64], shortest: int, longest: int
) -> LengthHistogram:
    total = int(counts.sum())
    sizes = np.arange(len(counts), dtype=np.float64)
    mean = float(counts @ sizes) / total
    ranks = {
        name: counted_percentile(counts, float(name[1:])) for name in ("p10", "p25", "p50", "p75", "p90", "p95", "p99")
    }
    return LengthHistogram(
        bins=bins,
        total_samples=total,
        min_length=shortest,
        max_length=longest,
        mean_length=mean,
        median_length=ranks["p50"],
        std_length=float(np.sqrt(counts @ (sizes - mean) ** 2 / total)),
        **ranks,
    )


def counted_percentile(counts: NDArray[np.int64], percent: float) -> float:
    """Return the interpolated percentile of lengths given the count of each, equal to `np.percentile`."""
    upto = np.cumsum(counts)
    place = percent / 100 * (int(upto[-1]) - 1)
    low, high = (int(np.searchsorted(upto, rank, side="right")) for rank in (np.floor(place), np.ceil(place)))
    return float(low + (high - low) * (place - np.floor(place)))
