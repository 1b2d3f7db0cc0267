"""Costs of lengths and buckets: histograms, padding, better edges, reports."""

from query_mutator.batching.analyze.efficiency import (
    BatchingEfficiencyReport,
    BucketAnalysis,
    BucketEfficiency,
    BucketSuggestion,
    HistogramBin,
    LengthHistogram,
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
    visualize_buckets,
)

__all__ = [
    "BatchingEfficiencyReport", "BucketAnalysis", "BucketEfficiency", "BucketSuggestion", "HistogramBin",
    "LengthHistogram", "OptimizationGoal", "analyze_bucket_efficiency", "compute_length_histogram",
    "create_efficiency_report", "suggest_bucket_edges", "visualize_buckets",
]  # fmt: skip
