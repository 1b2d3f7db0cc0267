"""What streams have in common: state, metrics, limits of length, and samples made from the steps of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from query_mutator.batching.generation.rows import RowTokenizer, Tokenizer
from query_mutator.batching.streaming.gym_types import GymEpisode, GymStep
from query_mutator.batching.streaming.types import SampleSource, StreamMetrics, StreamSample, StreamState
from query_mutator.errors import UsageError

__all__ = ["EpisodeStream", "StreamBase"]


class StreamBase:
    """State and metrics of a stream whose samples have `min_length` to `max_length` tokens."""

    def __init__(self, *, min_length: int = 1, max_length: int = 8192) -> None:
        if not 1 <= min_length <= max_length:
            raise UsageError(
                f"min_length={min_length} and max_length={max_length} do not fit; use 1 <= min_length <= max_length"
            )
        self.min_length = min_length
        self.max_length = max_length
        self._state = StreamState.IDLE
        self._metrics = StreamMetrics()

    @property
    def state(self) -> StreamState:
        """What the stream is doing."""
        return self._state

    @property
    def metrics(self) -> StreamMetrics:
        """Counts since the last reset."""
        return self._metrics

    def _counted(self, sample: StreamSample, *, keep: bool = True) -> bool:
        """Count a sample as produced or as filtered, and return which."""
        if keep and self.min_length <= sample.length <= self.max_length:
            self._metrics = self._metrics.record_sample(sample)
            return True
        self._metrics = self._metrics.record_filtered()
        return False

    def _restart(self) -> None:
        self._state = StreamState.IDLE
        self._metrics = StreamMetrics()

    def _stop(self) -> None:
        if self._state is StreamState.STREAMING:
            self._state = StreamState.IDLE

    def _check_state(self, state: Mapping[str, Any], **own: object) -> None:
        """Raise UsageError when a `state_dict` was taken from a stream with other settings than `own`."""
        for name, value in own.items():
            if state[name] != value:
                raise UsageError(
                    f"the state has {name}={state[name]} and this stream {name}={value}; resume with equal settings"
                )


class EpisodeStream(StreamBase):
    """A stream of one sample per step of an episode: the observation is given, the action is learned."""

    def __init__(self, tokenizer: Tokenizer, *, dataset_id: str, min_length: int = 1, max_length: int = 8192) -> None:
        super().__init__(min_length=min_length, max_length=max_length)
        self.dataset_id = dataset_id
        self._rows = RowTokenizer(tokenizer)

    async def close(self) -> None:
        """End the stream; it keeps its position. Idempotent."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _sample(self, episode: GymEpisode, step: GymStep) -> StreamSample:
        tokens = self._rows.pair(step.observation + "\n", step.action or "")
        return StreamSample(
            input_ids=tokens.input_ids,
            loss_mask=tokens.loss_mask,
            sample_id=f"{episode.episode_id}_{step.step_index}",
            dataset_id=self.dataset_id,
            source=SampleSource.GYM,
            episode_id=episode.episode_id,
            episode_status=episode.status,
            step_index=step.step_index,
            total_steps=episode.num_steps,
            reward=step.reward,
            difficulty=episode.difficulty,
            success=episode.success,
        )
