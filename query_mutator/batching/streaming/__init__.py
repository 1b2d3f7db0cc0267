"""Streams of training samples: from files, gyms, a replay buffer; batches planned as samples arrive."""

from query_mutator.batching.streaming.gym_stream import GymEpisodeStream, HintPolicy, MockGymStream, Policy
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
from query_mutator.batching.streaming.offline_stream import AsyncOfflineDatasetStream, OfflineDatasetStream
from query_mutator.batching.streaming.protocols import AsyncSampleStream, SampleStream
from query_mutator.batching.streaming.replay_buffer import (
    BufferEvictionPolicy,
    BufferSnapshot,
    ReplayBuffer,
    ReplayBufferConfig,
)
from query_mutator.batching.streaming.rolling_window import RollingBatchPlanWindow, WindowConfig, WindowState
from query_mutator.batching.streaming.telnet_client import GymClient, PuzzleEpisode, TelnetGymClient
from query_mutator.batching.streaming.types import (
    EpisodeStatus,
    SampleSource,
    StreamConfig,
    StreamMetrics,
    StreamSample,
    StreamState,
)

__all__ = [
    "AsyncOfflineDatasetStream", "AsyncSampleStream", "BufferEvictionPolicy", "BufferSnapshot", "DifficultyProfile",
    "EpisodeStatus", "GymClient", "GymConfig", "GymConnectionError", "GymEpisode", "GymEpisodeStream", "GymError",
    "GymOutputMode", "GymProtocolError", "GymStep", "GymTransport", "HintPolicy", "MockGymStream",
    "OfflineDatasetStream", "Policy", "PuzzleCompletion", "PuzzleDifficulty", "PuzzleEpisode", "PuzzleGame",
    "PuzzleObservation", "PuzzleResult", "ReplayBuffer", "ReplayBufferConfig", "RollingBatchPlanWindow",
    "SampleSource", "SampleStream", "StreamConfig", "StreamMetrics", "StreamSample", "StreamState",
    "TelnetClientConfig", "TelnetGymClient", "WindowConfig", "WindowState",
]  # fmt: skip
