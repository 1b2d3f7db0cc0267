"""The records of a gym: how to reach it, what it shows, what was done there, and how it went.

GymError (BackendError)
├── GymConnectionError   nothing answers, or the connection broke and could not be made again
└── GymProtocolError     the server answers, but not as a puzzle gym does
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from query_mutator.batching.records import Record
from query_mutator.batching.streaming.types import EpisodeStatus
from query_mutator.errors import BackendError, ServerDownError


class GymError(BackendError):
    """A gym cannot be played."""


class GymConnectionError(GymError, ServerDownError, ConnectionError):
    """Nothing answers at the gym's address, or the connection broke."""


class GymProtocolError(GymError):
    """What answers at the address does not speak as a puzzle gym does."""


class GymTransport(StrEnum):
    """How lines travel."""

    TELNET = "telnet"
    TCP = "tcp"
    WEBSOCKET = "websocket"


class GymOutputMode(StrEnum):
    """How the server words its replies."""

    NORMAL = "normal"
    AGENT = "agent"
    JSON = "json"


class GymConfig(Record):
    """Where a gym is, what is played there, and how patient the client is."""

    host: str = "localhost"
    port: int = Field(default=8023, ge=1, le=65535)
    transport: GymTransport = GymTransport.TELNET
    output_mode: GymOutputMode = GymOutputMode.JSON
    path: str = "/ws"  # of a WebSocket server
    connect_timeout: float = Field(default=10.0, gt=0)  # seconds, as all of these
    read_timeout: float = Field(default=30.0, gt=0)
    episode_timeout: float = Field(default=300.0, gt=0)
    puzzle_types: tuple[str, ...] | None = Field(default=None, min_length=1)  # None: any the server offers
    difficulty_range: tuple[float, float] = (0.0, 1.0)
    max_steps: int = Field(default=200, ge=1)  # an episode that takes more is a failure
    max_retries: int = Field(default=3, ge=0)  # connections made again for one episode
    retry_delay: float = Field(default=1.0, ge=0)  # before the first of them; doubled for each further one
    seed: int = Field(default=42, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.difficulty_range
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(f"difficulty_range=({low}, {high}): two numbers from 0 to 1, the smaller one first")
        return self

    @property
    def address(self) -> str:
        """Return transport, host and port as one would type them."""
        return f"{self.transport}://{self.host}:{self.port}"


class PuzzleGame(StrEnum):
    """Puzzles by name; a server may have others, which are named by a plain string."""

    SUDOKU = "sudoku"
    KENKEN = "kenken"
    KAKURO = "kakuro"
    BINARY = "binary"
    FUTOSHIKI = "futoshiki"
    NONOGRAM = "nonogram"
    LOGIC_GRID = "logic_grid"
    KILLER_SUDOKU = "killer_sudoku"
    LIGHTS_OUT = "lights_out"
    MASTERMIND = "mastermind"
    SLITHERLINK = "slitherlink"
    BRIDGES = "bridges"
    HITORI = "hitori"
    SHIKAKU = "shikaku"
    HIDATO = "hidato"
    TENTS = "tents"
    FILLOMINO = "fillomino"
    STAR_BATTLE = "star_battle"
    SOKOBAN = "sokoban"
    KNAPSACK = "knapsack"
    NURIKABE = "nurikabe"
    MINESWEEPER = "minesweeper"


class PuzzleDifficulty(StrEnum):
    """Levels by name; on the scale from 0 to 1 each takes a third."""

    EASY = "easy"
    MEDIUM = "medium"
    HARD = "hard"

    @classmethod
    def at(cls, difficulty: float) -> PuzzleDifficulty:
        """Return the level of a difficulty from 0 to 1."""
        levels = list(cls)
        return levels[min(int(difficulty * len(levels)), len(levels) - 1)]


class WireRecord(BaseModel):
    """What a server sent: frozen, and fields that are not known here are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class DifficultyProfile(WireRecord):
    """What makes a puzzle hard."""

    logic_depth: int = 1
    branching_factor: float = 1.0
    state_observability: float = 1.0
    constraint_density: float = 0.5


class PuzzleObservation(WireRecord):
    """The state of a puzzle; `text` is how a reader sees it, in any output mode."""

    type: str = "observation"
    game: str = ""
    difficulty: str = ""
    seed: int = 0
    moves: int = 0
    invalid_moves: int = 0
    hints_used: int = 0
    hints_remaining: int = 0
    optimal_steps: int | None = None
    is_complete: bool = False
    grid: Any = None
    grid_display: str | None = None
    difficulty_profile: DifficultyProfile | None = None
    text: str = ""
    hint: str | None = None  # for a policy that asks for one
    step_index: int = 0


class PuzzleResult(WireRecord):
    """What became of a command; `success` is None where the output mode does not say."""

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


class PuzzleCompletion(WireRecord):
    """The server's account of a solved puzzle."""

    type: str = "complete"
    success: bool = True
    game: str = ""
    moves: int = 0
    invalid_moves: int = 0
    hints_used: int = 0
    optimal_steps: int | None = None


class GymStep(Record):
    """One observation, the action taken on it, and what it brought."""

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

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.steps)

    @property
    def duration_seconds(self) -> float:
        """Seconds from the first observation to the end."""
        return (self.end_time - self.start_time).total_seconds()

    def to_training_text(self) -> str:
        """Return observations and actions in turn, each action after `> `, as one text."""
        return "\n\n".join(f"{step.observation}\n> {step.action or ''}".rstrip() for step in self.steps)


PuzzleEpisode = GymEpisode  # the name a client of puzzles knows it by
