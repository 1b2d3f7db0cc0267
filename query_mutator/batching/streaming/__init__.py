"""Samples as they come: from files, from gyms, from a replay buffer."""

from query_mutator.batching.streaming.offline_stream import AsyncOfflineDatasetStream, OfflineDatasetStream
from query_mutator.batching.streaming.protocols import AsyncSampleStream, SampleStream
from query_mutator.batching.streaming.replay_buffer import ReplayBuffer
from query_mutator.batching.streaming.replay_types import (
    BufferEvictionPolicy,
    BufferSnapshot,
    ReplayBufferConfig,
    ReplayDraw,
)
from query_mutator.batching.streaming.types import (
    EpisodeStatus,
    SampleSource,
    StreamConfig,
    StreamMetrics,
    StreamSample,
    StreamState,
)

__all__ = [
    "AsyncOfflineDatasetStream",
    "AsyncSampleStream",
    "BufferEvictionPolicy",
    "BufferSnapshot",
    "EpisodeStatus",
    "OfflineDatasetStream",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "ReplayDraw",
    "SampleSource",
    "SampleStream",
    "StreamConfig",
    "StreamMetrics",
    "StreamSample",
    "StreamState",
]
