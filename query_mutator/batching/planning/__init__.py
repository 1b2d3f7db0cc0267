"""Batch plans: the microbatches of every epoch, built once, saved, verified, sharded and resumed.

Offers BatchPlanBuilder, BatchPlan, TokenBudgetBatchSampler, packing, mixtures and groups of samples, fingerprints, and
the files of a plan. Imports `core`, and offers its settings too.
"""

from query_mutator.batching.core.config import BatchingConfig, BatchingMode, PadPolicy
from query_mutator.batching.planning.batch_plan import BatchPlan, BatchPlanMeta
from query_mutator.batching.planning.blocks import BlockedPlan, build_blocked_plan
from query_mutator.batching.planning.builder import BatchPlanBuilder, verify_batch_plan
from query_mutator.batching.planning.epoch_plan import EpochPlan
from query_mutator.batching.planning.fingerprint import (
    BatchFingerprint,
    compute_batch_fingerprint,
    compute_batch_fingerprint_async,
    load_fingerprint,
    load_fingerprint_async,
    save_fingerprint,
    save_fingerprint_async,
    verify_batch_fingerprint,
)
from query_mutator.batching.planning.layout import create_segment_attention_mask
from query_mutator.batching.planning.microbatch import MicrobatchSpec
from query_mutator.batching.planning.mixture import Mixture, mix_datasets
from query_mutator.batching.planning.packing import (
    PackedSequence,
    PackingConfig,
    PackingMetrics,
    PackingMode,
    SequenceToPack,
    compute_packing_metrics,
    pack_sequences,
)
from query_mutator.batching.planning.plan_files import (
    check_plan,
    load_batch_plan,
    load_batch_plan_async,
    save_batch_plan,
    save_batch_plan_async,
)
from query_mutator.batching.planning.sampler import TokenBudgetBatchSampler
from query_mutator.batching.planning.sharding import Segment, ShardSpec, UnevenPolicy

__all__ = [
    "BatchFingerprint", "BatchPlan", "BatchPlanBuilder", "BatchPlanMeta", "BatchingConfig", "BatchingMode",
    "BlockedPlan", "EpochPlan", "MicrobatchSpec", "Mixture", "PackedSequence", "PackingConfig", "PackingMetrics",
    "PackingMode", "PadPolicy", "Segment", "SequenceToPack", "ShardSpec", "TokenBudgetBatchSampler", "UnevenPolicy",
    "build_blocked_plan", "check_plan", "compute_batch_fingerprint", "compute_batch_fingerprint_async",
    "compute_packing_metrics", "create_segment_attention_mask", "load_batch_plan", "load_batch_plan_async",
    "load_fingerprint", "load_fingerprint_async", "mix_datasets", "pack_sequences", "save_batch_plan",
    "save_batch_plan_async", "save_fingerprint", "save_fingerprint_async", "verify_batch_fingerprint",
    "verify_batch_plan",
]  # fmt: skip
