"""Streams of training samples: from files, from puzzle gyms, and from a replay buffer.

Offers OfflineDatasetStream, GymEpisodeStream (telnet, TCP, WebSocket), MockGymStream and `open_stream`; ReplayBuffer
with prioritized draws; RollingBatchPlanWindow, which plans batches over a buffer while samples arrive. Imports
`planning`, `generation` and `core`.
"""

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

__all__ = [
    "AsyncOfflineDatasetStream", "AsyncSampleStream", "BufferEvictionPolicy", "BufferSnapshot", "DifficultyProfile",
    "EpisodeStatus", "GymClient", "GymConfig", "GymConnectionError", "GymEpisode", "GymEpisodeStream", "GymError",
    "GymOutputMode", "GymProtocolError", "GymStep", "GymTransport", "HintPolicy", "MockGymStream",
    "OfflineDatasetStream", "Policy", "PuzzleCompletion", "PuzzleDifficulty", "PuzzleEpisode", "PuzzleGame",
    "PuzzleObservation", "PuzzleResult", "ReplayBuffer", "ReplayBufferConfig", "ReplayDraw", "RollingBatchPlanWindow",
    "SampleSource", "SampleStream", "StreamConfig", "StreamMetrics", "StreamSample", "StreamState",
    "TelnetClientConfig", "TelnetGymClient", "WindowConfig", "WindowState", "open_stream",
]  # fmt: skip
