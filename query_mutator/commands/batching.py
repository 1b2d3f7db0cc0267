"""`qm data batching histogram|analyze|suggest`: analyze batches by a length cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from query_mutator.batching import (
    BucketSpec,
    LengthCache,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
)
from query_mutator.batching.records import settings_errors
from query_mutator.cli.common import JsonFlags, longest_allowed, parse_edges, show
from query_mutator.cli.flags import JsonTo

if TYPE_CHECKING:
    from query_mutator.batching import LengthCache

GOALS = {"waste": "minimize_waste", "balance": "balance_buckets", "memory": "minimize_memory"}


@dataclass(frozen=True, kw_only=True)
class CacheFlags(JsonFlags):
    """Base of the commands that read a length cache."""

    cache: Annotated[str, arg(aliases=["-c"])]
    """Length cache, as `qm data lengths build` writes it."""

    def load(self) -> LengthCache:
        """Return the cache."""
        return LengthCache.load_sync(self.cache)


@dataclass(frozen=True, kw_only=True)
class HistogramFlags(CacheFlags):
    """Draw the distribution of lengths."""

    bins: int = 15
    """Number of bins."""
    width: int = 50
    """Characters of the longest bar."""


@dataclass(frozen=True, kw_only=True)
class AnalyzeFlags(CacheFlags):
    """Report the cost of buckets and of other ways of batching, with advice."""

    bucket_edges: str = "128,256,512"
    """Longest length of each bucket, as a,b,c."""
    overflow_max: int | None = None
    """Longest length allowed; by default 2048, or the last edge if that is longer."""
    token_budget: int | None = None
    """Tokens of a batch; by default eight of the longest rows."""
    json: Annotated[JsonTo, arg(aliases=["--out", "--output", "-o"])] = None
    """Write the report as JSON to FILE; without FILE, or with -, print it in place of text."""

    def __post_init__(self) -> None:
        longest_allowed(self.overflow_max, parse_edges(self.bucket_edges))


@dataclass(frozen=True, kw_only=True)
class SuggestFlags(CacheFlags):
    """Suggest bucket edges."""

    num_buckets: Annotated[int, arg(aliases=["-n"])] = 4
    """Number of buckets."""
    goal: Annotated[Literal["waste", "balance", "memory"], arg(aliases=["-g"])] = "waste"
    """Least padding, equal shares, or the smallest attention scores."""
    max_length: int = 2048
    """Longest length that fits a bucket."""
    multiple: int = 1
    """Edges are multiples of this."""


def show_histogram(flags: HistogramFlags) -> None:
    """Print a bar for each bin, and percentiles."""
    histogram = compute_length_histogram(flags.load(), num_bins=flags.bins)
    show(flags, histogram.model_dump(), histogram.to_ascii(flags.width))


def analyze_buckets(flags: AnalyzeFlags) -> None:
    """Print the efficiency report."""
    edges = parse_edges(flags.bucket_edges)
    with settings_errors():
        spec = BucketSpec(edges=edges, overflow_max=longest_allowed(flags.overflow_max, edges))
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
