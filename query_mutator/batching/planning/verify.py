"""Verify that a stored plan follows from its data and settings."""

from __future__ import annotations

from typing import Any

from query_mutator.batching.lengths import LengthSource
from query_mutator.batching.planning.batch_plan import BatchPlan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.mixture import Mixture
from query_mutator.errors import UsageError


def verify_batch_plan(plan: BatchPlan, lengths: LengthSource | Mixture, **inputs: Any) -> tuple[bool, str]:
    """Rebuild the plan from its own settings; return whether it is the same, and the first difference.

    `inputs` are `loss_lengths` and `groups`, if the plan was built with them.
    """
    if plan.meta.shard is not None:
        return False, "the plan is a shard; verify the whole plan"
    meta = plan.meta
    try:
        builder = BatchPlanBuilder(
            lengths, meta.config, meta.dataset_hash, meta.tokenizer_hash, meta.pack_config, **inputs
        )
    except UsageError as error:
        return False, f"no plan can be built from these lengths: {error}"
    rebuilt = builder.meta(meta.num_epochs)
    for name in ("num_samples", "lengths_hash", "inputs_hash", "overlong", "version"):
        if getattr(rebuilt, name) != getattr(meta, name):
            return False, f"{name} differs: planned {getattr(meta, name)}, now {getattr(rebuilt, name)}"
    for number, digest in plan.digests.items():
        if builder.build_epoch(number).digest != digest:
            return False, f"epoch {number} differs in order or limits"
    return True, "the plan follows from these lengths and settings"
