"""A linear contextual bandit that learns from whole episodes, with the optimism of LinUCB (arXiv:1003.0146).

    n rows, D obs, X = D + 1 context (a 1 for the intercept), A actions

The value of an action is a linear function of the observation, fitted to the return from its step to the end of the
episode. Its coefficients are a part that all actions share, as some questions are easy, plus one of the action, each
with a normal prior (a hierarchical ridge regression), so that an action tried rarely is taken for an average one.
While training, `ucb_alpha` standard errors are added, which favors actions tried rarely; greedy acting adds nothing.
With a teacher it takes the teacher's action unless another one is better by `lcb_alpha` standard errors (safe policy
improvement: Laroche et al., 2019, arXiv:1712.06924), which are large for a text unlike those that were learned from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.streams import ACTION_STREAM, restore_streams
from query_mutator.env.steps import Steps
from query_mutator.learners.learner import Acted, InferencePolicy, counts_of, restore_counts, tensors
from query_mutator.learners.plan import PlanPolicy
from query_mutator.learners.returns import ReturnSums, with_intercept
from query_mutator.settings.learner import BanditConfig
from query_mutator.types import DoubleArray, FloatArray

#: Subtracted from the value of a masked action, so that it is below all others.
MASKED_VALUE = 1e6
_TEACHER = "teacher/"  # before the names of its weights


class FrozenBandit:
    """A snapshot of coefficients and confidence for inference."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Load the state dict of a bandit's policy."""
        try:
            self.state = {name: np.asarray(array) for name, array in state.items()}
            self._theta = self.state["theta"]  # [A, X]
            self._inverse = self.state["inverse"]  # [A, X, X]
            self._closed = self.state["closed"]  # [A] columns, or none
            self._lcb_alpha = float(self.state.get("lcb_alpha", 0.0))
            teacher = {name.removeprefix(_TEACHER): self.state[name] for name in state if name.startswith(_TEACHER)}
            self._teacher = PlanPolicy(teacher) if teacher else None
            self.num_actions = self.values(np.zeros((1, self._theta.shape[1] - 1), np.float32)).shape[1]
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"these are not the coefficients of a bandit: {error}") from error

    def values(self, obs: FloatArray, *, ucb_alpha: float = 0.0) -> DoubleArray:
        """Return the optimistic rewards [n, A] under observations [n, D]."""
        contexts = with_intercept(obs)
        values = contexts @ self._theta.T
        if ucb_alpha:
            values = values + ucb_alpha * np.sqrt(self._variance(contexts))
        if len(self._closed):
            values = values - MASKED_VALUE * np.asarray(obs)[:, self._closed]
        return np.asarray(values)

    def act(
        self,
        obs: FloatArray,
        rngs: Sequence[np.random.Generator] = (),
        *,
        greedy: bool = False,
        ucb_alpha: float = 0.0,
    ) -> Acted:
        """Return the actions of largest value for observations [n, D]; `rngs` break ties uniformly."""
        values = self.values(obs, ucb_alpha=0.0 if greedy else ucb_alpha)
        if greedy and self._teacher is not None:
            values = self._leads(obs, values, self._teacher)
        best = values.max(axis=1)
        if greedy or not rngs:
            return Acted(values.argmax(axis=1), best.astype(np.float32))
        actions = [rng.choice(np.flatnonzero(row == top)) for rng, row, top in zip(rngs, values, best, strict=True)]
        return Acted(np.array(actions, dtype=np.int64), best.astype(np.float32))

    def _variance(self, contexts: DoubleArray) -> DoubleArray:
        """Return the squared standard errors [n, A] of values under contexts [n, X]."""
        variance = np.einsum("nx,axy,ny->na", contexts, self._inverse, contexts, optimize=True)
        return np.asarray(np.maximum(variance, 0.0))

    def _leads(self, obs: FloatArray, values: DoubleArray, teacher: PlanPolicy) -> DoubleArray:
        """Return how much better than the teacher's action each is at least [n, A], 0 for the teacher's own."""
        rows, taught = np.arange(len(values)), teacher.act(obs).actions
        variance = self._variance(with_intercept(obs))
        errors = np.sqrt(variance + variance[rows, taught][:, None])
        errors[rows, taught] = 0.0
        return np.asarray(values - values[rows, taught][:, None] - self._lcb_alpha * errors)


class Bandit:
    """Sums of contexts and returns per action, and the coefficients they give."""

    episodes_recalled = 8

    def __init__(
        self, obs_dim: int, num_actions: int, config: BanditConfig, *, mask_columns: slice | None = None
    ) -> None:
        """Take sizes and settings; `mask_columns` of an observation are 1 where an action is not allowed."""
        self.config = config
        self._sums = ReturnSums(num_actions, obs_dim)
        self._closed = np.array([] if mask_columns is None else range(obs_dim)[mask_columns], dtype=np.int64)
        self._rngs = [np.random.default_rng((config.seed + env, ACTION_STREAM)) for env in range(config.num_processes)]
        self.updates_done = self.env_steps = self.gradient_steps = self.samples_learned = self.version = 0
        self._teacher: PlanPolicy | None = None
        self._teacher_rollouts = 0
        self._ended = 0  # episodes since the last fit
        self._values: list[float] = []  # of the actions taken since the last update
        self.sync_weights()

    @property
    def pending_updates(self) -> int:
        """Return 0: everything is learned in `observe` and `update`."""
        return 0

    def learn_from(self, teacher: InferencePolicy, *, rollouts: int, relabel: object = None) -> None:
        """Have a plan choose the actions of the first `rollouts`, and leave it later only for what is better."""
        assert isinstance(teacher, PlanPolicy)
        self._teacher, self._teacher_rollouts = teacher, rollouts
        self.sync_weights()

    def recall(self, steps: Steps) -> None:
        """Learn from the whole episodes of another policy before the training; `env_ids` number them."""
        self._sums.observe(steps)
        self._fit()
        self._sums.forget_pending()

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids`, which see obs [n, D]."""
        if self._teacher is not None and self.updates_done < self._teacher_rollouts:
            return self._teacher.act(obs).actions
        rngs = [self._rngs[env] for env in env_ids]
        return self.frozen.act(obs, rngs, ucb_alpha=self.config.ucb_alpha).actions

    def observe(self, steps: Steps) -> None:
        """Keep finished steps, at most one per environment, until the end of their episodes."""
        self.env_steps += len(steps.env_ids)
        self._values += self.frozen.values(steps.obs)[np.arange(len(steps.actions)), steps.actions].tolist()
        self._sums.observe(steps)
        self._ended += int((steps.terminations | steps.truncations).sum())
        if self._ended >= self.config.num_processes:
            self._fit()

    def learn(self) -> None:
        """Do nothing: everything is learned in `observe` and `update`."""

    def forget_pending(self) -> None:
        """Drop the steps of episodes that have not ended."""
        self._sums.forget_pending()

    def sync_weights(self) -> None:
        """Fit the coefficients and act by them from now on."""
        theta, covariance = hierarchical_ridge(
            self._sums.outer, self._sums.returns, shared=self.config.ridge, own=self.config.own_ridge
        )
        state = {"theta": theta, "inverse": covariance, "closed": self._closed}
        if self._teacher is not None:
            state["lcb_alpha"] = np.array(self.config.lcb_alpha)
            state |= {f"{_TEACHER}{name}": array for name, array in self._teacher.weights.items()}
        self.frozen = FrozenBandit(state)
        self.version += 1

    def update(self) -> dict[str, float]:
        """Finish a rollout and return its statistics."""
        self.updates_done += 1
        self._fit()
        values, self._values = self._values, []
        return {"rl/avg_value": float(np.mean(values)) if values else math.nan}

    def _fit(self) -> None:
        before = self._sums.steps
        self._ended = 0
        self._sums.flush()
        self.samples_learned += self._sums.steps - before
        self.gradient_steps += 1
        self.sync_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as tensors and plain types."""
        return {
            "policy": tensors(self.frozen.state),
            "optimizer": self._sums.state_dict(),
            "rng": {"actions": [rng.bit_generator.state for rng in self._rngs]},
            **counts_of(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for other sizes, and for the state of an earlier version."""
        if "return" not in state["optimizer"]:
            raise ValueError("a bandit of an earlier version learned from single steps; start a new run")
        if state["optimizer"]["return"].shape != self._sums.returns.shape:
            raise ValueError("the checkpoint's bandit has other observations or actions")
        restore_streams(self._rngs, state["rng"]["actions"])
        self._sums.load_state_dict(state["optimizer"])
        restore_counts(self, state)
        self.sync_weights()


def hierarchical_ridge(
    outer: DoubleArray, returns: DoubleArray, *, shared: float, own: float
) -> tuple[DoubleArray, DoubleArray]:
    """Return coefficients [A, X] and their covariances [A, X, X], in units of the noise's variance.

    The coefficients of an action are shared ones with the prior N(0, 1 / shared) plus its own with N(0, 1 / own);
    `outer` [A, X, X] and `returns` [A, X] are the sums over its steps. Lindley & Smith, 1972, "Bayes estimates for the
    linear model", solved by the Schur complement of the block of the shared ones.
    """
    eye = np.eye(outer.shape[1])
    inverse = np.linalg.inv(outer + own * eye)  # [A, X, X], of the actions' own
    rest = own * inverse  # 1 - inverse @ outer: what the data of an action leave open of its own part
    of_shared = np.linalg.inv(shared * eye + own * (eye - rest).sum(axis=0))  # [X, X]
    common = of_shared @ np.einsum("axy,ay->x", rest, returns)  # rest is symmetric
    theta: DoubleArray = common + np.einsum("axy,ay->ax", inverse, returns - outer @ common)
    return theta, np.asarray(inverse + rest @ of_shared @ rest)
