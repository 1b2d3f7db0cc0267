"""Analysis of sample lengths: histograms, the padding of a choice of buckets, better bucket edges.

Offers compute_length_histogram, analyze_bucket_efficiency, create_efficiency_report and suggest_bucket_edges. Imports
`core` and the bin packing of `planning`.
"""

__all__ = ["edges", "efficiency", "histogram"]
