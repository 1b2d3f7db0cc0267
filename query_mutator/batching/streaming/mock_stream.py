"""A gym that needs no server: generated puzzles with a chosen success rate, equal for equal seeds."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from query_mutator.batching.generation.rows import Tokenizer
from query_mutator.batching.streaming.gym_types import GymEpisode, GymStep
from query_mutator.batching.streaming.stream_base import EpisodeStream
from query_mutator.batching.streaming.types import EpisodeStatus, StreamSample, StreamState, utc_now
from query_mutator.batching.sync import to_async, to_async_iterator
from query_mutator.errors import UsageError

__all__ = ["MockGymStream"]

OPERATIONS = (("add", "+", operator.add), ("subtract", "-", operator.sub), ("multiply", "*", operator.mul))


class MockGymStream(EpisodeStream):
    """Arithmetic exercises, one per step, for `async for` and `for`; episode i is a function of (seed, i).

    The last step of a successful episode has reward 1; in a failed one its answer is wrong.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_episodes: int = 100,
        steps_per_episode: int = 5,
        difficulty_range: tuple[float, float] = (0.0, 1.0),
        success_rate: float = 0.7,
        seed: int = 42,
    ) -> None:
        low, high = difficulty_range
        if num_episodes < 0 or steps_per_episode < 1:
            raise UsageError(
                f"num_episodes={num_episodes} and steps_per_episode={steps_per_episode} must be at least 0 and 1"
            )
        if not (0.0 <= low <= high <= 1.0 and 0.0 <= success_rate <= 1.0):
            raise UsageError(f"difficulty_range={difficulty_range} and success_rate={success_rate} must be in 0..1")
        super().__init__(tokenizer, dataset_id="mock_gym")
        self.num_episodes = num_episodes
        self.steps_per_episode = steps_per_episode
        self.difficulty_range = difficulty_range
        self.success_rate = success_rate
        self.seed = seed
        self._position = 0  # steps produced

    def __iter__(self) -> Iterator[StreamSample]:
        self._state = StreamState.STREAMING
        while self._position < self.num_episodes * self.steps_per_episode:
            number, step = divmod(self._position, self.steps_per_episode)
            episode = self._episode(number)
            sample = self._sample(episode, episode.steps[step])
            self._position += 1
            self._metrics = self._metrics.record_sample(sample)
            if episode.steps[step].done:
                self._metrics = self._metrics.record_episode(episode.success)
            yield sample
        self._state = StreamState.EXHAUSTED

    __aiter__ = to_async_iterator(__iter__)

    def _episode(self, number: int) -> GymEpisode:
        rng = np.random.default_rng([self.seed, number])
        difficulty = float(rng.uniform(*self.difficulty_range))
        success = bool(rng.random() < self.success_rate)
        operands = rng.integers(1, 10 + int(990 * difficulty), size=(self.steps_per_episode, 2)).tolist()
        name, sign, apply = OPERATIONS[int(rng.integers(len(OPERATIONS)))]
        steps = []
        for step, (left, right) in enumerate(operands):
            last = step == self.steps_per_episode - 1
            answer = apply(left, right) + (last and not success)
            steps.append(
                GymStep(
                    step_index=step,
                    observation=f"Puzzle {name}, step {step + 1}: {left} {sign} {right} = ?",
                    action=f"answer {answer}",
                    reward=float(success and last),
                    done=last,
                )
            )
        return GymEpisode.ended(
            EpisodeStatus.SUCCESS if success else EpisodeStatus.FAILURE,
            steps,
            utc_now(),
            episode_id=f"mock_{number:04d}",
            puzzle_type=name,
            difficulty=difficulty,
            seed=number,
        )

    def reset_sync(self) -> None:
        """Return to the first episode, with metrics from zero."""
        self._position = 0
        self._restart()

    reset = to_async(reset_sync, thread=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream."""
        return {"position": self._position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; raise UsageError for one with another seed."""
        self._check_state(state, seed=self.seed)
        self._position = int(state["position"])
