"""Episodes of a puzzle gym, or of a mock, as a stream of samples:
one sample per step, the observation given, the action learned.

What an episode plays (puzzle, difficulty, seed) is a function of the stream's seed and the episode's number, so a
stream on the same gym with the same policy yields the same samples. An episode that a broken connection interrupts is
played again from its beginning, and none of its steps are yielded.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import operator
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from query_mutator.batching.generation.rows import RowTokenizer, Tokenizer
from query_mutator.batching.streaming.gym_types import (
    GymConfig,
    GymConnectionError,
    GymEpisode,
    GymStep,
    PuzzleDifficulty,
    PuzzleObservation,
    PuzzleResult,
)
from query_mutator.batching.streaming.protocols import StreamBase
from query_mutator.batching.streaming.telnet_client import ENVIRONMENT, GymClient, action_of_hint
from query_mutator.batching.streaming.types import EpisodeStatus, SampleSource, StreamSample, StreamState, utc_now
from query_mutator.batching.sync import to_async_iterator, to_sync_iterator
from query_mutator.errors import UsageError

logger = logging.getLogger(__name__)

#: Chooses an action for an observation, or None to give up. With an attribute `wants_hint = True` the observation
#: includes the server's hint.
Policy = Callable[[PuzzleObservation], str | Awaitable[str | None] | None]


class HintPolicy:
    """Follow the server's hint; give up when there is none, or none that names a command."""

    wants_hint = True

    def __call__(self, observation: PuzzleObservation) -> str | None:
        """Return the hinted command."""
        return action_of_hint(observation.hint) if observation.hint else None


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


class GymEpisodeStream(EpisodeStream):
    """Play a gym and yield the steps of every finished episode, for `async for` and for `for`.

    `policy` chooses the actions (default: `HintPolicy`). After a lost connection, connect again up to `max_retries`
    times per episode, then raise GymConnectionError. `close`, from any task, ends the stream at once; a cancelled
    task leaves no connection open.
    """

    def __init__(
        self,
        config: GymConfig,
        tokenizer: Tokenizer,
        dataset_id: str = "gym",
        max_episodes: int | None = None,
        min_length: int = 1,
        max_length: int = 8192,
        *,
        policy: Policy | None = None,
    ) -> None:
        super().__init__(tokenizer, dataset_id=dataset_id, min_length=min_length, max_length=max_length)
        self.config = config
        self.max_episodes = max_episodes
        self.policy: Policy = policy or HintPolicy()
        self._client = GymClient(config)
        self._next_episode = 0
        self._closed = asyncio.Event()

    # --- iteration -------------------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncGenerator[StreamSample, None]:
        async for episode in self.episodes():
            for step in episode.steps:
                sample = self._sample(episode, step)
                if self._counted(sample):
                    yield sample

    def __iter__(self) -> Iterator[StreamSample]:
        return to_sync_iterator(self.__aiter__)

    async def episodes(self) -> AsyncGenerator[GymEpisode, None]:
        """Yield finished episodes, from the stream's position to `max_episodes`."""
        self._state = StreamState.STREAMING
        self._closed = asyncio.Event()  # bound to the running loop
        try:
            while self.max_episodes is None or self._next_episode < self.max_episodes:
                begin = time.perf_counter()
                episode = await self._played()
                self._metrics = self._metrics.record_time(time.perf_counter() - begin)
                if episode is None:
                    self._state = StreamState.IDLE
                    return
                self._next_episode += 1
                self._metrics = self._metrics.record_episode(episode.success)
                yield episode
            self._state = StreamState.EXHAUSTED
        except Exception:
            self._state = StreamState.ERROR
            raise
        finally:
            await self._client.disconnect()
            if self._state is StreamState.STREAMING:
                self._state = StreamState.PAUSED

    async def _played(self) -> GymEpisode | None:
        """Play the next episode, connecting again when the connection breaks; return None if the stream was closed."""
        delay = self.config.retry_delay
        for retries_left in range(self.config.max_retries, -1, -1):
            try:
                await self._client.connect()
                return await self._play(self._plan(self._next_episode))
            except GymConnectionError as error:
                if self._closed.is_set():
                    return None
                if not retries_left:
                    raise
                logger.warning("%s; connecting again in %g s", error, delay)
                self._metrics = self._metrics.record_reconnection()
                await self._client.disconnect()
            try:
                await asyncio.wait_for(self._closed.wait(), delay)
                return None
            except TimeoutError:
                delay *= 2
        raise AssertionError("the last retry returns or raises")

    def _plan(self, number: int) -> dict[str, Any]:
        """Return what an episode plays, as fields of a GymEpisode."""
        rng = np.random.default_rng([self.config.seed, number])
        low, high = self.config.difficulty_range
        games = self.config.puzzle_types or tuple(self._client.games)
        if not games:
            raise UsageError(f"{self.config.address} lists no puzzles; name some with puzzle_types")
        return {
            "episode_id": f"{self.dataset_id}_{number:06d}",
            "puzzle_type": games[int(rng.integers(len(games)))],
            "difficulty": float(rng.uniform(low, max(low, high))),
            "seed": int(rng.integers(2**31)),
        }

    # --- one episode -----------------------------------------------------------------------------------------------

    async def _play(self, plan: dict[str, Any]) -> GymEpisode:
        start, steps = utc_now(), list[GymStep]()
        try:
            async with asyncio.timeout(self.config.episode_timeout):
                status = await self._steps(plan, steps)
        except TimeoutError:
            status = EpisodeStatus.TIMEOUT
            await self._client.disconnect()  # a reply may still arrive
        return GymEpisode.ended(status, steps, start, **plan)

    async def _steps(self, plan: dict[str, Any], steps: list[GymStep]) -> EpisodeStatus:
        """Play to the end, appending each step as it is taken, and return the status."""
        observation = await self._client.start_puzzle(
            plan["puzzle_type"], PuzzleDifficulty.at(plan["difficulty"]), plan["seed"]
        )
        for number in range(self.config.max_steps):
            observation = observation.model_copy(update={"step_index": number, "hint": await self._hint()})
            action = self.policy(observation)
            if inspect.isawaitable(action):
                action = await action
            if action is None:
                return EpisodeStatus.FAILURE
            result = await self._client.send_action(action)
            steps.append(_step(observation, action, result))
            if result.code == ENVIRONMENT:
                return EpisodeStatus.ERROR
            if result.done:
                return EpisodeStatus.SUCCESS if result.solved else EpisodeStatus.FAILURE
            observation = result.state or await self._client.show_state()
        return EpisodeStatus.FAILURE

    async def _hint(self) -> str | None:
        if not getattr(self.policy, "wants_hint", False):
            return None
        hint = await self._client.get_hint()
        if not hint.success:
            return None
        return f"`{hint.info['action']}`" if hint.info.get("action") else hint.message

    # --- reset, close, resume --------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """Return to the first episode, with metrics from zero."""
        await self._client.disconnect()
        self._next_episode = 0
        self._restart()

    async def close(self) -> None:
        """End the stream, also while another task waits for its next sample; idempotent."""
        self._closed.set()
        await self._client.disconnect()
        self._stop()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next episode."""
        return {"next_episode": self._next_episode, "seed": self.config.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; raise UsageError for one with another seed."""
        self._check_state(state, seed=self.config.seed)
        self._next_episode = int(state["next_episode"])


def _step(observation: PuzzleObservation, action: str, result: PuzzleResult) -> GymStep:
    info = {"success": result.success, "code": result.code, "message": result.message}
    return GymStep(
        step_index=observation.step_index,
        observation=observation.text,
        action=action,
        reward=result.reward,
        done=result.done,
        info={name: value for name, value in info.items() if value is not None},
    )


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
        self.difficulty_range = low, max(low, high)  # numpy takes -0.0 for less than 0
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

    async def reset(self) -> None:
        """Return to the first episode, with metrics from zero."""
        self._position = 0
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream."""
        return {"position": self._position, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`; raise UsageError for one with another seed."""
        self._check_state(state, seed=self.seed)
        self._position = int(state["position"])
