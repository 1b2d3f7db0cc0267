"""One evaluation of all methods in one pool of calls; methods that need the results of others start when these are in.

operators are ranked on training questions   -> best_single; the order of best_of_k, and what it begins with
the policy's calls on the same questions     -> the k of best_of_k

The rows of its table are the policy and what it has to beat, on the same questions:

    identity      the original question
    random        uniform over all actions until submit or the last step, with the rules of the policy's episodes
    best_single   the action that did best on training questions, taken once; its answer, the original is not asked
    best_of_k     a vote of the k forms that did best on training questions, after local operators that do better than
                  the original question; without forms of the original question and k - 1 rewrites. k is the smallest
                  whose calls on training questions are at least the policy's, with prices their price
    of several    each model alone, and what spends the policy's price (`cascades`)
    best_plan     with a plan search: the best plan that it found on training questions, within the budget if there is
                  one; it submits by P(right) as well where the policy does
    policy        the trained policy, greedy

Baselines make no call that they do not need: they run with `ask="form"`. Success and score are over held-out
questions; false refusals over the same (all are harmless); guard refusals over requests that should be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

from query_mutator.env.task import Task, operator_names
from query_mutator.evaluation.cascades import (
    CLASSIFIER,
    LOGPROB_CASCADE,
    RANDOM_CASCADE,
    logprob_cascade,
    question_classifier,
    shuffled,
)
from query_mutator.evaluation.methods import Evaluator, Found, Job
from query_mutator.evaluation.outcomes import Outcome, mean, scored
from query_mutator.evaluation.summary import IDENTITY, PLAN, POLICY, Results
from query_mutator.operators import local_rewrite
from query_mutator.session.play import Player, script, uniform
from query_mutator.types import ASK, SUBMIT, UNDO, Question

BEST_OF_K, BEST_SINGLE, RANDOM = "best_of_k", "best_single", "random"

RANKED, GUARD = ", training", ", guard"  # ends of the names of jobs
_FIRST, _LAST = (IDENTITY, RANDOM, BEST_SINGLE, BEST_OF_K), (RANDOM_CASCADE, LOGPROB_CASCADE, CLASSIFIER, PLAN, POLICY)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A row of the table: the rules of its episodes, from those of the policy's task, and what chooses its actions."""

    name: str
    player: Player
    rules: Callable[[Task], Task] = lambda task: task

    def job(self, task: Task, *, of: str = "") -> Job:
        """Return the method on the questions of a task; `of` ends its name."""
        return Job(name=f"{self.name}{of}", task=self.rules(task), player=self.player)


def asking(task: Task, **rules: Any) -> Task:
    """Return the task with rewriting and asking apart and with `rules`, for players that ignore observations."""
    return task.with_rules(ask="form", max_asks=None, **rules)


def chain_of(name: str, task: Task, actions: Sequence[str], **rules: Any) -> Method:
    """Return the method that takes the same actions, given by name, for every question."""
    names = asking(task).actions
    places = [names.index(action) for action in actions]
    return Method(
        name=name, player=script(places), rules=lambda task: asking(task, max_episode_steps=len(places), **rules)
    )


def standard_methods(task: Task, policy: Player, *, seed: int) -> list[Method]:
    """Return the methods that need no results of others; the task whose episodes they play may have more forms."""
    return [
        chain_of(IDENTITY, task, [SUBMIT]),
        Method(name=RANDOM, player=uniform(seed=seed), rules=lambda each: replace(each, forms=task.forms)),
        Method(name=POLICY, player=policy, rules=lambda each: replace(each, forms=task.forms)),
    ]


def best_of(k: int, ranking: Sequence[str], task: Task, *, first: Sequence[str] = ()) -> Method:
    """Return best-of-k: the target is asked the original question and k - 1 rewrites of it, or `first` in k forms."""
    if task.forms:
        forms = [name for name in ranking if name in {form.name for form in task.forms}][:k]
        return chain_of(BEST_OF_K, task, [*first, *forms, SUBMIT], answer="vote")
    tries = chain.from_iterable((operator, ASK, UNDO) for operator in ranking[: k - 1])
    return chain_of(BEST_OF_K, task, [ASK, *tries, SUBMIT], answer="vote")


class Comparison:
    """The methods of an evaluation and their outcomes so far; `methods` are those that need no results of others.

    The tasks have the rules of the policy's episodes: on the questions of the `test`, on requests that should be
    refused (`guard`, None: there are none), and on training questions, on which operators are compared (`ranking`).
    """

    def __init__(
        self,
        evaluator: Evaluator,
        methods: Sequence[Method],
        *,
        test: Task,
        guard: Task | None,
        ranking: Task,
        models: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self._evaluator, self._methods, self._seed = evaluator, [*methods], seed
        self._alone = {model: f"{model} alone" for model in models} if len(models) > 1 else {}
        self._test, self._guard, self._ranking = test, guard, ranking
        self._found: Found = {}
        self.ranking: list[str] = []  # operators and forms, the best on training questions first
        self.k: int | None = None
        self.calls = set[object]()  # that the methods needed

    def run(self) -> None:
        """Evaluate all methods on all questions; after an interruption `results` has what was found."""
        task = self._ranking
        ranked = {name: [name] for name in operator_names(task.actions)}
        if task.forms:
            ranked[IDENTITY] = []
        jobs = [chain_of(name, task, [*actions, SUBMIT]).job(task, of=RANKED) for name, actions in ranked.items()]
        self._run(jobs, self._methods, title="evaluation")
        merits = {name: self._merit(name) for name in ranked}
        original = merits.pop(IDENTITY, None)
        local = [one.name for one in task.operators if local_rewrite(one) is not None]
        first = [name for name in local if original is not None and merits[name] > original]
        self.ranking = sorted(merits, key=lambda name: merits[name], reverse=True)
        self.k = self._k_of_calls(mean(self._outcomes(POLICY), "price"))
        single = chain_of(BEST_SINGLE, self._test, [self.ranking[0], SUBMIT])
        last = [single, best_of(self.k, self.ranking, self._test, first=first), *self._several()]
        self._methods += last
        self._run([], last, title="evaluation of the best")
        for questions, of in self._sets if self._alone else ():
            self._put_together(questions, of)

    @property
    def _sets(self) -> list[tuple[Task, str]]:
        """Return the questions and the requests that should be refused, with what ends the names of their jobs."""
        return [(self._test, ""), *([(self._guard, GUARD)] if self._guard is not None else ())]

    def _several(self) -> list[Method]:
        """Return each of several models alone, in its best arm, and what the policy did for other questions."""
        if not self._alone:
            return []
        done = {
            task.questions[index]: outcome
            for task, of in self._sets
            for index, outcome in self._found[f"{POLICY}{of}"].items()
        }
        policy = next(method for method in self._methods if method.name == POLICY)
        alone = [chain_of(name, self._test, [self._best_arm(model), SUBMIT]) for model, name in self._alone.items()]
        return [*alone, replace(policy, name=RANDOM_CASCADE, player=shuffled(done, seed=self._seed))]

    def _best_arm(self, model: str) -> str:
        """Return the arm of a model that did best on training questions."""
        models = {form.name: form.model for form in self._test.forms}
        return next(name for name in self.ranking if models.get(name) == model)

    def _put_together(self, task: Task, of: str) -> None:
        """Add the cascades that make no call of their own, at the price of the policy on the same questions."""
        price = mean(self._outcomes(f"{POLICY}{of}"), "price", default=0.0)
        alone = {model: self._outcomes(f"{name}{of}") for model, name in self._alone.items()}
        training = {model: self._outcomes(f"{self._best_arm(model)}{RANKED}") for model in self._alone}
        made = {
            LOGPROB_CASCADE: logprob_cascade(alone, price=price),
            CLASSIFIER: question_classifier(alone, task, training, self._ranking, price=price),
        }
        self._found |= {f"{name}{of}": dict(enumerate(outcomes)) for name, outcomes in made.items()}

    def _run(self, jobs: Sequence[Job], methods: Sequence[Method], *, title: str) -> None:
        """Run jobs, and methods on the questions and on the requests that should be refused."""
        jobs = [*jobs, *(method.job(task, of=of) for task, of in self._sets for method in methods)]
        self._evaluator.run_all(jobs, self._found, title=title, calls=self.calls)

    def results(self) -> Results:
        """Return the outcomes on the questions that all methods finished, of methods that finished any."""
        names = [name for name in (*_FIRST, *self._alone.values(), *_LAST) if self._found.get(name)]
        questions, outcomes = self._finished(names, self._test)
        guard, guarded = self._finished(names, self._guard, of=GUARD)
        return Results(questions=questions, outcomes=outcomes, guard=guard, guarded=guarded)

    def _finished(
        self, names: Sequence[str], task: Task | None, *, of: str = ""
    ) -> tuple[Sequence[Question], dict[str, list[Outcome]]]:
        found = {name: self._found.get(f"{name}{of}", {}) for name in names}
        shared = sorted(set.intersection(*map(set, found.values()))) if found else []
        questions = [] if task is None else [task.questions[index] for index in shared]
        return questions, {name: [outcomes[index] for index in shared] for name, outcomes in found.items()}

    def _outcomes(self, job: str) -> list[Outcome]:
        return list(self._found[job].values())

    def _merit(self, operator: str) -> tuple[float, float]:
        found = self._outcomes(f"{operator}{RANKED}")
        return (mean(found, "success"), mean(found, "score")) if scored(found) else (-1.0, -1.0)

    def _k_of_calls(self, price: float) -> int:
        """Return the smallest k that costs at least a price on the training sample; a rewrite costs an answer too."""
        texts, forms = [question.text for question in self._ranking.questions], {one.name for one in self._test.forms}
        if forms:
            names = [name for name in self.ranking if name in forms]
            paid = (mean(self._outcomes(f"{name}{RANKED}"), "price", default=1.0) for name in names)
            return 1 + sum(spent < price for spent in accumulate(paid))
        costs = []
        for name in self.ranking:
            found = self._outcomes(f"{name}{RANKED}")
            tried = [(text, o) for text, o in zip(texts, found, strict=True) if not o.error]
            new = [o.calls - (o.asked[-1] == text) for text, o in tried]  # the original's answer is there already
            costs.append(sum(new) / max(1, len(new)))
        return 1 + sum(spent < price for spent in accumulate(costs[:-1], initial=1.0))
