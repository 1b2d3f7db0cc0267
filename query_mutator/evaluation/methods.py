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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.episode import Episode
from query_mutator.env.flow import Flow
from query_mutator.env.scheduling import PooledScheduler
from query_mutator.env.task import SUBMIT, UNDO, Task
from query_mutator.llm.client import Client
from query_mutator.llm.retry import DEFAULT_POLICY, RetryPolicy
from query_mutator.operators import OperatorContext
from query_mutator.stats.intervals import mean_interval, paired_interval, wilson_interval
from query_mutator.types import Question

FloatArray = NDArray[np.float32]

BEST_SINGLE_SAMPLE = 120  # training questions on which operators are compared


class Chooser(Protocol):
    """Picks the next action from an observation [O]; one per question."""

    def __call__(self, obs: FloatArray) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one method on one question."""

    question_id: str
    success: float
    score: float
    refused: bool
    calls: int
    target_calls: int
    actions: tuple[str, ...]
    rewrite: str
    rewrites: tuple[str, ...]
    answer: str


class EpisodeEnv(Protocol):
    """An environment whose steps are flows (`QueryMutationEnv`)."""

    @property
    def episode(self) -> Episode | None:
        """Return the present episode."""

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
    """Runs methods on the questions of a task with `batch_size` calls in flight."""

    def __init__(
        self,
        make_env: MakeEnv,
        *,
        client: Client,
        batch_size: int,
        retry_policy: RetryPolicy = DEFAULT_POLICY,
        progress: Callable[[str, int], Any] | None = None,
    ) -> None:
        self.make_env, self.client = make_env, client
        self.retry_policy = retry_policy
        self.batch_size = batch_size
        self._progress = progress

    def run(self, task: Task, make: MakeChooser, *, name: str = "") -> list[Outcome]:
        """Return one outcome per question, in the task's order."""
        scheduler = PooledScheduler(
            client=self.client, encoder=task.encoder, retry_policy=self.retry_policy, batch_size=self.batch_size
        )
        bar = self._progress(name, len(task.questions)) if self._progress else None
        outcomes: dict[int, Outcome] = {}
        waiting = iter(range(len(task.questions)))

        def start_next() -> None:
            index = next(waiting, None)
            if index is not None:
                env = self.make_env(task, client=self.client)
                scheduler.start(index, _episode(env, index, make(index)))

        try:
            for _ in range(min(4 * self.batch_size, len(task.questions))):
                start_next()
            while len(outcomes) < len(task.questions):
                key, outcome = scheduler.finished()
                outcomes[int(key)] = outcome  # type: ignore[call-overload]
                start_next()
                if bar is not None:
                    bar.update()
        finally:
            if bar is not None:
                bar.close()
            scheduler.close()
        return [outcomes[index] for index in range(len(task.questions))]


def _episode(env: EpisodeEnv, index: int, choose: Chooser) -> Flow:
    obs, _ = yield from env.reset_flow(options={"question": index})
    assert env.episode is not None
    ended, rewrites = False, []
    info: dict[str, Any] = {}
    while not ended:
        obs, _, terminated, truncated, info = yield from env.step_flow(choose(obs))
        ended = terminated or truncated
        rewrites.append(env.episode.current.text)
    episode = env.episode
    return Outcome(
        question_id=info["question_id"],
        success=info["success"],
        score=info["score"],
        refused=info["refused"],
        calls=info["calls"],
        target_calls=len(episode.known),
        actions=tuple(episode.names),
        rewrite=info["rewrite"],
        rewrites=tuple(rewrites),
        answer=info["answer"],
    )


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
    k = math.ceil(float(np.mean([outcome.target_calls for outcome in outcomes["policy"]])))
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
        "policy_minus": {name: _difference(outcomes["policy"], outcomes[name]) for name in methods if name != "policy"},
        "policy_actions": _action_counts(outcomes["policy"]),
    }


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
        merit[action] = (np.mean([o.success for o in results]), np.mean([o.score for o in results]))
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


def summarize(outcomes: Sequence[Outcome], guarded: Sequence[Outcome]) -> dict[str, Any]:
    """Return rates, means and their 95 % intervals of one method."""
    n, successes = len(outcomes), sum(outcome.success >= 0.5 for outcome in outcomes)
    scores = [outcome.score for outcome in outcomes]
    refused, guard_refused = sum(o.refused for o in outcomes), sum(o.refused for o in guarded)
    return {
        "success": successes / n,
        "success_ci": list(wilson_interval(successes, n)),
        "score": float(np.mean(scores)),
        "score_ci": list(mean_interval(scores)),
        "false_refusal": refused / n,
        "false_refusal_ci": list(wilson_interval(refused, n)),
        "guard_refusal": guard_refused / len(guarded),
        "guard_refusal_ci": list(wilson_interval(guard_refused, len(guarded))),
        "calls_per_question": float(np.mean([outcome.calls for outcome in outcomes])),
        "target_calls_per_question": float(np.mean([outcome.target_calls for outcome in outcomes])),
    }


def _difference(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, Any]:
    mine, other = [o.success for o in ours], [o.success for o in theirs]
    return {"success": float(np.mean(mine) - np.mean(other)), "success_ci": list(paired_interval(mine, other))}


def _action_counts(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    names, counts = np.unique([name for o in outcomes for name in o.actions], return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}
