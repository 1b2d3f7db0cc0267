"""Plans that ask in several forms and submit the answer that is most likely right (`--answer learned`).

    answers of a search in all forms, after the operators of its best plan with one answer
    -> P(right), out of fold -> the order of forms -> at which P(right) to stop, by budget or by the price of a call

Their figures are out of fold: the model that scores an answer has seen no answer about its target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from query_mutator.confidence import (
    ConfidenceModel,
    LoggedAnswer,
    Stopping,
    StoppingRule,
    greedy_order,
    places_by_question,
    rule_for_budget,
    submissions,
    training_table,
)
from query_mutator.confidence.table import TrainingTable
from query_mutator.data.split import target_key
from query_mutator.errors import UsageError
from query_mutator.evaluation.plan_result import PlanPoint
from query_mutator.evaluation.plan_trials import Rows, Trials
from query_mutator.evaluation.plans import PlanResult
from query_mutator.learners.plan import Plan
from query_mutator.stats.intervals import wilson_interval
from query_mutator.types import ASK, DoubleArray

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

    UsageError for a task with fewer than two forms, and for too few answers to learn from.
    """
    task, rows = trials.scores.task, trials.compared_rows
    forms = [form.name for form in task.forms]
    if len(forms) < 2:
        raise UsageError("--answer learned chooses among answers in several forms; name two or more with --forms")
    singles = [plan for plan in trials.tried[rows] if not plan.asks_early]
    ranked = [plan for group in trials.ranked(singles, rows) for plan in group]
    prefix = tuple(name for name in ranked[0].steps if name not in forms)
    by_form = {form: Plan(steps=(*prefix, form)) for form in forms}
    trials.score(by_form.values(), rows)
    asked = {form: plan for form, plan in by_form.items() if plan in trials.tried[rows]}
    if len(asked) < 2:
        raise UsageError("the calls of the search do not suffice for --answer learned; give it more --minutes")
    results = {form: trials.scores.results(plan, rows) for form, plan in asked.items()}
    table, scores = _graded(trials, rows, results)
    model = ConfidenceModel.fit(table, seed=seed)
    first = max(asked, key=lambda form: trials.value_of(trials.point(asked[form], rows)))
    order = greedy_order(
        table, model.out_of_fold, list(asked), first=first, agreement=model.agreement, most=MOST_ANSWERS
    )
    paths = _Paths.of(table, scores, model, order)
    if not paths.p:
        raise UsageError("no question was answered in all forms; give the search more --minutes")
    prefix_calls = trials.point(asked[first], rows).calls - 1
    budgets = [one - prefix_calls - 1 / len(paths.p) for one in dict.fromkeys([*BUDGETS, budget or 0.0])]
    rules = [rule_for_budget(paths.p, one, max_calls=len(order)) for one in budgets if 1 <= one <= len(order)]
    rules.append(Stopping.fit(paths.p).rule_for_price(trials.price, max_calls=len(order)))
    points = [_point(rule, prefix, order, paths, prefix_calls=prefix_calls) for rule in dict.fromkeys(rules)]
    return LearnedPlans(points=tuple(points), confidence=model)


@dataclass(frozen=True, slots=True)
class _Paths:
    """What would be submitted after each of k answers to n questions, in the order of forms."""

    p: list[list[float]]  # [n][k], its P(right)
    right: DoubleArray  # [n, k]
    scores: DoubleArray  # [n, k]

    @classmethod
    def of(cls, table: TrainingTable, scores: DoubleArray, model: ConfidenceModel, order: Sequence[str]) -> _Paths:
        p, rows = [], []
        for places in places_by_question(table, order):
            groups = table.answer_groups[places].tolist()
            found = submissions(model.out_of_fold[places], groups, agreement=model.agreement)
            p.append([value for _, value in found])
            rows.append([places[chosen] for chosen, _ in found])
        chosen_rows = np.array(rows, dtype=np.int64).reshape(len(rows), len(order))
        return cls(p, table.right[chosen_rows], scores[chosen_rows])


def _graded(trials: Trials, rows: Rows, results: dict[str, list[PlanResult]]) -> tuple[TrainingTable, DoubleArray]:
    """Return the graded answers in all forms, and their scores [n]."""
    task = trials.scores.task
    seen: set[str] = set()
    logged, scores = [], []
    for place, row in enumerate(rows):
        question = task.questions[row]
        if question.text in seen:  # answers to two questions of one text would count as answers to one
            continue
        seen.add(question.text)
        for answers in results.values():
            attempt = answers[place].attempt
            if attempt is not None:
                scores.append(attempt.reward.score)
                logged.append(
                    LoggedAnswer(
                        question=question.text,
                        attempt=task.reply_of(row, attempt),
                        right=attempt.reward.success >= 0.5,
                        target=target_key(question),
                        gold=question.accept[0] if question.accept else question.reference,
                    )
                )
    return training_table(logged), np.array(scores)


def _point(
    rule: StoppingRule, prefix: Sequence[str], order: Sequence[str], paths: _Paths, *, prefix_calls: float
) -> PlanPoint:
    """Return the plan of a stopping rule with its figures."""
    steps = [*prefix, *(step for form in order[: rule.max_calls] for step in (form, ASK))][:-1]
    stop = math.floor(1e4 * rule.threshold) / 1e4 if rule.threshold <= 1 else None  # down: within the budget
    sure = 2.0 if stop is None else stop
    stops = [next((at for at, p in enumerate(path) if p >= sure), len(path) - 1) for path in paths.p]
    questions = np.arange(len(stops))
    right = int(paths.right[questions, stops].sum())
    return PlanPoint(
        plan=Plan(steps=tuple(steps), answer="learned", stop_fit=stop),
        success=right / len(stops),
        success_ci=wilson_interval(right, len(stops)),
        score=float(paths.scores[questions, stops].mean()),
        calls=float(np.mean(stops)) + 1 + prefix_calls,
        questions=len(stops),
    )
