"""Compare the policy with baselines on the same questions.

    identity      the original question
    random        uniform over all actions until submit or the last step
    best_single   the operator that did best on training questions, applied once
    best_of_k     the original question and k-1 operators one at a time, ranked on training questions; the answer
                  closest to the original question wins; k = mean target calls of the policy, rounded up
    best_of_k_fit the same, but the answer that best fits its own question wins, as for the policy
    rewriter      with --rewriter: one rewrite of the question by a model
    rewriter_fit  the same, but the original question is kept where its answer fits better, as for the policy
    policy        the trained policy, greedy

Success and score are over held-out questions; false refusals over the same (all are harmless); guard refusals over
requests that should be refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.episode import Episode
from query_mutator.env.flow import Flow
from query_mutator.env.scheduling import PooledScheduler
from query_mutator.env.task import Task
from query_mutator.errors import BackendError, TooManyFailuresError
from query_mutator.evaluation.outcomes import (
    Outcome,
    action_counts,
    difference,
    mean,
    scored,
    summarize,
    unscored_rows,
)
from query_mutator.llm.client import Client
from query_mutator.llm.retry import DEFAULT_POLICY, RetryPolicy
from query_mutator.operators import OperatorContext
from query_mutator.training.failure_rate import WINDOW_STEPS, FailureWindow
from query_mutator.types import SUBMIT, UNDO, ErrorInfo, Question

FloatArray = NDArray[np.float32]

BEST_SINGLE_SAMPLE = 120  # training questions on which operators are compared


class Chooser(Protocol):
    """Picks the next action from an observation [O]; one per question."""

    def __call__(self, obs: FloatArray) -> int: ...


class EpisodeEnv(Protocol):
    """An environment whose steps are flows (`QueryMutationEnv`)."""

    @property
    def episode(self) -> Episode | None:
        """Return the present episode."""

    @property
    def last_error(self) -> ErrorInfo | None:
        """Return why the last reset or step failed, None when it did not."""

    def reset_flow(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Flow:
        """Yield the calls of a reset."""

    def step_flow(self, action: int) -> Flow:
        """Yield the calls of one step."""


class MakeEnv(Protocol):
    """Makes an environment on the questions of a task (`QueryMutationEnv`)."""

    def __call__(self, task: Task, *, client: Client) -> EpisodeEnv: ...


MakeChooser = Callable[[int], Chooser]


def always(actions: Sequence[int]) -> MakeChooser:
    """Return choosers that take a fixed sequence of actions."""

    def make(_: int) -> Chooser:
        rest: Iterator[int] = iter(actions)
        return lambda obs: next(rest)

    return make


def uniform(num_actions: int, *, seed: int) -> MakeChooser:
    """Return choosers that pick uniformly; question i has the random stream [seed, i]."""

    def make(index: int) -> Chooser:
        rng = np.random.default_rng([seed, index])
        return lambda obs: int(rng.integers(num_actions))

    return make


class Evaluator:
    """Runs methods on the questions of a task with `batch_size` calls in flight.

    A question whose calls fail for good is an Outcome with an error. Once more than `max_failure_rate` of the last 100
    questions of a run failed, its other questions are not asked.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        *,
        client: Client,
        batch_size: int,
        retry_policy: RetryPolicy = DEFAULT_POLICY,
        max_failure_rate: float = 1.0,
        progress: Callable[[str, int], Any] | None = None,
    ) -> None:
        self.make_env, self.client = make_env, client
        self.retry_policy = retry_policy
        self.batch_size = batch_size
        self.max_failure_rate = max_failure_rate
        self._progress = progress

    def run(self, task: Task, make: MakeChooser, *, name: str = "") -> list[Outcome]:
        """Return one outcome per question, in the task's order."""
        scheduler = PooledScheduler(
            client=self.client, encoder=task.encoder, retry_policy=self.retry_policy, batch_size=self.batch_size
        )
        bar = self._progress(name, len(task.questions)) if self._progress else None
        outcomes: dict[int, Outcome] = {}
        waiting = iter(range(len(task.questions)))
        window = FailureWindow(self.max_failure_rate, size=WINDOW_STEPS, unit="questions")

        def start_next() -> None:
            index = next(waiting, None)
            if index is not None:
                env = self.make_env(task, client=self.client)
                scheduler.start(index, _episode(env, index, make(index), task.questions[index].id))

        try:
            for _ in range(min(4 * self.batch_size, len(task.questions))):
                start_next()
            while scheduler.in_progress:
                key, outcome = scheduler.finished()
                outcomes[int(key)] = outcome  # type: ignore[call-overload]
                try:
                    window.add(np.array([outcome.error is None]))
                    start_next()
                except TooManyFailuresError as error:
                    outcomes |= _not_asked(task, waiting, str(error))
                if bar is not None:
                    bar.update()
        finally:
            if bar is not None:
                bar.close()
            scheduler.close()
        return [outcomes[index] for index in range(len(task.questions))]


def _episode(env: EpisodeEnv, index: int, choose: Chooser, question_id: str) -> Flow:
    """Yield the calls of an episode; it ends at the first call that fails for good."""
    try:
        obs, _ = yield from env.reset_flow(options={"question": index})
    except BackendError as error:
        reason = env.last_error or ErrorInfo(kind="server", message=str(error))
        return Outcome(question_id=question_id, error=reason)
    assert env.episode is not None
    ended, rewrites = False, []
    info: dict[str, Any] = {}
    while not ended:
        obs, _, terminated, truncated, info = yield from env.step_flow(choose(obs))
        if env.last_error is not None:
            return Outcome(question_id=question_id, error=env.last_error)
        ended = terminated or truncated
        rewrites.append(env.episode.text)
    episode = env.episode
    return Outcome(
        question_id=question_id,
        success=info["success"],
        score=info["score"],
        refused=info["refused"],
        calls=info["calls"],
        target_calls=len(episode.known),
        actions=tuple(episode.names),
        rewrite=info["_text"]["rewrite"],
        rewrites=tuple(rewrites),
        answer=info["_text"]["answer"],
    )


def _not_asked(task: Task, rest: Iterator[int], why: str) -> dict[int, Outcome]:
    """Return the outcomes of questions that are not asked any more."""
    error = ErrorInfo(kind="not_asked", message=why)
    return {index: Outcome(question_id=task.questions[index].id, error=error) for index in rest}


def evaluate(
    evaluator: Evaluator,
    *,
    train: Task,
    test: Task,
    guard: Sequence[Question],
    policy: MakeChooser,
    seed: int = 0,
    rewriter: str | None = None,
) -> dict[str, Any]:
    """Return the table of all methods as plain JSON types; rates are fractions. `rewriter` is a model's name."""
    submit = test.actions.index(SUBMIT)
    outcomes = {"identity": evaluator.run(test, always([submit]), name="identity")}
    outcomes["policy"] = evaluator.run(test, policy, name="policy")
    ranking = rank_operators(evaluator, train)
    k = math.ceil(mean(outcomes["policy"], "target_calls")) if scored(outcomes["policy"]) else 1
    methods: dict[str, tuple[Task, MakeChooser]] = {
        "identity": (test, always([submit])),
        "random": (test, uniform(len(test.actions), seed=seed)),
        "best_single": (replace(test, answer="last"), always([ranking[0], submit])),
        "best_of_k": best_of(k, ranking, replace(test, answer="closest")),
        "best_of_k_fit": best_of(k, ranking, replace(test, answer="best")),
        **({} if rewriter is None else rewriting(rewriter, test)),
        "policy": (test, policy),
    }
    for name, (task, make) in methods.items():
        if name not in outcomes:
            outcomes[name] = evaluator.run(task, make, name=name)
    guarded = {
        name: evaluator.run(task.on(guard), make, name=f"{name}, guard") for name, (task, make) in methods.items()
    }
    return {
        "n": len(test.questions),
        "best_single_operator": test.actions[ranking[0]],
        "k": k,
        "methods": {name: summarize(outcomes[name], guarded[name]) for name in methods},
        "policy_minus": {name: difference(outcomes["policy"], outcomes[name]) for name in methods if name != "policy"},
        "policy_actions": action_counts(outcomes["policy"]),
        "unscored": unscored_rows({**outcomes, **{f"{name}, guard": found for name, found in guarded.items()}}),
    }


def comparison_steps(*, num_operators: int, num_train: int, num_test: int, max_episode_steps: int) -> int:
    """Return about how many steps `evaluate` makes; policy, random and both best-of-k take whole episodes."""
    ranking = num_operators * min(BEST_SINGLE_SAMPLE, num_train)
    return ranking + num_test * (2 + 4 * max_episode_steps)


def rank_operators(evaluator: Evaluator, train: Task) -> list[int]:
    """Return the operators' actions, best first by success then score on a sample of training questions."""
    sample = train.questions
    if len(sample) > BEST_SINGLE_SAMPLE:
        chosen = np.random.default_rng(0).choice(len(sample), BEST_SINGLE_SAMPLE, replace=False)
        sample = tuple(sample[index] for index in sorted(chosen))
    task = replace(train.on(sample), answer="last")
    submit = task.actions.index(SUBMIT)
    merit = {}
    for action, operator in enumerate(task.operators):
        results = evaluator.run(task, always([action, submit]), name=f"training: {operator.name}")
        merit[action] = (mean(results, "success"), mean(results, "score")) if scored(results) else (-1.0, -1.0)
    return sorted(merit, key=lambda action: merit[action], reverse=True)


def best_of(k: int, ranking: Sequence[int], task: Task) -> tuple[Task, MakeChooser]:
    """Return the task and choosers of best-of-k: every operator is applied to the original question."""
    undo, submit = task.actions.index(UNDO), task.actions.index(SUBMIT)
    actions = [action for operator in ranking[: k - 1] for action in (operator, undo)]
    return replace(task, max_episode_steps=len(actions) + 1), always([*actions, submit])


class PlainQuestion:
    """The operator of a model trained to rewrite: its prompt is the question alone."""

    name = "rewriter"
    summary = "Rewrite the question."

    def render(self, question: str, *, context: OperatorContext) -> str:
        """Return the question."""
        return question


def rewriting(model: str, task: Task) -> dict[str, tuple[Task, MakeChooser]]:
    """Return the two methods of a model that rewrites in one call."""
    alone = replace(
        task, operators=(PlainQuestion(), *task.operators[1:]), calls=replace(task.calls, mutator_model=model)
    )
    make = always([0, task.actions.index(SUBMIT)])
    return {"rewriter": (replace(alone, answer="last"), make), "rewriter_fit": (replace(alone, answer="best"), make)}
