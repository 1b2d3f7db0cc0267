"""Training steps with new scores: the rows of transcripts.jsonl, and the answers that each of them knows.

An answer of an episode is the one to the original question, which its first row has, or that of the first row with a
new wording and form; `submitted` counts them in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from query_mutator.env.episode import Asked
from query_mutator.evaluation.rescoring.answers import Answered, Gold, Ratings, Row, unscored
from query_mutator.types import AS_IS, STORED_CHARS, ErrorInfo, Reward

__all__ = ["OpenStep", "open_steps", "step_rows"]

_CUT = unscored(f"the transcript has the first {STORED_CHARS:,} characters only")
_UNKNOWN = unscored("the row does not say which answer was submitted; an earlier version wrote it")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenStep:
    """A row, and the answers to its current wording, to the original question, and that would be submitted."""

    row: Row
    before: OpenStep | None  # the step before it in the episode
    opening: Answered | None  # what the episode began with
    current: Answered | None
    first: Answered | None
    submitted: Answered | None
    fault: ErrorInfo | None = None  # why the submitted answer is not known

    @property
    def answers(self) -> list[Answered]:
        """Return the answers whose scores the row needs."""
        return [one for one in (self.opening, self.current, self.first, self.submitted) if one is not None]


@dataclass(slots=True)
class _Episode:
    """The answers so far of an environment's episode."""

    question_id: str
    last: OpenStep | None = None
    opening: Answered | None = None
    answers: dict[Asked, Answered] = field(default_factory=dict)

    def add(self, row: Row, gold: Gold) -> OpenStep:
        asked = (row["rewrite"], row.get("form") or AS_IS)
        if row.get("first_answer"):
            self.opening = _answered(row, gold, (row["question"], AS_IS), "first_answer", "first_parts")
            self.answers[row["question"], AS_IS] = self.opening
        if row["answer"] and asked not in self.answers:
            self.answers[asked] = _answered(row, gold, asked, "answer", "parts")
        place, known = row.get("submitted"), list(self.answers.values())
        is_known = place is not None and 0 <= place < len(known)
        self.last = OpenStep(
            row=row,
            before=self.last,
            opening=self.opening,
            current=self.answers[asked] if row["answer"] else None,
            first=self.answers.get((row["question"], AS_IS)),
            submitted=known[place] if is_known and place is not None else None,
            fault=None if is_known or ("submitted" in row and place is None) else _UNKNOWN,
        )
        return self.last


def _answered(row: Row, gold: Gold, asked: Asked, answer: str, parts: str) -> Answered:
    found = gold.answered(row, *asked, row[answer], row.get(parts))
    if {"rewrite", answer} & set(row.get("cut") or ()):
        return Answered(found.question, found.text, found.form, found.answer, _CUT)
    return found


#: The score after each step, or why it has none.
Scores = Mapping[OpenStep, float | ErrorInfo]


def open_steps(rows: Sequence[Row], gold: Gold) -> list[OpenStep]:
    """Return the steps of a run in the order of its rows."""
    found: dict[int, OpenStep] = {}
    episodes: dict[tuple[int, int], _Episode] = {}
    for place in sorted(range(len(rows)), key=lambda place: (rows[place]["env"], rows[place]["step"])):
        row = rows[place]
        key = (row["env"], row["episode"])
        episode = episodes.get(key)
        # A run that resumes with new episodes gives the first of them the number of one that did not end.
        if episode is None or row.get("first_answer") or episode.question_id != row["question_id"]:
            episode = episodes[key] = _Episode(row["question_id"])
        found[place] = episode.add(row, gold)
    return [found[place] for place in range(len(rows))]


def step_rows(steps: Sequence[OpenStep], ratings: Ratings, *, prices: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yield the rows with their new scores; `prices` of a call are those of which each episode drew one.

    A step whose call failed in the run stays invalid; so becomes one without a score, or before which there is none.
    """
    scores = {step: _score_after(step, ratings) for step in steps}
    for step in steps:
        yield _row(step, ratings, scores, prices)


def _score_after(step: OpenStep, ratings: Ratings) -> float | ErrorInfo:
    """Return the score of what would be submitted after a step."""
    found = step.fault or (ratings[step.submitted] if step.submitted else Reward(score=0.0))
    return found.score if isinstance(found, Reward) else found


def _row(step: OpenStep, ratings: Ratings, scores: Scores, prices: Sequence[float]) -> dict[str, Any]:
    row, score = step.row, scores[step]
    before = _before(step, ratings, scores)
    current = ratings[step.current] if step.current else None
    fault = next((one for one in (current, score, before) if isinstance(one, ErrorInfo)), None)
    first = ratings[step.first] if step.first else None
    opening = ratings[step.opening] if step.opening and row.get("first_answer") else None
    new = {
        "baseline_score": first.score if isinstance(first, Reward) else None,
        "score": next((one for one in (score, before) if not isinstance(one, ErrorInfo)), 0.0),
        "parts": dict(current.parts) if isinstance(current, Reward) else {},
        "reward": 0.0,
    }
    if isinstance(opening, Reward):
        new["first_parts"] = dict(opening.parts)
    if row["valid"] and fault is None:
        assert not isinstance(score, ErrorInfo)
        assert not isinstance(before, ErrorInfo)
        new["reward"] = score - before - _price(step, prices) * (row.get("calls") or 0)
    elif row["valid"] and fault is not None:
        new |= {"valid": False, "error": asdict(fault)}
    return {**row, **new}


def _before(step: OpenStep, ratings: Ratings, scores: Scores) -> float | ErrorInfo:
    """Return the score before a step."""
    if step.before is not None:
        return scores[step.before]
    found = ratings[step.opening] if step.opening else Reward(score=0.0)
    return found.score if isinstance(found, Reward) else found


def _price(step: OpenStep, prices: Sequence[float]) -> float:
    """Return the price of a call in the step's episode: of several the one that the recorded reward shows."""
    if len(prices) == 1:
        return prices[0]
    row, opening = step.row, step.row.get("baseline_score") if step.opening else 0.0
    gain = row["score"] - (step.before.row["score"] if step.before else opening or 0.0)
    return min(prices, key=lambda price: abs(gain - price * (row.get("calls") or 0) - row["reward"]))
