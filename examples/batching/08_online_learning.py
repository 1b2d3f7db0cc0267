"""Learning while playing: a gym, a replay buffer, rolling windows of batches; without a server and with one.

python examples/batching/08_online_learning.py
python examples/batching/08_online_learning.py --gym-port 8023      # a puzzle arcade on this machine
"""

from __future__ import annotations

import argparse
import asyncio

from query_mutator.batching import (
    BufferEvictionPolicy,
    GymConfig,
    GymEpisodeStream,
    GymOutputMode,
    GymTransport,
    MockGymStream,
    ReplayBuffer,
    ReplayBufferConfig,
    RollingBatchPlanWindow,
    WindowConfig,
)


class Bytes:
    """A tokenizer of one token a byte."""

    eos_token_id = 256

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode())


def main(port: int | None = None) -> None:
    """Show the parts, then all of them together, with the server on a port of this machine if there is one."""
    mock_gym()
    buffer = replay_buffer()
    priority_eviction()
    rolling_window(buffer)
    if port is None:
        asyncio.run(online(MockGymStream(Bytes(), num_episodes=25, success_rate=1.0)))
    else:
        config = GymConfig(
            port=port, transport=GymTransport.WEBSOCKET, output_mode=GymOutputMode.JSON, difficulty_range=(0.3, 0.9)
        )
        asyncio.run(
            online(GymEpisodeStream(config, Bytes(), max_episodes=25))
        )  # its policy follows hints; give your own


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
    print(f"  drawn 32, {sum(bool(sample.reward) for sample in buffer.sample(32))} of them rewarded")
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


async def online(stream: MockGymStream | GymEpisodeStream) -> None:
    """Collect, plan and train in turns."""
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=500))
    settings = WindowConfig(
        window_microbatches=4, min_samples=16, bucket_edges=(64,), overflow_max=128, token_budget=512
    )
    window = RollingBatchPlanWindow(buffer, settings)
    steps = 0
    async for sample in stream:
        buffer.add(sample)
        if buffer.total_added % 16 == 0 and window.should_build_next:
            await window.build_next_window()
            steps += sum(1 for _ in window.iter_current_with_samples())  # a training step each
    account = stream.metrics
    print(f"online: {account.episodes_completed} episodes, solved: {account.success_rate:.0%}")
    print(f"  {buffer.size} samples, {window.total_windows} windows, {steps} training steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gym-port", type=int, help="of a server of puzzles; by default puzzles are made up")
    main(parser.parse_args().gym_port)
