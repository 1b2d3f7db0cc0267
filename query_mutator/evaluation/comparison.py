"""One evaluation of all methods in one pool of calls; methods that need the results of others start when these are in.

operators are ranked on training questions   -> best_single; the order of best_of_k
the policy's calls on the same questions     -> the k of best_of_k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from query_mutator.env.task import Task
from query_mutator.evaluation.baselines import (
    BANDIT,
    BEST_OF_K,
    BEST_SINGLE,
    RANDOM,
    Method,
    best_of,
    best_of_name,
    best_single,
    chain_of,
)
from query_mutator.evaluation.methods import Evaluator, Found, Job
from query_mutator.evaluation.outcomes import Outcome, mean, scored
from query_mutator.evaluation.summary import IDENTITY, POLICY, Results
from query_mutator.types import SUBMIT, ErrorInfo

__all__ = ["Comparison", "QuestionTasks"]

_FIRST_ROWS = (IDENTITY, RANDOM, BEST_SINGLE, BEST_OF_K)
_NOT_REACHED = ErrorInfo(kind="not_asked", message="the evaluation ended before")


@dataclass(frozen=True, kw_only=True)
class QuestionTasks:
    """The tasks of an evaluation: the rules of the policy's episodes, on different questions."""

    test: Task
    guard: Task
    ranking: Task  # a sample of the training questions, on which operators are compared


class Comparison:
    """The methods of an evaluation and their outcomes so far."""

    def __init__(self, evaluator: Evaluator, tasks: QuestionTasks, methods: Sequence[Method]) -> None:
        """Take the methods that need no results of others."""
        self._evaluator, self._tasks = evaluator, tasks
        self._methods = {method.name: method for method in methods}
        self._found: Found = {}
        self.ranking: list[str] = []  # operators, the best on training questions first
        self.k: int | None = None
        self._tried_k: int | None = None

    def run(self) -> None:
        """Evaluate all methods; after an interruption `results` has what was found."""
        jobs = [
            self._job(chain_of(_ranked(operator.name), self._tasks.ranking, [operator.name, SUBMIT], answer="last"),
                      self._tasks.ranking, is_first=True)
            for operator in self._tasks.ranking.operators
        ]  # fmt: skip
        for method in self._methods.values():
            jobs += self._jobs(method)
        self._evaluator.run_all(jobs, self._found, title="evaluation", next_jobs=self._next_jobs)

    def results(self) -> Results:
        """Return the outcomes on the questions that all methods finished, of methods that finished any."""
        found = {name: self._found.get(self._job_name(name), {}) for name in self._row_names()}
        found = {name: outcomes for name, outcomes in found.items() if outcomes}
        shared = set.intersection(*map(set, found.values())) if found else set()
        guarded = {name: self._found.get(_guard(self._job_name(name)), {}) for name in found}
        guard = self._tasks.guard.questions
        return Results(
            questions=[self._tasks.test.questions[index] for index in sorted(shared)],
            outcomes={name: [outcomes[index] for index in sorted(shared)] for name, outcomes in found.items()},
            guard=guard,
            guarded={
                name: [
                    outcomes.get(index) or Outcome(question_id=question.id, error=_NOT_REACHED)
                    for index, question in enumerate(guard)
                ]
                for name, outcomes in guarded.items()
            },
        )

    def _row_names(self) -> list[str]:
        """Return the names of the table's rows, the policy last."""
        others = [name for name in self._methods if name not in (*_FIRST_ROWS, BANDIT, POLICY)]
        return [*_FIRST_ROWS, *others, BANDIT, POLICY]

    def _job_name(self, row: str) -> str:
        return best_of_name(self.k or 0) if row == BEST_OF_K else row

    # --- jobs ------------------------------------------------------------------------------------------------------

    def _jobs(self, method: Method) -> list[Job]:
        return [self._job(method, self._tasks.test, is_first=method.name == POLICY), self._guard_job(method)]

    def _guard_job(self, method: Method) -> Job:
        job = self._job(method, self._tasks.guard)
        return Job(name=_guard(job.name), task=job.task, make=job.make)

    def _job(self, method: Method, task: Task, *, is_first: bool = False) -> Job:
        return Job(name=method.name, task=method.rules(task), make=method.make, is_first=is_first)

    def _next_jobs(self) -> list[Job]:
        """Return the jobs that can start now that one more is complete."""
        ranked = {operator.name: _ranked(operator.name) for operator in self._tasks.ranking.operators}
        jobs: list[Job] = []
        if not self.ranking and all(self._is_complete(job, self._tasks.ranking) for job in ranked.values()):
            self.ranking = sorted(ranked, key=lambda name: self._merit(ranked[name]), reverse=True)
            jobs += self._jobs(best_single(self.ranking, self._tasks.test))
        if self.ranking and self.k is None and self._is_complete(POLICY, self._tasks.test):
            jobs += self._best_of_jobs()
        return jobs

    def _is_complete(self, job: str, task: Task) -> bool:
        return len(self._found.get(job, ())) == len(task.questions)

    def _outcomes(self, job: str) -> list[Outcome]:
        return list(self._found[job].values())

    def _merit(self, job: str) -> tuple[float, float]:
        found = self._outcomes(job)
        return (mean(found, "success"), mean(found, "score")) if scored(found) else (-1.0, -1.0)

    # --- the k of best_of_k ----------------------------------------------------------------------------------------

    def _best_of_jobs(self) -> list[Job]:
        """Return the next k to try, or, when the smallest is found whose calls are enough, its guard questions."""
        k = self._tried_k or max(1, self._expected_k() - 1)  # from below: one too large makes calls for nothing
        while self._is_complete(best_of_name(k), self._tasks.test):
            enough = self._is_enough(k)
            if enough and (k == 1 or (self._found.get(best_of_name(k - 1)) and not self._is_enough(k - 1))):
                self.k = k
                return [self._guard_job(best_of(k, self.ranking, self._tasks.test))]
            k += -1 if enough else 1
        if k == self._tried_k:
            return []
        self._tried_k = k
        return [self._job(best_of(k, self.ranking, self._tasks.test), self._tasks.test, is_first=True)]

    def _is_enough(self, k: int) -> bool:
        spent = mean(self._outcomes(best_of_name(k)), "calls")
        return k > len(self.ranking) or not spent < self._policy_calls

    @property
    def _policy_calls(self) -> float:
        return mean(self._outcomes(POLICY), "calls")

    def _expected_k(self) -> int:
        """Return the k whose calls on the training sample are enough; each operator costs a rewrite and an answer."""
        texts = [question.text for question in self._tasks.ranking.questions]
        costs = []
        for name in self.ranking:
            tried = [(text, o) for text, o in zip(texts, self._outcomes(_ranked(name)), strict=True) if not o.error]
            new = [o.calls - (o.asked[-1] == text) for text, o in tried]  # the original's answer is there already
            costs.append(sum(new) / max(1, len(new)))
        spent = list(accumulate(costs, initial=1.0))
        return 1 + sum(calls < self._policy_calls for calls in spent[:-1])


def _ranked(operator: str) -> str:
    return f"training: {operator}"


def _guard(job: str) -> str:
    return f"{job}, guard"
