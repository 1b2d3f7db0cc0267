"""P(right) before a training: random plans ask its questions, and a model is fitted to the graded answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from query_mutator.confidence import ConfidenceModel, LoggedAnswer
from query_mutator.data.split import target_key
from query_mutator.env.episode import Attempt
from query_mutator.env.memory import QuestionMemory
from query_mutator.env.task import Task
from query_mutator.evaluation.plans import Caller, PlanScores
from query_mutator.learners.plan import Plan
from query_mutator.types import ASK

__all__ = ["Learned", "graded_answers", "learn_confidence", "logged"]

ANSWERS = (2, 6)  # to a question, at least and at most
CLEANED_SHARE = 0.75  # of the questions, whose text local operators rewrite first
QUESTIONS_OF_A_PLAN = 32


class Learned(NamedTuple):
    """P(right), and the answers that it was learned from, by the question's number."""

    confidence: ConfidenceModel
    answers: dict[int, QuestionMemory]


def learn_confidence(
    caller: Caller, task: Task, *, max_calls: int, seed: int, progress: Callable[[str, int], Any] | None = None
) -> Learned:
    """Return the model of P(right) of the answers that random plans get within about so many calls, and these.

    TooFewAnswersError for too few to learn from, or to order them better than chance.
    """
    bar = progress("answers to learn P(right) from", max_calls) if progress else None
    scores = PlanScores(caller, task, on_call=lambda: bar.update() if bar is not None else None)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(task.questions)).tolist()
    count = int(np.clip(max_calls // max(1, len(order)), *ANSWERS))
    size = max(1, min(QUESTIONS_OF_A_PLAN, max_calls // count))
    asked: list[int] = []
    try:
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            plan = random_plan(scores.task, rng, answers=count)
            if asked and scores.calls + scores.max_calls(plan, rows) > max_calls:
                break
            scores.gather([plan], rows)
            asked += rows
    finally:
        if bar is not None:
            bar.close()
    confidence = ConfidenceModel.fit(list(graded_answers(scores, asked)), seed=seed)
    confidence.report.check()
    return Learned(confidence, {row: QuestionMemory(attempts=dict(scores.answers(row))) for row in asked})


def random_plan(task: Task, rng: np.random.Generator, *, answers: int) -> Plan:
    """Return a plan that asks in so many random forms, mostly after all local operators; without forms, operators."""
    forms = [form.name for form in task.forms]
    operators = [operator.name for operator in task.operators]
    first = [name for place, name in enumerate(operators) if task.is_local(place)] if forms else []
    if rng.random() >= CLEANED_SHARE:
        first = []
    drawn = rng.permutation(forms or operators)[:answers].tolist()
    return Plan(steps=tuple([*first, *(step for name in drawn for step in (name, ASK))][:-1]))


def graded_answers(scores: PlanScores, rows: Sequence[int]) -> Iterator[LoggedAnswer]:
    """Yield what was answered to the questions `rows`; of questions with the same text the first counts."""
    task = scores.task
    seen: set[str] = set()
    for row in rows:
        question = task.questions[row]
        if question.text in seen:  # answers to two questions of one text would count as answers to one
            continue
        seen.add(question.text)
        for attempt in scores.attempts(row):
            yield logged(task, row, attempt)


def logged(task: Task, row: int, attempt: Attempt) -> LoggedAnswer:
    """Return a graded answer to question `row`."""
    question = task.questions[row]
    return LoggedAnswer(
        question=question.text,
        attempt=task.reply_of(row, attempt),
        right=attempt.reward.success >= 0.5,
        target=target_key(question),
        gold=question.accept[0] if question.accept else question.reference,
    )
