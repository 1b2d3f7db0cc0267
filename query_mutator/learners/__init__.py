"""Learners by name, all of one base class: PPO, IQN, the direct method, a plan, and a plugin's.

learner.py     the base classes `Learner` and, for your own, `BaseLearner`; PPO, whose algorithm is in `ppo`
iqn/           implicit quantile networks, off-policy, with a replay buffer
direct.py      fitted Q iteration with boosted trees

PPO and IQN load torch when they are made; a policy for inference loads none. A plan is a fixed order of operators with
one or more answers, and a stateless policy follows it. Add your own by subclassing `BaseLearner`:

    @LEARNERS.register("mine")
    class Mine(BaseLearner): ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from ppo.frozen import InferencePolicy
from query_mutator.confidence.submission import eased
from query_mutator.learners.direct import DirectMethod
from query_mutator.learners.iqn import FrozenQuantiles
from query_mutator.learners.learner import BaseLearner, Learner, PPOLearner
from query_mutator.registry import Registry
from query_mutator.types import ASK, AnswerRule

if TYPE_CHECKING:
    from query_mutator.env.engine import EpisodeEngine
    from query_mutator.env.task import Task

__all__ = ["ALGO", "LEARNERS", "BaseLearner", "Learner", "Plan", "PlanPolicy", "Policy", "plan_task"]

ALGO = "plan"  # the name of the learner

LEARNERS: Registry[type[Learner]] = Registry("learner", group="query_mutator.learners")
LEARNERS.add("ppo", PPOLearner)


@LEARNERS.register("iqn")
class IQNSpec(Learner):
    """Implicit quantile networks, whose module loads torch."""

    @classmethod
    def make(cls, obs_dim: int, num_actions: int, config: Any, *, mask_columns: slice) -> Learner:
        """Return a new learner."""
        from query_mutator.learners.iqn.learner import IQN

        return IQN(obs_dim, num_actions, config, mask_columns=mask_columns)

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference."""
        return FrozenQuantiles(state, num_quantiles=flags["num_eval_quantiles"])

    @staticmethod
    def planned_updates(config: Any) -> int:
        """Return the gradient steps of a whole run."""
        return int(config.replay_ratio * config.total_steps / config.train_batch_size)


LEARNERS.add("direct", DirectMethod)


@LEARNERS.register(ALGO)
class PlanSpec(Learner):
    """A fixed order of operators, which a search finds."""

    made_by = "qm plan"

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> PlanPolicy:  # type: ignore[override]  # no InferencePolicy: it reads no observation
        """Return the plan, which is in the flags."""
        return PlanPolicy(flags["plan"] or Plan())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Operators and forms in order, each at most once; a form, "ask" and the end ask the target.

    With several answers, `answer` chooses which one is submitted, and `stop_at` submits as soon as the P(right) of one,
    `eased` by the others, is at least this. With `gain_at` the next arm is the one with the largest predicted gain per
    price, while it is above that.
    """

    steps: tuple[str, ...] = ()
    answer: AnswerRule = "best"
    stop_at: float | None = None
    gain_at: float | None = None

    def __post_init__(self) -> None:
        repeated = [name for name in self.operators if self.steps.count(name) > 1]
        if repeated:
            raise ValueError(f"plan {self}: {repeated[0]} occurs twice; use each operator at most once")
        if self.answer not in get_args(AnswerRule):
            raise ValueError(f"answer={self.answer!r} must be one of {', '.join(get_args(AnswerRule))}")
        if (self.stop_at is not None or self.gain_at is not None) and not self.asks_early:
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
        if self.gain_at is not None:
            return f"{text} ({self.answer} answer, ask while the gain per price is {self.gain_at:.3g})"
        if self.stop_at is None:
            return f"{text} ({self.answer} answer)"
        stop = f"{self.stop_at:{'.3g' if self.stop_at < 0.99 else '.4g'}}"
        return f"{text} ({self.answer} answer, stop at P(right) {stop})"


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """Follows a plan on the state of an episode on `plan_task(plan, task)`; it reads no observation.

    It continues after the last operator of the plan that was used, with the first action that is not masked. Operators
    that would change nothing are masked, so they are skipped and cost no call.
    """

    plan: Plan

    def __call__(self, engine: EpisodeEngine) -> int:
        """Return the plan's next action."""
        episode, actions, stop = engine.episode, engine.task.actions, self.plan.stop_at
        submit = len(actions) - 1
        if stop is not None and episode.best is not None and eased(episode.assurance, len(episode.known) - 1) >= stop:
            return submit
        if self.plan.gain_at is not None and episode.best is not None:
            return self._gaining(engine, submit, self.plan.gain_at)
        items = [actions.index(name) for name in self.plan.items]
        used = [place for place, item in enumerate(items) if item < len(episode.used) and episode.used[item]]
        rest = items[used[-1] + 1 :] if used else items
        return next((action for action in rest if engine.allows(action)), submit)

    def _gaining(self, engine: EpisodeEngine, submit: int, least: float) -> int:
        """Return the arm of the plan with the largest predicted gain per price, submit where it is `least` or less."""
        assert engine.episode.best is not None
        gains = engine.task.gains_of(engine.episode.index, engine.episode.best)
        asked = {attempt.form for attempt in engine.episode.known.values()}
        places = {name: engine.task.actions.index(name) for name in self.plan.operators if name not in asked}
        left = [name for name in places if gains.get(name, -math.inf) > least and engine.allows(places[name])]
        return places[max(left, key=lambda name: gains[name])] if left else submit

    @property
    def asks_once(self) -> bool:
        """Return whether the plan rewrites without an answer and asks at its end."""
        return not self.plan.asks_early


#: What acts without learning: a policy of observations, or a plan.
Policy = InferencePolicy | PlanPolicy


def plan_task(plan: Plan, task: Task) -> Task:
    """Return the task on which a plan acts: rewrites and answers are separate, and the episode is long enough."""
    several = {"max_asks": None} if plan.answer == "learned" else {}  # found by a search of plans with one answer
    return task.with_rules(ask="form", answer=plan.answer, max_episode_steps=len(plan.items) + 1, **several)
