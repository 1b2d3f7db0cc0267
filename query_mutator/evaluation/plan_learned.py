"""Plans that ask in several forms and submit the answer that is most likely right (`--answer learned`).

    answers of a search in all forms, after the operators of its best plan with one answer
    -> P(right), out of fold -> the order of forms -> at which P(right) to stop, by budget or by the price of a call

Their figures are out of fold: the model that scores an answer has seen no answer about its target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from query_mutator.confidence import ConfidenceModel, greedy_order, training_table
from query_mutator.confidence.table import TrainingTable
from query_mutator.errors import TooFewAnswersError
from query_mutator.evaluation.answer_paths import AnswerPaths
from query_mutator.evaluation.first_answers import logged
from query_mutator.evaluation.plan_result import PlanPoint
from query_mutator.evaluation.plan_trials import Rows, Trials
from query_mutator.evaluation.plans import PlanResult
from query_mutator.learners.plan import Plan
from query_mutator.types import DoubleArray

__all__ = ["LearnedPlans", "learned_plans"]

MOST_ANSWERS = 6  # to a question
BUDGETS = (1.5, 2.0, 3.0, 4.0, 6.0)  # mean calls per question, of the plans to choose from


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPlans:
    """Plans with their figures out of fold, and the model of P(right) that they submit by."""

    points: tuple[PlanPoint, ...]
    confidence: ConfidenceModel


def learned_plans(trials: Trials, *, budget: float | None, seed: int = 0) -> LearnedPlans:
    """Ask the questions of a search in all forms, as far as its calls go, and return plans that submit by P(right).

    TooFewAnswersError for a task with fewer than two forms, and for too few answers to learn from.
    """
    task, rows = trials.scores.task, trials.compared_rows
    forms = [form.name for form in task.forms]
    if len(forms) < 2:
        raise TooFewAnswersError(
            "--answer learned chooses among answers in several forms; name two or more with --forms"
        )
    singles = [plan for plan in trials.tried[rows] if not plan.asks_early]
    ranked = [plan for group in trials.ranked(singles, rows) for plan in group]
    prefix = tuple(name for name in ranked[0].steps if name not in forms)
    by_form = {form: Plan(steps=(*prefix, form)) for form in forms}
    trials.score(by_form.values(), rows)
    asked = {form: plan for form, plan in by_form.items() if plan in trials.tried[rows]}
    if len(asked) < 2:
        raise TooFewAnswersError("the calls of the search do not suffice for --answer learned; give it more --minutes")
    results = {form: trials.scores.results(plan, rows) for form, plan in asked.items()}
    table, scores = _graded(trials, rows, results)
    model = ConfidenceModel.fit(table, seed=seed)
    model.report.check()
    first = max(asked, key=lambda form: trials.value_of(trials.point(asked[form], rows)))
    order = greedy_order(
        table, model.out_of_fold, list(asked), first=first, agreement=model.agreement, most=MOST_ANSWERS
    )
    paths = AnswerPaths.of(table, model.out_of_fold, scores, order, agreement=model.agreement)
    if not paths.p:
        raise TooFewAnswersError("no question was answered in all forms; give the search more --minutes")
    prefix_calls = trials.point(asked[first], rows).calls - 1
    rules = paths.rules([*BUDGETS, budget or 0.0], price=trials.price, prefix_calls=prefix_calls)
    points = [paths.point(rule, prefix=prefix, prefix_calls=prefix_calls) for rule in rules]
    return LearnedPlans(points=tuple(points), confidence=model)


def _graded(trials: Trials, rows: Rows, results: dict[str, list[PlanResult]]) -> tuple[TrainingTable, DoubleArray]:
    """Return the graded answers in all forms, and their scores [n]."""
    task = trials.scores.task
    seen: set[str] = set()
    graded, scores = [], []
    for place, row in enumerate(rows):
        question = task.questions[row]
        if question.text in seen:  # answers to two questions of one text would count as answers to one
            continue
        seen.add(question.text)
        for answers in results.values():
            attempt = answers[place].attempt
            if attempt is not None:
                scores.append(attempt.reward.score)
                graded.append(logged(task, row, attempt))
    return training_table(graded), np.array(scores)
