"""Batch plans: the microbatches of every epoch, built once, saved, verified, sharded and resumed; and packs."""

from query_mutator.batching.planning.batch_plan import (
    BatchPlan,
    BatchPlanMeta,
    EpochPlan,
    MicrobatchSpec,
    check_plan,
    load_batch_plan,
    load_batch_plan_async,
    save_batch_plan,
    save_batch_plan_async,
)
from query_mutator.batching.planning.builder import BatchPlanBuilder, verify_batch_plan
from query_mutator.batching.planning.packing import (
    PackedSequence,
    PackingConfig,
    PackingMetrics,
    PackingMode,
    SequenceToPack,
    compute_packing_metrics,
    create_segment_attention_mask,
    pack_sequences,
)
from query_mutator.batching.planning.predictability import (
    BatchFingerprint,
    BatchingConfig,
    BatchingMode,
    PadPolicy,
    compute_batch_fingerprint,
    compute_batch_fingerprint_async,
    load_fingerprint,
    load_fingerprint_async,
    save_fingerprint,
    save_fingerprint_async,
    verify_batch_fingerprint,
)

__all__ = [
    "BatchFingerprint", "BatchPlan", "BatchPlanBuilder", "BatchPlanMeta", "BatchingConfig", "BatchingMode",
    "EpochPlan", "MicrobatchSpec", "PackedSequence", "PackingConfig", "PackingMetrics", "PackingMode", "PadPolicy",
    "SequenceToPack", "check_plan", "compute_batch_fingerprint", "compute_batch_fingerprint_async",
    "compute_packing_metrics", "create_segment_attention_mask", "load_batch_plan", "load_batch_plan_async",
    "load_fingerprint", "load_fingerprint_async", "pack_sequences", "save_batch_plan", "save_batch_plan_async",
    "save_fingerprint", "save_fingerprint_async", "verify_batch_fingerprint", "verify_batch_plan",
]  # fmt: skip
