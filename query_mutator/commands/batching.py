"""`qm data batching histogram|analyze|suggest`: analyze batches by a length cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from query_mutator.batching import (
    BucketSpec,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
)
from query_mutator.batching.records import settings_errors
from query_mutator.bounds import Count, Million, Parallel, Threads
from query_mutator.cli.common import show
from query_mutator.cli.flags import JsonTo
from query_mutator.commands.data_flags import CacheFlags, EdgeFlags

GOALS = {"waste": "minimize_waste", "balance": "balance_buckets", "memory": "minimize_memory"}


@dataclass(frozen=True, kw_only=True)
class HistogramFlags(CacheFlags):
    """Draw the distribution of lengths."""

    bins: Parallel = 15
    """Number of bins."""
    width: Threads = 50
    """Characters of the longest bar."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags(CacheFlags, EdgeFlags):
    """Report the cost of buckets and of other ways of batching, with advice."""

    token_budget: Count | None = None
    """Tokens of a batch; by default eight of the longest rows."""
    json: Annotated[JsonTo, arg(aliases=["--out", "--output", "-o"])] = None
    """Write the report as JSON to FILE; without FILE, or with -, print it in place of text."""


@dataclass(frozen=True, kw_only=True)
class SuggestFlags(CacheFlags):
    """Suggest bucket edges."""

    num_buckets: Annotated[Parallel, arg(aliases=["-n"])] = 4
    """Number of buckets."""
    goal: Annotated[Literal["waste", "balance", "memory"], arg(aliases=["-g"])] = "waste"
    """Least padding, equal shares, or the smallest attention scores."""
    max_length: Count = 2048
    """Longest length that fits a bucket."""
    multiple: Million = 1
    """Edges are multiples of this."""


def show_histogram(flags: HistogramFlags) -> None:
    """Print a bar for each bin, and percentiles."""
    histogram = compute_length_histogram(flags.load(), num_bins=flags.bins)
    show(flags, histogram.model_dump(), histogram.to_ascii(flags.width))


def analyze_buckets(flags: AnalyzeFlags) -> None:
    """Print the efficiency report."""
    with settings_errors():
        spec = BucketSpec(edges=flags.edges, overflow_max=flags.longest)
    report = create_efficiency_report(flags.load(), spec, token_budget=flags.token_budget)
    show(flags, report.model_dump(mode="json"), report.to_ascii())


def suggest_edges(flags: SuggestFlags) -> None:
    """Print edges and their padding efficiency."""
    found = suggest_bucket_edges(
        flags.load(), flags.num_buckets, GOALS[flags.goal], flags.max_length, multiple=flags.multiple
    )
    edges = ",".join(map(str, found.edges))
    lines = [f"--bucket-edges {edges} --overflow-max {found.overflow_max}", found.rationale]
    lines.append(f"padding efficiency {found.estimated_efficiency:.1%}")
    if found.num_left_out:
        lines.append(f"{found.num_left_out} samples are longer than --max-length {flags.max_length}")
    show(flags, found.model_dump(mode="json"), "\n".join(lines))
