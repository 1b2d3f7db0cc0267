"""Analysis of lengths: histogram, cost of buckets, better edges, a report.

python examples/batching/06_analyze.py
"""

from __future__ import annotations

import numpy as np

from query_mutator.batching import (
    BucketSpec,
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
    visualize_buckets,
)


def main() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 0.9, 20_000), 1, 2048).astype(int)
    print(compute_length_histogram(lengths, num_bins=12).to_ascii(width=40))
    spec = BucketSpec(edges=(128, 256, 512), overflow_max=2048)
    print(f"\n{analyze_bucket_efficiency(lengths, spec).to_ascii()}\n\n{visualize_buckets(lengths, spec, width=40)}\n")
    for goal in OptimizationGoal:
        suggestion = suggest_bucket_edges(lengths, num_buckets=4, goal=goal)
        better = analyze_bucket_efficiency(lengths, BucketSpec(edges=suggestion.edges))
        print(f"{goal.value:<16} {suggestion.edges}: {better.overall_efficiency:.1%} real tokens")
        print(f"{'':<16} {suggestion.rationale}")
    report = create_efficiency_report(lengths, spec)
    print("\n" + "\n".join(f"- {one}" for one in report.recommendations))


if __name__ == "__main__":
    main()
