"""The records of a stream: a sample with its origin, the settings of a source, and its counts."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from query_mutator.batching.records import Int32Array, Ratio, Record, TokenRecord, check_row


class SampleSource(StrEnum):
    """Source of a sample."""

    OFFLINE = "offline"
    GYM = "gym"
    REPLAY = "replay"
    SYNTHETIC = "synthetic"


class EpisodeStatus(StrEnum):
    """Status of an episode."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCESS = "success"
    FAILURE = "failure"
    TIMEOUT = "timeout"
    ERROR = "error"


class StreamState(StrEnum):
    """State of a stream."""

    IDLE = "idle"
    STREAMING = "streaming"
    PAUSED = "paused"
    EXHAUSTED = "exhausted"
    ERROR = "error"


def utc_now() -> datetime:
    """Return the current time, with its zone."""
    return datetime.now(UTC)


class StreamSample(TokenRecord):
    """One sequence to train on: `input_ids` int32 [L], `loss_mask` uint8 [L], and where it came from."""

    segment_ids: Int32Array | None = None
    sample_id: str = Field(min_length=1)
    dataset_id: str
    source: SampleSource
    timestamp: datetime = Field(default_factory=utc_now)
    episode_id: str | None = None
    episode_status: EpisodeStatus | None = None
    step_index: int | None = Field(default=None, ge=0)
    total_steps: int | None = Field(default=None, ge=0)
    reward: float | None = Field(default=None, allow_inf_nan=False)
    difficulty: float | None = Field(default=None, ge=0.0, le=1.0)
    success: bool | None = None
    replay_count: int = Field(default=0, ge=0)
    priority: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_row(self.input_ids, self.loss_mask, f"sample {self.sample_id!r}", self.segment_ids)
        return self

    @property
    def is_gym_sample(self) -> bool:
        """Return whether it comes directly from a gym."""
        return self.source == SampleSource.GYM

    @property
    def is_replay(self) -> bool:
        """Return whether it was drawn from a replay buffer."""
        return self.source == SampleSource.REPLAY or self.replay_count > 0

    def with_replay(self, times: int = 1) -> Self:
        """Return a copy marked as replayed `times` more; the arrays are shared.

        A buffer does this for every sample it adds, so the fields, checked when this sample was created, are not
        checked again.
        """
        fields = self.__dict__.copy()
        fields["source"] = SampleSource.REPLAY
        fields["replay_count"] += times
        return self.unchecked(fields)


class StreamConfig(Record):
    """Source of a stream and filters of its samples, for a program that builds the stream."""

    source_type: SampleSource = SampleSource.OFFLINE
    dataset_path: str | None = None
    env_name: str | None = None
    host: str = "localhost"
    port: int = Field(default=8023, ge=1, le=65535)
    timeout_seconds: float = Field(default=30.0, gt=0)
    min_length: int = Field(default=1, ge=1)
    max_length: int = Field(default=8192, ge=1)
    filter_failures: bool = False


class StreamMetrics(Record):
    """Counts of a stream; means are over the samples that have the value, and 0 without any."""

    samples_produced: int = 0
    samples_filtered: int = 0  # too short, too long, or rejected by a filter
    samples_errored: int = 0  # invalid rows that were skipped
    episodes_completed: int = 0
    episodes_successful: int = 0
    episodes_failed: int = 0
    reconnections: int = 0
    total_tokens: int = 0
    min_length_seen: int | None = None
    max_length_seen: int | None = None
    difficulty_sum: float = 0.0
    difficulty_count: int = 0
    reward_sum: float = 0.0
    reward_count: int = 0
    total_time_seconds: float = 0.0  # spent inside the stream

    filter_rate: ClassVar = Ratio("samples_filtered", "samples_total")
    success_rate: ClassVar = Ratio("episodes_successful", "episodes_completed")
    mean_length: ClassVar = Ratio("total_tokens", "samples_produced")
    mean_difficulty: ClassVar = Ratio("difficulty_sum", "difficulty_count")
    mean_reward: ClassVar = Ratio("reward_sum", "reward_count")
    samples_per_second: ClassVar = Ratio("samples_produced", "total_time_seconds")

    @property
    def samples_total(self) -> int:
        """Samples produced and filtered."""
        return self.samples_produced + self.samples_filtered

    def record_sample(self, sample: StreamSample) -> Self:
        """Return the counts with one more sample produced."""
        counts: dict[str, float] = {"samples_produced": 1, "total_tokens": sample.length}
        for name, value in (("difficulty", sample.difficulty), ("reward", sample.reward)):
            if value is not None:
                counts |= {f"{name}_sum": value, f"{name}_count": 1}
        seen = [one for one in (self.min_length_seen, self.max_length_seen, sample.length) if one is not None]
        return self.plus(**counts).model_copy(update={"min_length_seen": min(seen), "max_length_seen": max(seen)})

    def record_filtered(self) -> Self:
        """Return the counts with one more sample filtered."""
        return self.plus(samples_filtered=1)

    def record_error(self) -> Self:
        """Return the counts with one more invalid row."""
        return self.plus(samples_errored=1)

    def record_episode(self, success: bool) -> Self:
        """Return the counts with one more episode that ended."""
        return self.plus(episodes_completed=1, episodes_successful=success, episodes_failed=not success)

    def record_reconnection(self) -> Self:
        """Return the counts with one more connection that was opened again."""
        return self.plus(reconnections=1)

    def record_time(self, seconds: float) -> Self:
        """Return the counts with more time spent inside the stream."""
        return self.plus(total_time_seconds=seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return counts, means and rates for a log."""
        rates = ("samples_total", "filter_rate", "success_rate", "mean_length", "mean_difficulty", "mean_reward")
        return {**self.model_dump(), **{name: getattr(self, name) for name in (*rates, "samples_per_second")}}
