"""The records of a gym: how to reach it, what it shows, what was done there, and the result.

GymError (BackendError)
├── GymConnectionError   nothing answers, or the connection broke
└── GymProtocolError     the server answers, but not as a puzzle gym does
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from query_mutator.batching.records import Record
from query_mutator.batching.streaming.types import EpisodeStatus, utc_now
from query_mutator.errors import BackendError, ServerDownError


class GymError(BackendError):
    """A gym cannot be played."""


class GymConnectionError(GymError, ServerDownError, ConnectionError):
    """Nothing answers at the gym's address, or the connection broke."""


class GymProtocolError(GymError):
    """The server at the address does not speak the protocol of a puzzle gym."""


class GymTransport(StrEnum):
    """Transport of lines."""

    TELNET = "telnet"
    TCP = "tcp"
    WEBSOCKET = "websocket"


class GymOutputMode(StrEnum):
    """Format of the server's replies."""

    NORMAL = "normal"
    AGENT = "agent"
    JSON = "json"


class TelnetClientConfig(Record):
    """Address of a gym, timeouts of its client (in seconds), and reconnections."""

    host: str = "localhost"
    port: int = Field(default=8023, ge=1, le=65535)
    connect_timeout: float = Field(default=10.0, gt=0)
    read_timeout: float = Field(default=30.0, gt=0)
    max_retries: int = Field(default=3, ge=0)
    retry_delay: float = Field(default=1.0, ge=0)


class GymConfig(TelnetClientConfig):
    """Address of a gym, and which puzzles to play.

    `max_retries` counts per episode, and `retry_delay` doubles with each of them.
    """

    transport: GymTransport = GymTransport.TELNET
    output_mode: GymOutputMode = GymOutputMode.JSON
    path: str = "/ws"  # of a WebSocket server
    episode_timeout: float = Field(default=300.0, gt=0)
    puzzle_types: tuple[str, ...] | None = Field(default=None, min_length=1)  # None: any the server offers
    difficulty_range: tuple[float, float] = (0.0, 1.0)
    max_steps: int = Field(default=200, ge=1)  # a longer episode is a failure
    seed: int = Field(default=42, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.difficulty_range
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"difficulty_range=({low}, {high}) is not valid; use 0 <= low <= high <= 1")
        return self

    @property
    def address(self) -> str:
        """Return transport, host and port as a URL."""
        return f"{self.transport}://{self.host}:{self.port}"


#: Known puzzles; a server may have others, which are named by a plain string.
PuzzleGame = StrEnum(
    "PuzzleGame",
    "SUDOKU KENKEN KAKURO BINARY FUTOSHIKI NONOGRAM LOGIC_GRID KILLER_SUDOKU LIGHTS_OUT MASTERMIND SLITHERLINK "
    "BRIDGES HITORI SHIKAKU HIDATO TENTS FILLOMINO STAR_BATTLE SOKOBAN KNAPSACK NURIKABE MINESWEEPER",
)


class PuzzleDifficulty(StrEnum):
    """Levels by name; each covers a third of the scale from 0 to 1."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"

    @classmethod
    def at(cls, difficulty: float) -> PuzzleDifficulty:
        """Return the level of a difficulty from 0 to 1."""
        levels = list(cls)
        return levels[min(int(difficulty * len(levels)), len(levels) - 1)]


class WireRecord(BaseModel):
    """A record that a server sent: frozen; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class DifficultyProfile(WireRecord):
    """Measures of how hard a puzzle is."""

    logic_depth: int = 1
    branching_factor: float = 1.0
    state_observability: float = 1.0
    constraint_density: float = 0.5


class PuzzleCounts(WireRecord):
    """Counters of a server during a puzzle."""

    game: str = ""
    moves: int = 0
    invalid_moves: int = 0
    hints_used: int = 0
    optimal_steps: int | None = None


class PuzzleObservation(PuzzleCounts):
    """The state of a puzzle; `text` is how a reader sees it, in any output mode."""

    type: str = "observation"
    difficulty: str = ""
    seed: int = 0
    hints_remaining: int = 0
    is_complete: bool = False
    grid: Any = None
    grid_display: str | None = None
    difficulty_profile: DifficultyProfile | None = None
    text: str = ""
    hint: str | None = None  # for a policy that asks for one
    step_index: int = 0


class PuzzleCompletion(PuzzleCounts):
    """The server's summary of a finished puzzle."""

    type: str = "complete"
    success: bool = True


class PuzzleResult(WireRecord):
    """The result of a command; `success` is None where the output mode does not report it."""

    type: str = "result"
    success: bool | None = None
    code: str | None = None
    message: str | None = None
    reward: float = 0.0
    done: bool = False
    solved: bool = False
    truncated: bool = False
    state: PuzzleObservation | None = None  # after the command, where the server sent it
    info: dict[str, Any] = Field(default_factory=dict)


class GymStep(Record):
    """One observation, the action taken on it, and its result."""

    step_index: int = Field(ge=0)
    observation: str
    action: str | None = None
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = Field(default_factory=dict)


class GymEpisode(Record):
    """A puzzle from its first observation to its end."""

    episode_id: str
    puzzle_type: str
    difficulty: float = Field(ge=0.0, le=1.0)
    seed: int = 0
    steps: tuple[GymStep, ...]
    total_reward: float
    success: bool
    status: EpisodeStatus
    start_time: datetime
    end_time: datetime

    @classmethod
    def ended(cls, status: EpisodeStatus, steps: Sequence[GymStep], start_time: datetime, **about: Any) -> Self:
        """Return the episode that ends now with these steps; `about` are the remaining fields."""
        return cls(
            steps=tuple(steps),
            total_reward=sum(step.reward for step in steps),
            success=status is EpisodeStatus.SUCCESS,
            status=status,
            start_time=start_time,
            end_time=utc_now(),
            **about,
        )

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.steps)

    def to_training_text(self) -> str:
        """Return observations and actions in turn, each action after `> `, as one text."""
        return "\n\n".join(f"{step.observation}\n> {step.action or ''}".rstrip() for step in self.steps)
