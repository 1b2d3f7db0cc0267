"""Learning while playing: a gym, a replay buffer, rolling windows of batches; without a server and with one.

python examples/batching/08_online_learning.py
"""

from __future__ import annotations

import asyncio

from query_mutator.batching import (
    BufferEvictionPolicy,
    GymConfig,
    GymEpisodeStream,
    GymOutputMode,
    GymTransport,
    MockGymStream,
    PuzzleObservation,
    ReplayBuffer,
    ReplayBufferConfig,
    RollingBatchPlanWindow,
    WindowConfig,
)
from query_mutator.batching.gym.server import Game, GymServer, StepOutcome


class Bytes:
    """A tokenizer of one token a byte."""

    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode())


def main() -> None:
    """Show the parts, then all of them together."""
    mock_gym()
    buffer = replay_buffer()
    priority_eviction()
    rolling_window(buffer)
    with GymServer([Game("Guess", "find the number", Guess)], port=0) as server:
        asyncio.run(online(server.port))


def mock_gym() -> None:
    """Play made-up puzzles: no server, the same every time."""
    stream = MockGymStream(Bytes(), num_episodes=5, steps_per_episode=3, difficulty_range=(0.2, 0.8), seed=42)
    samples = list(stream)
    first, account = samples[0], stream.metrics
    print(f"mock gym: {len(samples)} samples of {account.episodes_completed} episodes, {account.total_tokens} tokens")
    print(f"  the first is {first.sample_id}, step {first.step_index} of {first.total_steps}, from {first.source}")


def replay_buffer() -> ReplayBuffer:
    """Keep what was played and draw it again."""
    config = ReplayBufferConfig(max_size=300, eviction_policy=BufferEvictionPolicy.FIFO, seed=42)
    buffer = ReplayBuffer(config)
    for sample in MockGymStream(Bytes(), num_episodes=120, steps_per_episode=3, success_rate=0.6):
        buffer.add(sample)
    print(f"buffer: {buffer.size} held, {buffer.total_evicted} evicted, success rate {buffer.success_rate:.1%}")
    buffer.update_priorities_by_reward(alpha=0.5)
    draw = buffer.sample_weighted(32)
    rewarded = sum(bool(sample.reward) for sample in draw.samples)
    print(f"  drawn 32, {rewarded} of them rewarded; weights from {draw.weights.min():.2f} to {draw.weights.max():.2f}")
    print(f"  hard ones alone: {len(buffer.sample(10, min_difficulty=0.7))} drawn")
    return buffer


def priority_eviction() -> None:
    """Let easy samples go first."""
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=20, eviction_policy=BufferEvictionPolicy.PRIORITY))
    for sample in MockGymStream(Bytes(), num_episodes=10, steps_per_episode=3):
        buffer.add(sample, priority=sample.difficulty or 0.0)
    print(f"priority eviction: mean difficulty {buffer.mean_difficulty:.2f} in a buffer of {buffer.size}")


def rolling_window(buffer: ReplayBuffer) -> None:
    """Plan batches over the buffer, a window at a time."""
    config = WindowConfig(
        window_microbatches=10, min_samples=50, bucket_edges=(64,), overflow_max=128, token_budget=512
    )
    window = RollingBatchPlanWindow(buffer, config)
    state = window.build_next_window_sync()
    batches = list(window.iter_current())
    print(f"window {state.window_id}: {len(batches)} microbatches of {sum(one.batch_size for one in batches)} samples")
    print(f"  time for the next: {window.should_build_next}")


class Guess:
    """Find a number from 0 to 7 (easy), 15 (medium) or 31 (hard) with the answers "higher" and "lower"."""

    def reset(self, *, seed: int, difficulty: str) -> str:
        """Think of a number."""
        self.top = {"easy": 7, "medium": 15, "hard": 31}[difficulty]
        self.secret, self.low, self.high = seed % (self.top + 1), 0, self.top
        return f"a number from 0 to {self.top}"

    def step(self, action: str) -> StepOutcome:
        """Compare a guess."""
        if not action.isdecimal() or int(action) > self.top:
            return StepOutcome("guess a number", valid=False)
        guess = int(action)
        if guess == self.secret:
            return StepOutcome("right", reward=1.0, terminated=True, success=True)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.high = min(self.high, guess - 1)
        return StepOutcome(f"it is {'higher' if guess < self.secret else 'lower'}: {self.low} to {self.high}")

    def hint(self) -> str | None:
        """Return the middle of what is left."""
        return str((self.low + self.high) // 2)

    def help(self) -> str:
        """Return the rules."""
        return "a number"

    def close(self) -> None:
        """Nothing to give up."""


def halve(observation: PuzzleObservation) -> str:
    """Choose the middle of the range at the end of what is shown: a policy of one's own in place of the hints."""
    low, high = [int(word) for word in observation.text.split() if word.isdecimal()][-2:]
    return str((low + high) // 2)


async def online(port: int) -> None:
    """Play a real server, collect, plan and train in turns."""
    config = GymConfig(
        host="127.0.0.1",
        port=port,
        transport=GymTransport.WEBSOCKET,
        output_mode=GymOutputMode.JSON,
        difficulty_range=(0.3, 0.9),
    )
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=500))
    settings = WindowConfig(
        window_microbatches=4, min_samples=16, bucket_edges=(64,), overflow_max=128, token_budget=512
    )
    window = RollingBatchPlanWindow(buffer, settings)
    steps = 0
    async with GymEpisodeStream(config, Bytes(), max_episodes=25, policy=halve) as stream:
        async for sample in stream:
            buffer.add(sample)
            if buffer.total_added % 16 == 0 and window.should_build_next:
                await window.build_next_window()
                steps += sum(1 for _ in window.iter_current_with_samples())  # a training step each
    account = stream.metrics
    print(f"online over {config.transport}: {account.episodes_completed} episodes, solved: {account.success_rate:.0%}")
    print(f"  {buffer.size} samples, {window.total_windows} windows, {steps} training steps")


if __name__ == "__main__":
    main()
