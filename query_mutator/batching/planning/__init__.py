"""Batch plans: the microbatches of every epoch, built once, saved, verified, sharded and resumed.

Offers BatchPlanBuilder, BatchPlan, TokenBudgetBatchSampler, packing, mixtures and groups of samples, fingerprints, and
the files of a plan. Imports `core`.
"""

__all__ = [
    "batch_plan", "binpacking", "blocks", "builder", "epoch_plan", "fingerprint", "groups", "layout", "microbatch",
    "mixture", "packing", "plan_files", "sampler", "sharding",
]  # fmt: skip
