"""`qm gym run` and `qm gym info`: play a puzzle gym and store the steps as samples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from query_mutator.batching import (
    GymConfig,
    GymEpisodeStream,
    GymOutputMode,
    GymTransport,
    MockGymStream,
    PuzzleDifficulty,
    PuzzleGame,
    ReplayBuffer,
    ReplayBufferConfig,
    load_tokenizer,
)
from query_mutator.batching.records import settings_errors
from query_mutator.bounds import Count, Few, Port, Retries, Seconds, Seed, Share, Steps
from query_mutator.cli.console import progress
from query_mutator.cli.outputs import JsonFlags, Output, readable, rows_of, show
from query_mutator.commands.batching import TokenizerFlags


@dataclass(frozen=True, kw_only=True)
class GymRunFlags(TokenizerFlags):
    """Play episodes of a gym, or of a mock, and store the steps as samples."""

    host: str = "localhost"
    """Host of the gym."""
    port: Port = 8023
    """Port of the gym."""
    transport: Literal["telnet", "tcp", "websocket"] = "telnet"
    """Protocol of the connection."""
    output_mode: Literal["normal", "agent", "json"] = "json"
    """Format of the gym's replies."""
    puzzles: str = ""
    """Puzzles to play, as a,b,c; by default all puzzles of the gym."""
    buffer_size: Count = 100_000
    """Maximum samples kept."""
    timeout: Seconds = 10.0
    """Seconds to wait for a connection; a reply may take three times as long."""
    retries: Retries = 3
    """Reconnections per episode."""
    difficulty_min: Share = 0.0
    """Easiest episode, from 0 to 1."""
    difficulty_max: Share = 1.0
    """Hardest episode, from 0 to 1."""
    max_samples: Steps | None = None
    """Number of samples after which to stop."""
    output: Annotated[str | None, Parameter(name=("--out", "--output", "-o")), Output(readable(ReplayBuffer.load))] = (
        None
    )
    """File to save the samples to, as JSON."""
    seed: Seed = 42
    """Seed of the episodes."""
    mock: bool = False
    """Play mock puzzles without a gym."""
    num_episodes: Count = 10
    """Episodes to play."""
    steps_per_episode: Few = 5
    """Steps of a mock episode."""
    success_rate: Share = 0.7
    """Share of mock episodes that succeed."""


@dataclass(frozen=True, kw_only=True)
class GymInfoFlags(JsonFlags):
    """Show the settings of a gym connection, with their defaults."""


def gym_config(flags: GymRunFlags) -> GymConfig:
    """Return where the gym is and how long its client waits."""
    names = tuple(name.strip() for name in flags.puzzles.split(",") if name.strip())
    with settings_errors():
        return GymConfig(
            host=flags.host,
            port=flags.port,
            transport=GymTransport(flags.transport),
            output_mode=GymOutputMode(flags.output_mode),
            connect_timeout=flags.timeout,
            read_timeout=3 * flags.timeout,
            puzzle_types=names or None,
            difficulty_range=(flags.difficulty_min, flags.difficulty_max),
            max_retries=flags.retries,
            seed=flags.seed,
        )


def gym_run(flags: GymRunFlags) -> None:
    """Play, save the samples with --out, and print a summary."""
    config = gym_config(flags)
    stream = _stream(flags, config)
    buffer = ReplayBuffer(ReplayBufferConfig(max_size=flags.buffer_size, seed=flags.seed))
    with progress("episodes", flags.num_episodes, unit="episode") as bar:
        for sample in islice(iter(stream), flags.max_samples):
            buffer.add(sample)
            bar.update(stream.metrics.episodes_completed - bar.n)
    if flags.output is not None:
        buffer.save(flags.output)
    report: dict[str, Any] = {"source": "mock" if flags.mock else config.address, "output": flags.output}
    metrics = stream.metrics
    report |= {
        "samples": metrics.samples_produced,
        "kept": buffer.size,
        "evicted": buffer.total_evicted,
        "tokens": metrics.total_tokens,
        "episodes": metrics.episodes_completed,
        "solved": metrics.episodes_successful,
        "success_rate": metrics.success_rate,
        "mean_reward": buffer.mean_reward,
        "mean_difficulty": buffer.mean_difficulty,
    }
    values: dict[str, Any] = {name: value for name, value in report.items() if value is not None}
    shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in values.items()}
    show(flags, report, rows_of(shown))


def _stream(flags: GymRunFlags, config: GymConfig) -> GymEpisodeStream | MockGymStream:
    tokenizer = load_tokenizer(flags.tokenizer)
    if not flags.mock:
        return GymEpisodeStream(config, tokenizer, max_episodes=flags.num_episodes)
    return MockGymStream(
        tokenizer,
        num_episodes=flags.num_episodes,
        steps_per_episode=flags.steps_per_episode,
        difficulty_range=config.difficulty_range,
        success_rate=flags.success_rate,
        seed=flags.seed,
    )


def gym_info(flags: GymInfoFlags) -> None:
    """Print transports, output modes, puzzles and the defaults of a connection."""
    choices: dict[str, list[str]] = {
        "transports": [one.value for one in GymTransport],
        "output_modes": [one.value for one in GymOutputMode],
        "difficulties": [one.value for one in PuzzleDifficulty],
        "puzzles": [one.value for one in PuzzleGame],
    }
    defaults: dict[str, dict[str, Any]] = {
        "connection": GymConfig().model_dump(mode="json"),
        "buffer": ReplayBufferConfig().model_dump(mode="json"),
    }
    rows = {name: ", ".join(values) for name, values in choices.items()}
    rows |= {f"{part}.{name}": value for part, values in defaults.items() for name, value in values.items()}
    show(flags, {**choices, **defaults}, rows_of(rows))
