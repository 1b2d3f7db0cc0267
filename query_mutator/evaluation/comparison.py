"""One evaluation of all methods in one pool of calls; methods that need the results of others start when these are in.

operators are ranked on training questions   -> best_single; the order of best_of_k, and what it begins with
the policy's calls on the same questions     -> the k of best_of_k

The rows of its table are the policy and what it has to beat, on the same n questions:

    identity      the original question
    random        uniform over all actions until submit or the last step, with the rules of the policy's episodes
    best_single   the action that did best on training questions, taken once; its answer, the original is not asked
    best_of_k     a vote of the k forms that did best on training questions, after local operators that do better than
                  the original question; without forms of the original question and k - 1 rewrites. k is the smallest
                  whose calls on training questions are at least the policy's, with prices their price
    best_plan     with a plan search: the best plan that it found on training questions, within the budget if there is
                  one; it submits by P(right) as well where the policy does
    policy        the trained policy, greedy

of K models, the cheapest first, at the price that the policy paid on the same questions:

    MODEL alone          each model, in the arm of it that did best on training questions
    random_cascade       what the policy did, each time for another question: every model gets the same share of calls
    logprob_cascade      the next model where the mean log probability of an answer is below a threshold
    question_classifier  the model with the highest P(right) by the question alone minus a multiple of its price
                         (RouteLLM, arXiv:2406.18665): regressions on words and embeddings of training questions

The last two are put together from the answers of each model alone. Threshold and multiple are those that spend most
within the policy's price; no grade of a held-out answer decides them.

Baselines make no call that they do not need: they run with `ask="form"`. Success and score are over held-out
questions; false refusals over the same (all are harmless); guard refusals over requests that should be refused.

Every method and question is one episode. Equal calls of different methods are made once, and counted for each method as
if it had made its own: the pool keeps the replies of an evaluation, and the client shares calls in flight. Methods
advance through their questions at the same pace, so that an interrupted evaluation has the same questions of all; long
episodes start earlier, so that no slot waits for them at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate, chain, combinations
from statistics import median_low
from typing import Any, Self

import numpy as np

from query_mutator.cli.console import progress
from query_mutator.confidence.gain import WEIGHT, gain_inputs
from query_mutator.confidence.scorers import LinearScorer
from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.scheduling import Call, Flow, Need, map_needs
from query_mutator.env.task import Task, operator_names
from query_mutator.errors import TooManyFailuresError
from query_mutator.evaluation.summary import IDENTITY, PLAN, POLICY, Outcome, Results, mean, scored
from query_mutator.forms import arms
from query_mutator.llm.cache import Cache, is_repeatable, request_key
from query_mutator.llm.client import DEFAULT_POLICY, Client, RetryPolicy
from query_mutator.llm.store import Store
from query_mutator.operators import local_rewrite
from query_mutator.reading import is_refusal
from query_mutator.session.models import OpenModels
from query_mutator.session.play import FailureWindow, Played, Player, in_pool, play, script, uniform
from query_mutator.types import ASK, SUBMIT, UNDO, Completion, DoubleArray, ErrorInfo, IntArray, Question

BEST_OF_K, BEST_SINGLE, RANDOM = "best_of_k", "best_single", "random"
RANDOM_CASCADE, LOGPROB_CASCADE, CLASSIFIER = "random_cascade", "logprob_cascade", "question_classifier"
RANKED, GUARD = ", training", ", guard"  # ends of the names of jobs
_FIRST, _LAST = (IDENTITY, RANDOM, BEST_SINGLE, BEST_OF_K), (RANDOM_CASCADE, LOGPROB_CASCADE, CLASSIFIER, PLAN, POLICY)
IN_PROGRESS = 4  # episodes in progress for each call in flight: some of them embed and score


@dataclass(frozen=True, kw_only=True)
class Job:
    """A method on the questions of a task."""

    name: str
    task: Task
    player: Player  # of every question


#: Outcomes by the job's name and the question's index.
Found = dict[str, dict[int, Outcome]]


@dataclass(kw_only=True)
class Evaluator:
    """Runs methods on the questions of a task with `batch_size` calls in flight.

    A question whose calls fail for good is an Outcome with an error. Once more than `max_failure_rate` of the last 100
    questions of a job failed, its other questions are not asked.
    """

    client: Client
    batch_size: int
    retry_policy: RetryPolicy = DEFAULT_POLICY
    max_failure_rate: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.client, Cache) and self.client.run):
            self.client = Cache(self.client, run=Store(None))

    @classmethod
    def of(cls, models: OpenModels, *, max_failure_rate: float) -> Self:
        """Return the evaluator over open models."""
        return cls(
            client=models.calls.eval_client,
            batch_size=models.settings.calls_in_flight,
            retry_policy=models.retry_policy,
            max_failure_rate=max_failure_rate,
        )

    def run(self, task: Task, player: Player, *, name: str = "") -> list[Outcome]:
        """Return one outcome per question, in the task's order."""
        found: Found = {}
        self.run_all([Job(name=name, task=task, player=player)], found, title=name)
        return list(found[name].values())

    def run_all(self, jobs: Sequence[Job], found: Found, *, title: str, calls: set[object] | None = None) -> None:
        """Put the outcomes of all jobs into `found`, in the order of their questions, and their calls into `calls`.

        What is there when it is interrupted can be used. At least one job must have a question. Equal calls and retries
        are one call; replies that were stored count too.
        """
        waiting = in_turn(jobs, batch_size=self.batch_size)
        windows = {job.name: FailureWindow(self.max_failure_rate, unit="questions") for job in jobs}
        for job in jobs:
            found[job.name] = {}

        flows = (
            ((job, index), metered(outcome_flow(job.task, index, job.player), calls))
            for job, index in waiting
            if index not in found[job.name]
        )
        encoder, at_once = jobs[0].task.encoder, IN_PROGRESS * self.batch_size
        with (
            progress(title, len(waiting)) as bar,
            closing(in_pool(self, encoder, lambda: next(flows, None), at_once=at_once)) as finished,
        ):
            for (job, index), outcome in finished:
                outcomes = found[job.name]
                outcomes[index] = outcome
                try:
                    windows[job.name].add(np.array([outcome.error is None]))
                except TooManyFailuresError as failure:
                    error = ErrorInfo(kind="not_asked", message=str(failure))
                    for left, question in enumerate(job.task.questions):
                        outcomes.setdefault(left, Outcome(question_id=question.id, error=error))
                bar.update()
        found |= {job.name: dict(sorted(found[job.name].items())) for job in jobs}


def in_turn(jobs: Sequence[Job], *, batch_size: int) -> list[tuple[Job, int]]:
    """Return the questions of all jobs in the order in which they are started, each job's in a random one.

    A question is due at its place among those of its job, less the steps of its episode, as seen from the end.
    """
    length = sum(len(job.task.questions) * job.task.rules.max_episode_steps for job in jobs) / batch_size
    due = []
    for job in jobs:
        count, steps = len(job.task.questions), job.task.rules.max_episode_steps
        order = np.random.default_rng(count).permutation(count).tolist()  # the same for all jobs
        due += [(place / count * length - steps, job, index) for place, index in enumerate(order)]
    return [(job, index) for _, job, index in sorted(due, key=lambda one: one[0])]


def metered(flow: Flow, calls: set[object] | None = None) -> Flow:
    """Yield the needs of an episode; return its outcome with what it cost, however its calls were answered.

    `calls` gets its calls.
    """
    made: list[Completion] = []

    def add(need: Need) -> Flow:
        if isinstance(need, Call) and calls is not None:
            calls.add(request_key(need.request) if is_repeatable(need.request) else object())
        result = yield need
        if isinstance(need, Call) and need.request.purpose != "judge":  # a judge is a cost of the evaluation
            made.append(result)
        return result

    outcome: Outcome = yield from map_needs(flow, add)
    return replace(
        outcome,
        calls=len(made) if outcome.error else outcome.calls,
        tokens=sum(reply.prompt_tokens + reply.completion_tokens for reply in made),
        reply_tokens=sum(reply.completion_tokens for reply in made),
        seconds=sum(reply.latency_s for reply in made),
    )


def outcome_flow(task: Task, index: int, player: Player) -> Flow:
    """Play a question of a task; return its Outcome. The first call that fails for good ends it."""
    engine = EpisodeEngine.open(task, index, observes=player.observes)
    engine.episode.call_price = median_low(task.rules.call_price)
    played: Played = yield from play(player, engine)
    episode, chosen, question_id = engine.episode, engine.submitted, task.questions[index].id
    if played.error is not None:
        return Outcome(question_id=question_id, error=played.error)
    assert chosen is not None
    attempts = list(episode.known.values())
    return Outcome(
        question_id=question_id,
        success=chosen.reward.success,
        score=engine.score,
        refused=is_refusal(chosen.answer),
        calls=episode.calls,
        price=engine.spent,
        steps=tuple(episode.names),
        rewrites=tuple(step.text for step in played.steps),
        guards=tuple(step.guard for step in played.steps),
        asked=tuple(attempt.text for attempt in attempts),
        forms=tuple(attempt.form for attempt in attempts),
        answers=tuple(attempt.answer for attempt in attempts),
        models=tuple(task.model_of(attempt.form) for attempt in attempts) if task.prices else (),
        logprobs=tuple(attempt.logprob for attempt in attempts),
        is_cut=bool(chosen.cut),
        parts=tuple(attempt.reward.parts for attempt in attempts),
        scores=tuple(attempt.reward.score for attempt in attempts),
        fits=tuple(attempt.fit for attempt in attempts if task.embeds_answers),
        submitted=list(episode.known).index(chosen.asked),
        why=engine.why(),
    )


# --- the methods, and their order ------------------------------------------------------------------------------------


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


def ranked_jobs(task: Task) -> dict[str, Job]:
    """Return every action alone, with forms the original question too, on the training questions of a task."""
    alone: dict[str, list[str]] = {name: [name] for name in operator_names(task.actions)}
    if task.forms:
        alone[IDENTITY] = []
    return {name: chain_of(name, task, [*steps, SUBMIT]).job(task, of=RANKED) for name, steps in alone.items()}


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
        ranked = ranked_jobs(task)
        self._run([*ranked.values()], self._methods, title="evaluation")
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


# --- several models --------------------------------------------------------------------------------------------------

_SLACK = 1 + 1e-9  # of a price, for its rounding
_MULTIPLES = 513
_SUMS = ("calls", "price", "tokens", "reply_tokens", "seconds")
_ROWS = ("asked", "forms", "answers", "models", "logprobs", "parts", "scores", "fits")

#: Outcomes of each of K models alone on the same n questions.
Alone = Mapping[str, Sequence[Outcome]]


def with_models(task: Task, models: Sequence[str]) -> Task:
    """Return the task with an arm for each of several models, also for those that the policy never asks."""
    known = {task.model_of(form.name) for form in task.forms}
    missing = [arm for arm in arms((), models) if arm.model not in known] if len(models) > 1 else ()
    return replace(task, forms=(*task.forms, *missing))


def shuffled(outcomes: Mapping[Question, Outcome], *, seed: int) -> Player:
    """Return the player that does for each question what was done for one drawn without replacement."""
    steps = [one.steps or (SUBMIT,) for one in outcomes.values()]
    order = np.random.default_rng(seed).permutation(len(steps)).tolist()
    drawn = {question: steps[place] for question, place in zip(outcomes, order, strict=True)}

    def choose(engine: EpisodeEngine) -> int:
        question = engine.task.questions[engine.episode.index]
        return engine.task.actions.index(drawn[question][engine.episode.steps])

    return Player(choose)


def logprob_cascade(alone: Alone, *, price: float) -> list[Outcome]:
    """Return the outcomes [n] of a cascade by mean log probability, none where no server reports it."""
    found = [alone[name] for name in _by_price(alone)]
    rows = [[(one.logprobs or (None,))[-1] for one in each] for each in found[:-1]]
    logprobs = np.array(rows, dtype=np.float64).T  # [n, K - 1]; NaN for None
    if np.isnan(logprobs).all():
        return []
    logprobs = np.nan_to_num(logprobs, nan=-math.inf)  # the answer is asked for again
    known = np.column_stack([logprobs, np.full(len(logprobs), math.inf)])
    return _costliest(found, (np.argmax(known >= least, axis=1) for least in np.unique(known)), price=price, adds=True)


def question_classifier(alone: Alone, test: Task, training: Alone, trained: Task, *, price: float) -> list[Outcome]:
    """Return the outcomes [n] of choices by the question of `test`, learned from outcomes on that of `trained`."""
    names = _by_price(alone)
    found, learned = [alone[name] for name in names], [training[name] for name in names]
    inputs, known = (
        gain_inputs(task.question_vectors.astype(np.float64), [one.text for one in task.questions])
        for task in (test, trained)
    )
    p = np.zeros((len(inputs), len(names)))
    for place, outcomes in enumerate(learned):
        rows = [row for row, one in enumerate(outcomes) if one.error is None]
        if not rows:  # all its calls failed
            continue
        right = np.array([outcomes[row].is_right for row in rows], dtype=np.float64)
        scorer = LinearScorer.fit(known[rows], right, np.full(len(rows), WEIGHT))
        p[:, place] = 1 / (1 + np.exp(-np.clip(scorer.log_odds(inputs), -30, 30)))
    prices = np.array([mean(each, "price", default=0.0) for each in found])
    pairs = combinations(range(len(names)), 2)
    worth = [(p[:, more] - p[:, less]) / max(1e-12, prices[more] - prices[less]) for less, more in pairs]
    multiples = np.append(0.0, np.quantile(np.maximum(0, worth), np.linspace(0, 1, _MULTIPLES)))
    return _costliest(found, (np.argmax(p - each * prices, axis=1) for each in multiples), price=price, adds=False)


def _by_price(alone: Alone) -> list[str]:
    return sorted(alone, key=lambda name: mean(alone[name], "price", default=math.inf))


def _costliest(
    found: Sequence[Sequence[Outcome]], choices: Iterable[IntArray], *, price: float, adds: bool
) -> list[Outcome]:
    """Return the outcomes [n] of the choice [n] among K that costs most within a mean price, else of the cheapest.

    Where it `adds`, those before the chosen one are asked too.
    """
    paid: DoubleArray = np.array([[one.price for one in each] for each in found]).T
    paid = np.cumsum(paid, axis=1) if adds else paid
    questions = np.arange(len(paid))
    costs = [(float(paid[questions, chosen].mean()), chosen.tolist()) for chosen in choices]
    within = [one for one in costs if one[0] <= price * _SLACK]
    _, best = max(within, key=lambda one: (one[0], -sum(one[1]))) if within else min(costs)
    parts = [
        [each[question] for each in found[0 if adds else place : place + 1]] for question, place in enumerate(best)
    ]
    return [*map(_joined, parts)]


def _joined(asked: Sequence[Outcome]) -> Outcome:
    """Return the last of some outcomes of a question with the calls and answers of all."""
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in asked) for name in _SUMS}
    rows: dict[str, Any] = {name: tuple(chain.from_iterable(getattr(one, name) for one in asked)) for name in _ROWS}
    return replace(asked[-1], **sums, **rows, submitted=None if asked[-1].error else len(rows["answers"]) - 1)
