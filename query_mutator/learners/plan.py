"""A plan: a fixed order of operators with one or more answers, and the stateless policy that follows it.

    n observations, D features, A operators

The policy reads its position from the observation: it continues after the last operator of the plan that was used, and
takes the first item from there that is not masked. Operators that would change nothing are masked, so they are skipped
and cost no call. Its weights are plain tensors, so `qm plan` saves it as a checkpoint that every command reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from query_mutator.env.observation import centered
from query_mutator.learners.learner import Acted
from query_mutator.types import ASK, AnswerRule, FloatArray

if TYPE_CHECKING:
    from query_mutator.env.engine import EpisodeEngine
    from query_mutator.env.task import Task

WEIGHTS = ("items", "used", "closed", "fit", "asked", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Operators and forms in order, each at most once; a form, "ask" and the end ask the target.

    With several answers, `answer` chooses which one is submitted, and `stop_fit` submits as soon as the best answer
    fits its question at least this well (a cosine), or with `learned` has at least this P(right).
    """

    steps: tuple[str, ...] = ()
    answer: AnswerRule = "best"
    stop_fit: float | None = None

    def __post_init__(self) -> None:
        repeated = [name for name in self.operators if self.steps.count(name) > 1]
        if repeated:
            raise ValueError(f"plan {self}: {repeated[0]} occurs twice; use each operator at most once")
        if self.answer not in get_args(AnswerRule):
            raise ValueError(f"answer={self.answer!r} must be one of {', '.join(get_args(AnswerRule))}")
        if self.stop_fit is not None and not self.asks_early:
            raise ValueError(f"plan {self}: it can only stop after an answer; add {ASK!r} before its last operator")

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the operators in order."""
        return tuple(name for name in self.steps if name != ASK)

    @property
    def asks_early(self) -> bool:
        """Return whether the target is also asked before the end."""
        return ASK in self.steps

    @property
    def items(self) -> tuple[str, ...]:
        """Return the actions before submit; where nothing was asked, submit asks."""
        return (*self.steps, ASK) if self.asks_early else self.steps

    def __str__(self) -> str:
        text = " > ".join(self.steps) or "the original question"
        if not self.asks_early:
            return text
        of = "P(right)" if self.answer == "learned" else "fit"
        if self.stop_fit is None:
            return f"{text} ({self.answer} answer)"
        return f"{text} ({self.answer} answer, stop at {of} {self.stop_fit:{'.3g' if self.stop_fit < 0.99 else '.4g'}})"


class PlanPlayer:
    """Follows a plan from the state of an episode on `plan_task(plan, task)`, for `session.play`; one per episode.

    Its actions are those of PlanPolicy, without an observation.
    """

    observes = False

    def __init__(self, plan: Plan, task: Task) -> None:
        self.items = [task.actions.index(name) for name in plan.items]
        self.submit = len(task.actions) - 1
        self.action: int | None = None  # the last one
        self._start = 0  # the place behind the last operator that was used
        self._num_rewrites = task.num_rewrites
        self._stop = None if plan.stop_fit is None else np.float32(centered(plan.stop_fit))

    def __call__(self, engine: EpisodeEngine) -> int:
        """Return the plan's next action."""
        self.action = self._next(engine)
        return self.action

    def _next(self, engine: EpisodeEngine) -> int:
        best = engine.episode.best
        if self._stop is not None and best is not None and np.float32(centered(engine.episode.assurance)) >= self._stop:
            return self.submit
        for place in range(self._start, len(self.items)):
            action = self.items[place]
            if engine.allows(action):
                if action < self._num_rewrites:
                    self._start = place + 1
                return action
        return self.submit


class PlanPolicy:
    """Follows a plan from observations of an `ask="form"` task."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        """Load saved weights; ValueError if one is missing or names no action."""
        missing = [name for name in WEIGHTS if name not in weights]
        if missing:
            raise ValueError(f"these are not the weights of a plan: {missing[0]} is missing")
        self.weights = {name: np.asarray(weights[name]) for name in WEIGHTS}
        self._items: list[int] = self.weights["items"].tolist()
        self._used: list[int] = self.weights["used"].tolist()  # [A] columns
        self._masked: list[int] = self.weights["closed"].tolist()  # [A + 3] columns
        self._fit, self._asked = int(self.weights["fit"]), int(self.weights["asked"])
        self.num_actions = len(self._masked)
        columns = [*self._used, *self._masked, self._fit, self._asked]
        self._num_columns = max(columns) + 1
        is_whole = all(self.weights[name].dtype.kind in "iu" for name in WEIGHTS if name != "stop")
        if not is_whole or min(columns) < 0 or not set(self._items) <= set(range(self.num_actions)):
            raise ValueError("these are not the weights of a plan: they name no action or column")
        self._stop = float(self.weights["stop"])  # as the observation has it; NaN for none

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator] = (), *, greedy: bool = False) -> Acted:
        """Return the plan's next actions [n] for observations [n, D]; nothing is random."""
        if obs.shape[1] < self._num_columns:
            raise ValueError(f"the plan is for observations of {self._num_columns} numbers, not of {obs.shape[1]}")
        return Acted(np.array([self._next(row) for row in obs], dtype=np.int64))

    @property
    def asks_once(self) -> bool:
        """Return whether the plan rewrites without an answer and asks at its end."""
        return len(self._used) not in self._items  # ask follows the operators

    def _next(self, row: FloatArray) -> int:
        submit = len(self._masked) - 1
        if row[self._asked] and row[self._fit] >= self._stop:  # False for NaN
            return submit
        used = [place for place, item in enumerate(self._items) if item < len(self._used) and row[self._used[item]]]
        rest = self._items[used[-1] + 1 :] if used else self._items
        return next((action for action in rest if not row[self._masked[action]]), submit)


def plan_task(plan: Plan, task: Task) -> Task:
    """Return the task on which a plan acts: rewrites and answers are separate, and the episode is long enough."""
    several = {"max_asks": None} if plan.answer == "learned" else {}  # found by a search of plans with one answer
    return task.with_rules(ask="form", answer=plan.answer, max_episode_steps=len(plan.items) + 1, **several)


def plan_policy(plan: Plan, task: Task) -> PlanPolicy:
    """Return the policy of a plan for `plan_task(plan, task)`; ValueError for an operator that the task lacks."""
    task = plan_task(plan, task)
    unknown = [name for name in plan.steps if name not in task.actions]
    if unknown:
        raise ValueError(f"plan {plan}: the task has no operator {unknown[0]}; it has {', '.join(task.actions[:-3])}")
    columns, observer = np.arange(task.observer.size), task.observer
    stop = math.nan if plan.stop_fit is None else centered(plan.stop_fit)
    weights: dict[str, NDArray[Any]] = {
        "items": np.array([task.actions.index(name) for name in plan.items], dtype=np.int64),
        "used": columns[observer.slices["used"]],
        "closed": columns[observer.slices["closed"]],
        "fit": np.array(observer.slices["similarity"].stop - 1),
        "asked": np.array(observer.slices["asked"].start + 1),
        "stop": np.array(stop, dtype=np.float32),
    }
    return PlanPolicy(weights)
