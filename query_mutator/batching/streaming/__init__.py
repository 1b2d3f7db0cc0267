"""Streams of training samples: from files, from puzzle gyms, and from a replay buffer.

Offers OfflineDatasetStream, GymEpisodeStream (telnet, TCP, WebSocket), MockGymStream and `open_stream`; ReplayBuffer
with prioritized draws; RollingBatchPlanWindow, which plans batches over a buffer while samples arrive. Imports
`planning`, `generation` and `core`; the server for these clients is `query_mutator.batching.gym`.
"""

__all__ = [
    "connection", "gym_client", "gym_hints", "gym_replies", "gym_stream", "gym_types", "lowest_first", "mock_stream",
    "offline_stream", "open", "protocols", "replay_buffer", "replay_types", "rolling_window", "sample_columns",
    "sample_store", "stream_base", "telnet", "telnet_client", "types", "wires",
]  # fmt: skip
