"""Held-out questions with new scores: the rows of evaluation.jsonl, and the answers that each of them has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from query_mutator.evaluation.outcomes import DIGITS
from query_mutator.evaluation.rescoring.answers import Answered, Gold, Ratings, Row
from query_mutator.types import ErrorInfo, Reward

__all__ = ["OpenOutcome", "open_outcomes", "outcome_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOutcome:
    """A row and its answers; none where a call failed in the run."""

    row: Row
    answers: Sequence[Answered]


def open_outcomes(rows: Sequence[Row], gold: Gold) -> list[OpenOutcome]:
    """Return the rows of an evaluation with their answers."""
    return [OpenOutcome(row=row, answers=[] if row.get("error") else _answers(row, gold)) for row in rows]


def _answers(row: Row, gold: Gold) -> list[Answered]:
    count = len(row["answers"])
    columns = (row["asked"], row.get("forms") or [None] * count, row["answers"], row.get("parts") or [None] * count)
    return [gold.answered(row, *one) for one in zip(*columns, strict=True)]


def outcome_rows(outcomes: Sequence[OpenOutcome], ratings: Ratings) -> Iterator[dict[str, Any]]:
    """Yield the rows with their new scores; a question with an answer that has none is unscored."""
    for outcome in outcomes:
        yield {**outcome.row, **_scores(outcome, [ratings[one] for one in outcome.answers])}


def _scores(outcome: OpenOutcome, found: Sequence[Reward | ErrorInfo]) -> dict[str, Any]:
    """Return the entries of a row that depend on the reward."""
    if outcome.row.get("error"):
        return {}
    rewards = [one for one in found if isinstance(one, Reward)]
    fault = next((one for one in found if isinstance(one, ErrorInfo)), None)
    if fault is not None:
        nothing = dict.fromkeys(("success", "score", "refused"))
        return {**nothing, "parts": [], "scores": [], "error": asdict(fault)}
    submitted = rewards[outcome.row.get("submitted") or 0]
    return {
        "parts": [dict(one.parts) for one in rewards],
        "scores": [round(one.score, DIGITS) for one in rewards],
        "success": submitted.success,
        "score": submitted.score,
    }
