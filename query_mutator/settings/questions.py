"""Questions, and the reward of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from query_mutator.bounds import Group, Prose, text_of

RECORDED_SET = "general"  # the bundled questions, to which a language model's replies are recorded
ValidationFold = Literal[0, 1, 2, 3, 4, "none"]  # the fold to choose by; "none": learn from all


@dataclass(frozen=True, kw_only=True)
class Columns(Group):
    """The columns of a file of questions."""

    question_column: str | None = None
    """Column of the question, if it is not called query, question, prompt or text."""
    answer_column: str | None = None
    """Column of the answer, if it is not called accept, answer, reference or response."""


@dataclass(frozen=True, kw_only=True)
class Questions(Columns):
    """The questions."""

    dataset: str = RECORDED_SET
    """Questions: general (bundled), a .jsonl, .json, .csv or .parquet file, a set of
    the Hugging Face hub as hf:NAME[:CONFIG][@SPLIT]; see docs/how-to/use-your-own-data.md."""


@dataclass(frozen=True, kw_only=True)
class Reward(Group):
    """The score of an answer."""

    judge_model: str | None = None
    """Model of the reward part judge; another one than the model that answers."""
    judge_rubric: Prose = ""
    """File with the rubric of the judge, kept in the run's settings; by default whether the answer is correct."""
    reward: str = ""
    """Weights of the parts of the score, as right=0.7,similarity=0.2; see docs/reference/rewards.md."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "judge_rubric", text_of(self.judge_rubric, "--judge-rubric"))
        super().__post_init__()
