"""From token lengths to reproducible, full batches.

All public names are imported from here: samples, length caches, buckets and the token-budget sampler, plans, packs and
shards, batch stores, analysis, and streams. The folders below hold the code. Importing this package does not import
torch; the names in TORCH_NAMES import it on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from query_mutator.batching.analyze import (
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
from query_mutator.batching.core import (
    BatchingConfig,
    BatchingMode,
    BatchMetrics,
    BatchShapeHistogram,
    BatchSpec,
    BucketId,
    BucketSpec,
    BucketStats,
    OverlongPolicy,
    PadPolicy,
    TokenBudgetBatchSampler,
)
from query_mutator.batching.distributed import (
    CheckpointPosition,
    DistributedConfig,
    compute_shard_stats,
    get_rank,
    get_world_size,
    interleave_microbatches,
    is_main_process,
    iter_from_checkpoint,
    load_checkpoint_position,
    report_shards,
    resume_shard,
    save_checkpoint_position,
    shard_batch_plan,
)
from query_mutator.batching.files import BatchFileError
from query_mutator.batching.generation import (
    BatchReader,
    BatchWriter,
    CollatedBatch,
    JsonlSamples,
    LengthCache,
    LengthEntry,
    RowTokenizer,
    TokenRow,
    collate_microbatch,
    default_collate,
    pad_sequences,
    tokenizer_fingerprint,
)
from query_mutator.batching.ids import IdTable
from query_mutator.batching.lengths import LengthTable, as_lengths
from query_mutator.batching.planning import (
    BatchFingerprint,
    BatchPlan,
    BatchPlanBuilder,
    BatchPlanMeta,
    BlockedPlan,
    EpochPlan,
    MicrobatchSpec,
    Mixture,
    PackedSequence,
    PackingConfig,
    PackingMetrics,
    PackingMode,
    Segment,
    SequenceToPack,
    ShardSpec,
    UnevenPolicy,
    build_blocked_plan,
    check_plan,
    compute_batch_fingerprint,
    compute_batch_fingerprint_async,
    compute_packing_metrics,
    create_segment_attention_mask,
    load_batch_plan,
    load_batch_plan_async,
    load_fingerprint,
    load_fingerprint_async,
    mix_datasets,
    pack_sequences,
    save_batch_plan,
    save_batch_plan_async,
    save_fingerprint,
    save_fingerprint_async,
    verify_batch_fingerprint,
    verify_batch_plan,
)
from query_mutator.batching.samples import (
    DatasetFingerprint,
    DatasetSource,
    DifficultyLevel,
    PreferenceSample,
    Sample,
    SampleMeta,
    SampleType,
    SampleValidationError,
    compute_dataset_fingerprint,
    load_samples,
    load_samples_async,
    save_samples,
    save_samples_async,
)
from query_mutator.batching.streaming import (
    AsyncOfflineDatasetStream,
    AsyncSampleStream,
    BufferEvictionPolicy,
    BufferSnapshot,
    DifficultyProfile,
    EpisodeStatus,
    GymClient,
    GymConfig,
    GymConnectionError,
    GymEpisode,
    GymEpisodeStream,
    GymError,
    GymOutputMode,
    GymProtocolError,
    GymStep,
    GymTransport,
    HintPolicy,
    MockGymStream,
    OfflineDatasetStream,
    Policy,
    PuzzleCompletion,
    PuzzleDifficulty,
    PuzzleEpisode,
    PuzzleGame,
    PuzzleObservation,
    PuzzleResult,
    ReplayBuffer,
    ReplayBufferConfig,
    ReplayDraw,
    RollingBatchPlanWindow,
    SampleSource,
    SampleStream,
    StreamConfig,
    StreamMetrics,
    StreamSample,
    StreamState,
    TelnetClientConfig,
    TelnetGymClient,
    WindowConfig,
    WindowState,
    open_stream,
)

TORCH_NAMES = (
    "PackedCollator", "PaddedCollator", "PlanBatchSampler", "PlanDataset", "Row", "flex_block_mask", "sdpa_block_mask",
    "varlen_kwargs",
)  # fmt: skip

__all__ = [
    "AsyncOfflineDatasetStream", "AsyncSampleStream", "BatchFileError", "BatchFingerprint", "BatchMetrics",
    "BatchPlan", "BatchPlanBuilder", "BatchPlanMeta", "BatchReader", "BatchShapeHistogram", "BatchSpec", "BatchWriter",
    "BatchingConfig", "BatchingEfficiencyReport", "BatchingMode", "BlockedPlan", "BucketAnalysis", "BucketEfficiency",
    "BucketId", "BucketSpec", "BucketStats", "BucketSuggestion", "BufferEvictionPolicy", "BufferSnapshot",
    "CheckpointPosition", "CollatedBatch",
    "DatasetFingerprint", "DatasetSource", "DifficultyLevel", "DifficultyProfile", "DistributedConfig",
    "EpisodeStatus", "EpochPlan", "GymClient", "GymConfig", "GymConnectionError", "GymEpisode", "GymEpisodeStream",
    "GymError", "GymOutputMode", "GymProtocolError", "GymStep", "GymTransport", "HintPolicy", "HistogramBin", "IdTable",
    "JsonlSamples", "LengthCache", "LengthEntry", "LengthHistogram", "LengthTable", "MicrobatchSpec", "Mixture",
    "MockGymStream", "OfflineDatasetStream", "OptimizationGoal", "OverlongPolicy", "PackedSequence", "PackingConfig",
    "PackingMetrics", "PackingMode", "PadPolicy", "Policy", "PreferenceSample", "PuzzleCompletion", "PuzzleDifficulty",
    "PuzzleEpisode", "PuzzleGame", "PuzzleObservation", "PuzzleResult", "ReplayBuffer", "ReplayBufferConfig",
    "ReplayDraw", "RollingBatchPlanWindow", "RowTokenizer", "Sample", "SampleMeta", "SampleSource", "SampleStream",
    "SampleType", "SampleValidationError", "Segment", "SequenceToPack", "ShardSpec", "StreamConfig", "StreamMetrics",
    "StreamSample", "StreamState", "TelnetClientConfig", "TelnetGymClient", "TokenBudgetBatchSampler", "TokenRow",
    "UnevenPolicy", "WindowConfig", "WindowState", "analyze_bucket_efficiency", "as_lengths", "build_blocked_plan",
    "check_plan", "collate_microbatch", "compute_batch_fingerprint", "compute_batch_fingerprint_async",
    "compute_dataset_fingerprint", "compute_length_histogram", "compute_packing_metrics", "compute_shard_stats",
    "create_efficiency_report", "create_segment_attention_mask", "default_collate", "get_rank", "get_world_size",
    "interleave_microbatches", "is_main_process", "iter_from_checkpoint", "load_batch_plan", "load_batch_plan_async",
    "load_checkpoint_position", "load_fingerprint", "load_fingerprint_async", "load_samples", "load_samples_async",
    "mix_datasets", "open_stream", "pack_sequences", "pad_sequences", "report_shards", "resume_shard",
    "save_batch_plan", "save_batch_plan_async", "save_checkpoint_position", "save_fingerprint",
    "save_fingerprint_async", "save_samples", "save_samples_async", "shard_batch_plan", "suggest_bucket_edges",
    "tokenizer_fingerprint", "verify_batch_fingerprint", "verify_batch_plan", "visualize_buckets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in TORCH_NAMES:
        return getattr(importlib.import_module("query_mutator.batching.torch_data"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
