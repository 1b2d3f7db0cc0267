"""Build the stream that a `StreamConfig` describes."""

from __future__ import annotations

from query_mutator.batching.generation.rows import Tokenizer
from query_mutator.batching.streaming.gym_stream import GymEpisodeStream, Policy
from query_mutator.batching.streaming.gym_types import GymConfig
from query_mutator.batching.streaming.mock_stream import MockGymStream
from query_mutator.batching.streaming.offline_stream import AsyncOfflineDatasetStream
from query_mutator.batching.streaming.types import SampleSource, StreamConfig
from query_mutator.errors import UsageError

__all__ = ["open_stream"]


def open_stream(
    config: StreamConfig, tokenizer: Tokenizer | None = None, *, policy: Policy | None = None
) -> AsyncOfflineDatasetStream | GymEpisodeStream | MockGymStream:
    """Return the stream of a configuration; offline needs a `dataset_path`, the others a tokenizer.

    `filter_failures` drops samples of failed episodes; `env_name` is the puzzle that a gym plays.
    """
    if config.source_type is SampleSource.OFFLINE:
        if config.dataset_path is None:
            raise UsageError("an offline stream needs a file; set dataset_path")
        return AsyncOfflineDatasetStream(
            config.dataset_path,
            min_length=config.min_length,
            max_length=config.max_length,
            tokenizer=tokenizer,
            keep=(lambda sample: sample.success is not False) if config.filter_failures else None,
        )
    if tokenizer is None:
        raise UsageError(f"a {config.source_type} stream needs a tokenizer; pass one")
    if config.source_type is SampleSource.SYNTHETIC:
        return MockGymStream(tokenizer, success_rate=1.0 if config.filter_failures else 0.7)
    if config.source_type is SampleSource.REPLAY:
        raise UsageError("source_type=replay cannot be streamed; draw from a ReplayBuffer")
    gym = GymConfig(
        host=config.host,
        port=config.port,
        connect_timeout=config.timeout_seconds,
        read_timeout=config.timeout_seconds,
        puzzle_types=None if config.env_name is None else (config.env_name,),
    )
    return GymEpisodeStream(
        gym,
        tokenizer,
        min_length=config.min_length,
        max_length=config.max_length,
        policy=policy,
        keep_failures=not config.filter_failures,
    )
