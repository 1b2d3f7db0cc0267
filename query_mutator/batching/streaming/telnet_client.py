"""What a telnet client of puzzles needs, in one place, and the record of a puzzle that it played."""

from __future__ import annotations

from collections.abc import Sequence

from query_mutator.batching.generation.rows import RowTokenizer, Tokenizer
from query_mutator.batching.records import Record
from query_mutator.batching.streaming.gym_client import TelnetGymClient
from query_mutator.batching.streaming.gym_types import (
    DifficultyProfile,
    PuzzleCompletion,
    PuzzleDifficulty,
    PuzzleGame,
    PuzzleObservation,
    PuzzleResult,
    TelnetClientConfig,
)

__all__ = [
    "DifficultyProfile", "PuzzleCompletion", "PuzzleDifficulty", "PuzzleEpisode", "PuzzleGame", "PuzzleObservation",
    "PuzzleResult", "TelnetClientConfig", "TelnetGymClient",
]  # fmt: skip


class PuzzleEpisode(Record):
    """A puzzle from its first grid to its last, with the moves between; 0 in a grid is an empty cell."""

    game: str
    difficulty: str
    seed: int
    initial_grid: list[list[int]] | None = None
    final_grid: list[list[int]] | None = None
    moves: tuple[str, ...] = ()
    success: bool
    total_moves: int = 0
    invalid_moves: int = 0
    hints_used: int = 0
    optimal_steps: int | None = None
    difficulty_profile: DifficultyProfile | None = None

    def to_training_text(self, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        """Return token ids and loss mask: the puzzle without a loss, then the moves and the result with one."""
        prompt = f"Solve this {self.game} puzzle ({self.difficulty}).\n{_grid_text(self.initial_grid)}\n"
        ending = "solved" if self.success else "not solved"
        row = RowTokenizer(tokenizer).pair(prompt, "\n".join([*self.moves, ending]))
        return row.input_ids.tolist(), row.loss_mask.tolist()


def _grid_text(grid: Sequence[Sequence[int]] | None) -> str:
    return "\n".join(" ".join(str(cell) if cell else "." for cell in row) for row in grid or ())
