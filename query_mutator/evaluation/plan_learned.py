"""Plans that ask in several forms and submit the answer that is most likely right (`--answer learned`).

    answers of a search in all forms, after the operators of its best plan with one answer
    -> P(right), out of fold -> the order of forms -> at which P(right) to stop, by budget or by the price of a call

`AnswerPaths` are questions asked in one form after the other (n questions, k forms in that order): what is submitted
after each answer, and which rules say when to stop. Their figures are out of fold: the model that scores an answer has
seen no answer about its target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

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
from query_mutator.confidence.crossfit import TrainingTable
from query_mutator.data.split import target_key
from query_mutator.env.episode import Attempt, QuestionMemory
from query_mutator.env.task import Task
from query_mutator.errors import TooFewAnswersError
from query_mutator.evaluation.plan_trials import PlanPoint, Rows, Trials
from query_mutator.evaluation.plans import Caller, PlanResult, PlanScores
from query_mutator.learners.plan import Plan
from query_mutator.stats.intervals import wilson_interval
from query_mutator.types import ASK, DoubleArray

ANSWERS = (2, 6)  # to a question, at least and at most
CLEANED_SHARE = 0.75  # of the questions, whose text local operators rewrite first
QUESTIONS_OF_A_PLAN = 32

MOST_ANSWERS = 6  # to a question
BUDGETS = (1.5, 2.0, 3.0, 4.0, 6.0)  # mean calls per question, of the plans to choose from


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPaths:
    """What would be submitted after each of k answers to n questions, by P(right) that is out of fold."""

    order: tuple[str, ...]  # k forms
    p: list[list[float]]  # [n][k], P(right) of what is submitted
    right: DoubleArray  # [n, k]
    scores: DoubleArray  # [n, k]

    @classmethod
    def of(
        cls, table: TrainingTable, p_alone: DoubleArray, scores: DoubleArray, order: Sequence[str], *, agreement: float
    ) -> Self:
        """Follow the questions of a table that were asked in all forms; `p_alone` and `scores` are of its answers."""
        p, rows = [], []
        for places in places_by_question(table, order):
            found = submissions(p_alone[places], table.answer_groups[places].tolist(), agreement=agreement)
            p.append([value for _, value in found])
            rows.append([places[chosen] for chosen, _ in found])
        chosen_rows = np.array(rows, dtype=np.int64).reshape(len(rows), len(order))
        return cls(order=tuple(order), p=p, right=table.right[chosen_rows], scores=scores[chosen_rows])

    def rules(self, budgets: Iterable[float], *, price: float, prefix_calls: float = 0.0) -> list[StoppingRule]:
        """Return the rules for budgets of calls per question that can be kept, then that for the price of a call.

        `prefix_calls` are those before the first answer.
        """
        within = [self.rule_within(one - prefix_calls) for one in budgets]
        return list(dict.fromkeys([*(rule for rule in within if rule is not None), self.rule_worth(price)]))

    def rule_within(self, budget: float) -> StoppingRule | None:
        """Return the rule for a budget of calls per question, None for one that cannot be kept."""
        budget, most = budget - 1 / len(self.p), len(self.order)
        return rule_for_budget(self.p, budget, max_calls=most) if 1 <= budget <= most else None

    def rule_worth(self, price: float) -> StoppingRule:
        """Return the rule for the price of a call."""
        return Stopping.fit(self.p).rule_for_price(price, max_calls=len(self.order))

    def stops(self, threshold: float) -> list[int]:
        """Return after which answer of each question P(right) is that high, else the last: [n] numbers from 0."""
        return [next((at for at, p in enumerate(path) if p >= threshold), len(path) - 1) for path in self.p]

    def point(self, rule: StoppingRule, *, prefix: Sequence[str] = (), prefix_calls: float = 0.0) -> PlanPoint:
        """Return the plan of a stopping rule after the operators `prefix`, with its figures."""
        steps = [*prefix, *(step for form in self.order[: rule.max_calls] for step in (form, ASK))][:-1]
        stop = math.floor(1e4 * rule.threshold) / 1e4 if rule.threshold <= 1 else None  # down: within the budget
        stops = self.stops(math.inf if stop is None else stop)
        questions = np.arange(len(stops))
        right = int(self.right[questions, stops].sum())
        return PlanPoint(
            plan=Plan(steps=tuple(steps), answer="learned", stop_fit=stop),
            success=right / len(stops),
            success_ci=wilson_interval(right, len(stops)),
            score=float(self.scores[questions, stops].mean()),
            calls=float(np.mean(stops)) + 1 + prefix_calls,
            questions=len(stops),
        )


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
