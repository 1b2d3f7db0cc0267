"""The result of a method on a question. A question whose calls failed for good is unscored: it has an error instead."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from query_mutator.data.split import target_key
from query_mutator.session.play import check_failures
from query_mutator.types import CONTROLS, ErrorInfo, Question

MAX_UNSCORED_ROWS = 20  # of a report; all are counted
DIGITS = 4  # of what explains a score; the score itself and its parts are whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one method on one question; with an `error` there is none, and the numbers are NaN or 0."""

    question_id: str
    success: float = math.nan
    score: float = math.nan
    refused: bool = False
    calls: int = 0  # to mutator and target; also those that another method's equal call saved
    price: float = 0.0  # of these calls; without prices their number
    tokens: int = 0  # of these calls
    reply_tokens: int = 0  # those of the replies
    seconds: float = 0.0  # that these calls took; 0 for replies of the cache on disk
    steps: tuple[str, ...] = ()  # the actions taken
    rewrites: tuple[str, ...] = ()  # the wording after each step
    guards: tuple[str | None, ...] = ()  # that rejected the rewrite of each step
    asked: tuple[str, ...] = ()  # the wordings that the target was asked
    forms: tuple[str, ...] = ()  # in which it was asked them
    answers: tuple[str, ...] = ()  # to those
    models: tuple[str, ...] = ()  # that gave them, of a task with prices
    logprobs: tuple[float | None, ...] = ()  # mean log probabilities of their tokens
    is_cut: bool = False  # the answer that was submitted ended at the token limit
    parts: tuple[Mapping[str, float], ...] = ()  # of the score of each answer
    scores: tuple[float, ...] = ()  # of the answers
    fits: tuple[float, ...] = ()  # cosines of wordings and answers, if these are embedded
    why: str = ""  # the rule that chose the answer, and its number
    submitted: int | None = None  # place among the answers
    error: ErrorInfo | None = None  # why the question is unscored

    @property
    def answer(self) -> str:
        """Return the answer that was submitted."""
        return "" if self.submitted is None else self.answers[self.submitted]

    @property
    def rejected(self) -> tuple[tuple[str, str], ...]:
        """Return operator and guard of each rewrite that was not used."""
        return tuple((name, guard) for name, guard in zip(self.steps, self.guards, strict=False) if guard is not None)

    @property
    def target_calls(self) -> int:
        """Return the number of questions to the target."""
        return len(self.asked)

    @property
    def is_right(self) -> bool:
        """Return whether the submitted answer is right."""
        return self.success >= 0.5

    def to_row(self, question: Question) -> dict[str, Any]:
        """Return plain JSON types, a row of evaluation.jsonl."""
        row = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {
            **row,
            **(dict.fromkeys(("success", "score", "refused")) if self.error else {}),
            "question": question.text,
            "accepted": list(question.accept or filter(None, [question.reference])),
            "target": target_key(question),
            "tags": list(question.tags),
            "scores": [round(score, DIGITS) for score in self.scores],
            "fits": [round(fit, DIGITS) for fit in self.fits],
            "seconds": round(self.seconds, 6),
        }


def scored(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes without an error."""
    return [outcome for outcome in outcomes if outcome.error is None]


def mean(outcomes: Sequence[Outcome], name: str, *, default: float = math.nan) -> float:
    """Return the mean of a field over the scored outcomes, `default` when there are none."""
    values = [getattr(outcome, name) for outcome in scored(outcomes)]
    return float(np.mean(values)) if values else default


def check_report(report: Mapping[str, Any], *, max_failure_rate: float) -> None:
    """Raise TooManyFailuresError when too many held-out questions of all methods in a report are unscored."""
    kinds = sum((Counter(method["unscored"]) for method in report["methods"].values()), Counter())
    check_failures(kinds, report["n"] * len(report["methods"]), max_failure_rate=max_failure_rate)


def unscored_rows(by_method: Mapping[str, Sequence[Outcome]]) -> list[dict[str, str]]:
    """Return method, question and reason of the first unscored questions."""
    rows = [
        {"method": name, "question_id": o.question_id, "kind": o.error.kind, "message": o.error.message}
        for name, outcomes in by_method.items()
        for o in outcomes
        if o.error is not None
    ]
    return rows[:MAX_UNSCORED_ROWS]


def failure_kinds(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return how often each kind of failure left a question unscored, the most frequent first."""
    return dict(Counter(outcome.error.kind for outcome in outcomes if outcome.error is not None).most_common())


def count_rewrites(pairs: Iterable[tuple[Question, Outcome]]) -> dict[str, dict[str, Any]]:
    """Return by operator its `rewrites` that differ from their wording, each once, and those each guard `rejected`."""
    counts: dict[str, Counter[str | None]] = defaultdict(Counter)
    seen = set()
    for question, outcome in pairs:
        before = question.text
        for operator, text, guard in zip(outcome.steps, outcome.rewrites, outcome.guards, strict=False):
            key = question.id, operator, before
            if operator not in CONTROLS and (guard or text != before) and key not in seen:
                seen.add(key)
                counts[operator][guard] += 1
            before = text
    return {
        operator: {
            "rewrites": guards.total(),
            "rejected": {guard: count for guard, count in guards.most_common() if guard is not None},
        }
        for operator, guards in sorted(counts.items())
    }


def rejections_in_words(counts: Mapping[str, Any]) -> str:
    """Return one line on the rate of each operator with a rejection, "" without a rewrite."""
    total = sum(found["rewrites"] for found in counts.values())
    if not total:
        return ""
    rates = [
        f"{name} {sum(found['rejected'].values()) / found['rewrites']:.0%} of {found['rewrites']:,} "
        f"({', '.join(f'{guard} {count}' for guard, count in found['rejected'].items())})"
        for name, found in counts.items()
        if found["rejected"]
    ]
    if not rates:
        return f"rejected rewrites: none of {total:,}"
    return f"rejected rewrites (the wording stays): {'; '.join(rates)}"
