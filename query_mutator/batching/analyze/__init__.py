"""Analysis of sample lengths: histograms, the padding of a choice of buckets, better bucket edges.

Imports `core` and the bin packing of `planning`.
"""

from query_mutator.batching.analyze.edges import BucketSuggestion, OptimizationGoal, suggest_bucket_edges
from query_mutator.batching.analyze.efficiency import (
    BatchingEfficiencyReport,
    BucketAnalysis,
    BucketEfficiency,
    analyze_bucket_efficiency,
    create_efficiency_report,
    visualize_buckets,
)
from query_mutator.batching.analyze.histogram import HistogramBin, LengthHistogram, compute_length_histogram

__all__ = [
    "BatchingEfficiencyReport", "BucketAnalysis", "BucketEfficiency", "BucketSuggestion", "HistogramBin",
    "LengthHistogram", "OptimizationGoal", "analyze_bucket_efficiency", "compute_length_histogram",
    "create_efficiency_report", "suggest_bucket_edges", "visualize_buckets",
]  # fmt: skip
