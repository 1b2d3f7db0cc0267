"""From token lengths to reproducible, full batches.

All public names are imported from here: samples, length caches, buckets and the token-budget sampler, plans, packs and
shards, batch stores, analysis, and streams. The folders below hold the code. Importing this package does not import
torch; the names in TORCH_NAMES import it on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from query_mutator.batching.analyze.edges import BucketSuggestion, OptimizationGoal, suggest_bucket_edges
from query_mutator.batching.analyze.efficiency import (
    BucketAnalysis,
    analyze_bucket_efficiency,
    create_efficiency_report,
    visualize_buckets,
)
from query_mutator.batching.analyze.histogram import LengthHistogram, compute_length_histogram
from query_mutator.batching.core.buckets import BatchSpec, BucketId, BucketSpec, BucketStats
from query_mutator.batching.core.config import BatchingConfig, BatchingMode, PadPolicy
from query_mutator.batching.core.metrics import BatchMetrics, BatchShapeHistogram
from query_mutator.batching.core.overlong import OverlongPolicy
from query_mutator.batching.distributed.checkpoint import (
    CheckpointPosition,
    iter_from_checkpoint,
    load_checkpoint_position,
    resume_shard,
    save_checkpoint_position,
)
from query_mutator.batching.distributed.config import DistributedConfig, get_rank, get_world_size, is_main_process
from query_mutator.batching.distributed.sharding import (
    compute_shard_stats,
    interleave_microbatches,
    report_shards,
    shard_batch_plan,
)
from query_mutator.batching.files import BatchFileError
from query_mutator.batching.generation.collate import CollatedBatch, collate_microbatch, default_collate, pad_sequences
from query_mutator.batching.generation.io import BatchReader, BatchWriter
from query_mutator.batching.generation.jsonl import JsonlSamples
from query_mutator.batching.generation.length_cache import LengthCache, LengthEntry
from query_mutator.batching.generation.rows import RowTokenizer, TokenRow, tokenizer_fingerprint
from query_mutator.batching.ids import IdTable
from query_mutator.batching.lengths import LengthTable, as_lengths
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
from query_mutator.batching.samples.schema import (
    DatasetFingerprint,
    DatasetSource,
    DifficultyLevel,
    PreferenceSample,
    Sample,
    SampleMeta,
    SampleType,
    compute_dataset_fingerprint,
    load_samples,
    load_samples_async,
    save_samples,
    save_samples_async,
)
from query_mutator.batching.streaming.gym_client import GymClient, TelnetGymClient
from query_mutator.batching.streaming.gym_stream import GymEpisodeStream, HintPolicy, Policy
from query_mutator.batching.streaming.gym_types import (
    DifficultyProfile,
    GymConfig,
    GymConnectionError,
    GymEpisode,
    GymError,
    GymOutputMode,
    GymProtocolError,
    GymStep,
    GymTransport,
    PuzzleCompletion,
    PuzzleDifficulty,
    PuzzleGame,
    PuzzleObservation,
    PuzzleResult,
    TelnetClientConfig,
)
from query_mutator.batching.streaming.mock_stream import MockGymStream
from query_mutator.batching.streaming.offline_stream import AsyncOfflineDatasetStream, OfflineDatasetStream
from query_mutator.batching.streaming.open import open_stream
from query_mutator.batching.streaming.protocols import AsyncSampleStream, SampleStream
from query_mutator.batching.streaming.replay_buffer import ReplayBuffer
from query_mutator.batching.streaming.replay_types import (
    BufferEvictionPolicy,
    BufferSnapshot,
    ReplayBufferConfig,
    ReplayDraw,
)
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, WindowConfig, WindowState
from query_mutator.batching.streaming.telnet_client import PuzzleEpisode
from query_mutator.batching.streaming.types import (
    EpisodeStatus,
    SampleSource,
    StreamConfig,
    StreamMetrics,
    StreamSample,
    StreamState,
)

TORCH_NAMES = (
    "PackedCollator", "PaddedCollator", "PlanBatchSampler", "PlanDataset", "Row", "flex_block_mask", "sdpa_block_mask",
    "varlen_kwargs",
)  # fmt: skip

__all__ = [
    "AsyncOfflineDatasetStream", "AsyncSampleStream", "BatchFileError", "BatchFingerprint", "BatchMetrics",
    "BatchPlan", "BatchPlanBuilder", "BatchPlanMeta", "BatchReader", "BatchShapeHistogram", "BatchSpec", "BatchWriter",
    "BatchingConfig", "BatchingMode", "BlockedPlan", "BucketAnalysis", "BucketId", "BucketSpec", "BucketStats",
    "BucketSuggestion", "BufferEvictionPolicy", "BufferSnapshot", "CheckpointPosition", "CollatedBatch",
    "DatasetFingerprint", "DatasetSource", "DifficultyLevel", "DifficultyProfile", "DistributedConfig",
    "EpisodeStatus", "EpochPlan", "GymClient", "GymConfig", "GymConnectionError", "GymEpisode", "GymEpisodeStream",
    "GymError", "GymOutputMode", "GymProtocolError", "GymStep", "GymTransport", "HintPolicy", "IdTable",
    "JsonlSamples", "LengthCache", "LengthEntry", "LengthHistogram", "LengthTable", "MicrobatchSpec", "Mixture",
    "MockGymStream", "OfflineDatasetStream", "OptimizationGoal", "OverlongPolicy", "PackedSequence", "PackingConfig",
    "PackingMetrics", "PackingMode", "PadPolicy", "Policy", "PreferenceSample", "PuzzleCompletion", "PuzzleDifficulty",
    "PuzzleEpisode", "PuzzleGame", "PuzzleObservation", "PuzzleResult", "ReplayBuffer", "ReplayBufferConfig",
    "ReplayDraw", "RollingBatchPlanWindow", "RowTokenizer", "Sample", "SampleMeta", "SampleSource", "SampleStream",
    "SampleType", "Segment", "SequenceToPack", "ShardSpec", "StreamConfig", "StreamMetrics", "StreamSample",
    "StreamState", "TelnetClientConfig", "TelnetGymClient", "TokenBudgetBatchSampler", "TokenRow", "UnevenPolicy",
    "WindowConfig", "WindowState", "analyze_bucket_efficiency", "as_lengths", "build_blocked_plan", "check_plan",
    "collate_microbatch", "compute_batch_fingerprint", "compute_batch_fingerprint_async",
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
