"""Plans, packs and what makes them reproducible."""

from query_mutator.batching.core.overlong import OverlongPolicy, OverlongReport
from query_mutator.batching.planning.batch_plan import BatchPlan, BatchPlanMeta
from query_mutator.batching.planning.blocks import BlockedPlan, build_blocked_plan
from query_mutator.batching.planning.builder import BatchPlanBuilder
from query_mutator.batching.planning.epoch_plan import EpochPlan, MicrobatchSpec, SourceCount
from query_mutator.batching.planning.mixture import Mixture, mix_datasets
from query_mutator.batching.planning.packing import (
    PackedSequence,
    PackedSequences,
    PackingConfig,
    PackingMetrics,
    PackingMode,
    SequenceToPack,
    compute_packing_metrics,
    create_segment_attention_mask,
    pack_sequences,
)
from query_mutator.batching.planning.plan_files import (
    check_plan,
    load_batch_plan,
    load_batch_plan_async,
    save_batch_plan,
    save_batch_plan_async,
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
from query_mutator.batching.planning.sharding import Segment, ShardReport, ShardSpec, UnevenPolicy
from query_mutator.batching.planning.verify import verify_batch_plan

__all__ = [
    "BatchFingerprint",
    "BatchPlan",
    "BatchPlanBuilder",
    "BatchPlanMeta",
    "BatchingConfig",
    "BatchingMode",
    "BlockedPlan",
    "EpochPlan",
    "MicrobatchSpec",
    "Mixture",
    "OverlongPolicy",
    "OverlongReport",
    "PackedSequence",
    "PackedSequences",
    "PackingConfig",
    "PackingMetrics",
    "PackingMode",
    "PadPolicy",
    "Segment",
    "SequenceToPack",
    "ShardReport",
    "ShardSpec",
    "SourceCount",
    "UnevenPolicy",
    "build_blocked_plan",
    "check_plan",
    "compute_batch_fingerprint",
    "compute_batch_fingerprint_async",
    "compute_packing_metrics",
    "create_segment_attention_mask",
    "load_batch_plan",
    "load_batch_plan_async",
    "load_fingerprint",
    "load_fingerprint_async",
    "mix_datasets",
    "pack_sequences",
    "save_batch_plan",
    "save_batch_plan_async",
    "save_fingerprint",
    "save_fingerprint_async",
    "verify_batch_fingerprint",
    "verify_batch_plan",
]
