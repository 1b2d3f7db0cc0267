"""Lengths looked at: histograms, what buckets cost, where edges belong."""

from query_mutator.batching.analyze.edges import BucketSuggestion, OptimizationGoal, suggest_bucket_edges
from query_mutator.batching.analyze.efficiency import (
    BatchingEfficiencyReport,
    BucketAnalysis,
    BucketEfficiency,
    LayoutCost,
    analyze_bucket_efficiency,
    compare_layouts,
    create_efficiency_report,
    visualize_buckets,
)
from query_mutator.batching.analyze.histogram import HistogramBin, LengthHistogram, compute_length_histogram

__all__ = [
    "BatchingEfficiencyReport",
    "BucketAnalysis",
    "BucketEfficiency",
    "BucketSuggestion",
    "HistogramBin",
    "LayoutCost",
    "LengthHistogram",
    "OptimizationGoal",
    "analyze_bucket_efficiency",
    "compare_layouts",
    "compute_length_histogram",
    "create_efficiency_report",
    "suggest_bucket_edges",
    "visualize_buckets",
]
