"""A gym that needs no server: made-up puzzles with a chosen rate of success, the same every time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Self

import numpy as np

from query_mutator.batching.generation.rows import RowTokenizer, Tokenizer
from query_mutator.batching.streaming.types import (
    EpisodeStatus,
    SampleSource,
    StreamAccount,
    StreamMetrics,
    StreamSample,
    StreamState,
)
from query_mutator.errors import UsageError

OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}


class MockGymStream(StreamAccount):
    """Sums to be worked out step by step, for `async for` and for `for`; episode i is a function of (seed, i).

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
            raise UsageError(f"num_episodes={num_episodes}, steps_per_episode={steps_per_episode}: from 0 and from 1")
        if not (0.0 <= low <= high <= 1.0 and 0.0 <= success_rate <= 1.0):
            raise UsageError(f"difficulty_range={difficulty_range} and success_rate={success_rate} lie from 0 to 1")
        self.num_episodes = num_episodes
        self.steps_per_episode = steps_per_episode
        self.difficulty_range = difficulty_range
        self.success_rate = success_rate
        self.seed = seed
        self._rows = RowTokenizer(tokenizer)
        self._position = 0  # steps handed out
        super().__init__()

    def __iter__(self) -> Iterator[StreamSample]:
        self._state = StreamState.STREAMING
        while self._position < self.num_episodes * self.steps_per_episode:
            sample = self._sample(*divmod(self._position, self.steps_per_episode))
            self._position += 1
            self._metrics.record_sample(sample)
            if sample.step_index == self.steps_per_episode - 1:
                self._metrics.record_episode(bool(sample.success))
            yield sample
        self._state = StreamState.EXHAUSTED

    async def __aiter__(self) -> AsyncGenerator[StreamSample, None]:
        for sample in self:
            await asyncio.sleep(0)
            yield sample

    def _sample(self, episode: int, step: int) -> StreamSample:
        rng = np.random.default_rng([self.seed, episode])
        difficulty = float(rng.uniform(*self.difficulty_range))
        success = bool(rng.random() < self.success_rate)
        last = step == self.steps_per_episode - 1
        left, right = rng.integers(1, 10 + int(990 * difficulty), size=(self.steps_per_episode, 2))[step].tolist()
        name, sign = list(OPERATIONS.items())[int(rng.integers(len(OPERATIONS)))]
        answer = {"+": left + right, "-": left - right, "*": left * right}[sign] + (last and not success)
        tokens = self._rows.pair(f"Puzzle {name}, step {step + 1}: {left} {sign} {right} = ?\n", f"answer {answer}")
        return StreamSample(
            input_ids=tokens.input_ids,
            loss_mask=tokens.loss_mask,
            sample_id=f"mock_{episode:04d}_{step}",
            dataset_id="mock_gym",
            source=SampleSource.GYM,
            episode_id=f"mock_{episode:04d}",
            episode_status=EpisodeStatus.SUCCESS if success else EpisodeStatus.FAILURE,
            step_index=step,
            total_steps=self.steps_per_episode,
            reward=1.0 if success and last else 0.0,
            difficulty=difficulty,
            success=success,
        )

    async def reset(self) -> None:
        """Go back to the first episode, with metrics from zero."""
        self.reset_sync()

    def reset_sync(self) -> None:
        """Go back to the first episode, with metrics from zero."""
        self._position = 0
        self._state = StreamState.IDLE
        self._metrics = StreamMetrics()

    async def close(self) -> None:
        """End the stream; it keeps its place."""
        if self._state is StreamState.STREAMING:
            self._state = StreamState.IDLE

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands."""
        return {"position": self._position, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state_dict` was taken; another seed's state is a UsageError."""
        if state["seed"] != self.seed:
            raise UsageError(f"the state of a mock stream with seed {state['seed']}, not {self.seed}")
        self._position = int(state["position"])
