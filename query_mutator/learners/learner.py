"""The `Learner` Protocol: what PPO, IQN, the direct method and your learner have in common.

n environments of N, D observation

A learner chooses actions, observes the steps that come of them, and learns: on-policy ones in `update`, at the end of a
rollout during which their weights are frozen; off-policy ones in `learn`, while steps arrive. For your learner
subclass `BaseLearner` and register the class in `query_mutator.learners.named.LEARNERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ppo.frozen import InferencePolicy
from query_mutator.types import FloatArray

Weights = dict[str, NDArray[Any]]


class Steps(NamedTuple):
    """One step of each of n environments; `next_obs` is the last observation of an episode that ended."""

    env_ids: NDArray[np.int64]  # [n]
    obs: FloatArray  # [n, D]
    actions: NDArray[np.int64]  # [n]
    rewards: NDArray[np.float64]  # [n]
    next_obs: FloatArray  # [n, D]
    terminations: NDArray[np.bool_]  # [n]
    truncations: NDArray[np.bool_]  # [n]
    valid: NDArray[np.bool_]  # [n] False where a call failed for good
    versions: NDArray[np.int64]  # [n] of the policy that chose the action
    calls: NDArray[np.int64]  # [n] model calls of the step


def last_obs(obs: FloatArray, ended: NDArray[np.bool_], infos: dict[str, Any]) -> FloatArray:
    """Return observations [n, D] in which an ended episode has its own last one, not that of the next episode."""
    if not ended.any():
        return obs
    last = obs.copy()
    last[ended] = np.stack(infos["final_obs"][ended])
    return last


class RolloutLearner(Protocol):
    """The part of a learner that a rollout needs."""

    @property
    def version(self) -> int:
        """Return the version of the acting weights; it counts up."""

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]; off-policy: called by many threads."""

    def observe(self, steps: Steps) -> None:
        """Store finished steps, at most one per environment."""

    def update(self) -> dict[str, float]:
        """Finish a rollout (on-policy: learn from it) and return its statistics under their metric keys."""


class Learner(RolloutLearner, Protocol):
    """Chooses actions and learns from the steps; owns the weights, the optimizer and every random stream."""

    @property
    def updates_done(self) -> int:
        """Return the rollouts learned from."""

    @property
    def gradient_steps(self) -> int:
        """Return the gradient steps taken."""

    @property
    def samples_learned(self) -> int:
        """Return the steps learned from, counted once per use."""

    @property
    def frozen(self) -> InferencePolicy:
        """Return the acting policy for inference."""

    @property
    def pending_updates(self) -> int:
        """Return the gradient steps that are due for the steps observed so far."""

    def learn(self) -> None:
        """Take one gradient step."""

    def forget_pending(self) -> None:
        """Drop steps that wait for later ones: the environments were reset."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as tensors and plain types; the policy's weights under `policy`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raise ValueError for a state of other sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPolicy:
    """What chooses the actions of a rollout: a policy that is frozen meanwhile, and the environments' streams [N]."""

    policy: InferencePolicy
    rngs: Sequence[np.random.Generator]  # their states are the learner's, which draws from them too
    version: int


@runtime_checkable
class OnPolicyLearner(Protocol):
    """A learner whose actions in a rollout can be chosen elsewhere: by workers that have its policy and its streams."""

    @property
    def rollout_policy(self) -> RolloutPolicy:
        """Return what `act` uses until the next update."""


class LearnerSettings(Protocol):
    """The settings that every learner reads; its own are further attributes of the same object, a run's flags."""

    @property
    def seed(self) -> int:
        """Return the seed of the run."""

    @property
    def num_processes(self) -> int:
        """Return the number of environments N."""


class LearnerSpec:
    """Describe a learner that is registered by name: how to build it, and what is known before torch is imported."""

    on_policy = False  # weights are frozen during a rollout, from which `update` learns
    deterministic = False  # supports --deterministic
    made_by = ""  # the command that makes its checkpoints, for a policy that is not trained

    @classmethod
    def make(cls, obs_dim: int, num_actions: int, config: Any, *, mask_columns: slice) -> Learner:
        """Return a new learner; `mask_columns` of an observation are 1 where an action is not allowed."""
        raise NotImplementedError

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference, given the flags of its run; ValueError for others."""
        raise NotImplementedError

    @staticmethod
    def planned_updates(config: Any) -> int:
        """Return the gradient steps of a whole run; 0 where they are not known before."""
        return 0


def tensors(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return copies of arrays as tensors, for a checkpoint."""
    import torch

    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


COUNTS = ("env_steps", "gradient_steps", "samples_learned")


def counts_of(learner: Any) -> dict[str, Any]:
    """Return the counts that a checkpoint holds of a learner."""
    counts = {name: getattr(learner, name) for name in COUNTS if hasattr(learner, name)}
    return {"updates_done": learner.updates_done, "counts": counts}


def restore_counts(learner: Any, state: Mapping[str, Any]) -> None:
    """Restore `counts_of`."""
    learner.updates_done = int(state["updates_done"])
    for name in COUNTS:
        if name in state["counts"]:
            setattr(learner, name, int(state["counts"][name]))


class Acted(NamedTuple):
    """Actions for n observations, with their values where the policy estimates them."""

    actions: NDArray[np.int64]  # [n]
    values: FloatArray | None = None  # [n] what the best allowed action was thought to be worth


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The policy of a BaseLearner for inference."""

    choose: Callable[..., NDArray[np.int64]]
    weights: Weights

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool = False) -> Acted:
        return Acted(self.choose(self.weights, obs, rngs, greedy=greedy))


class BaseLearner(LearnerSpec):
    """Base of an off-policy learner whose policy is a function of arrays: implement `choose` and `observe`.

    `weights` holds every array the policy needs; it is saved, restored and copied for inference by this class.
    """

    def __init__(self, obs_dim: int, num_actions: int, config: LearnerSettings, *, mask_columns: slice) -> None:
        self.weights: Weights = {"mask_columns": np.arange(obs_dim)[mask_columns]}  # [A]
        # One random stream per environment, so that results do not depend on the order in which steps finish.
        self.rngs = [np.random.default_rng((config.seed, env)) for env in range(config.num_processes)]
        self.version = self.updates_done = self.gradient_steps = self.samples_learned = 0

    @staticmethod
    def choose(
        weights: Weights, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool
    ) -> NDArray[np.int64]:
        """Return actions [n] for observations [n, D]; `greedy` draws nothing from `rngs` [n]."""
        raise NotImplementedError

    def observe(self, steps: Steps) -> None:
        """Learn from finished steps, at most one per environment."""
        raise NotImplementedError

    @classmethod
    def make(cls, obs_dim: int, num_actions: int, config: LearnerSettings, *, mask_columns: slice) -> Self:
        """Return a new learner."""
        return cls(obs_dim, num_actions, config, mask_columns=mask_columns)

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference."""
        return _Snapshot(cls.choose, {name: np.asarray(tensor) for name, tensor in state.items()})

    @property
    def frozen(self) -> InferencePolicy:
        """Return a copy of the policy for inference."""
        return _Snapshot(self.choose, deepcopy(self.weights))

    @property
    def rollout_policy(self) -> RolloutPolicy:
        """Return what `act` uses until the weights change."""
        return RolloutPolicy(policy=self.frozen, rngs=self.rngs, version=self.version)

    @property
    def pending_updates(self) -> int:
        """Return 0: everything is learned in `observe`."""
        return 0

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]."""
        return self.choose(self.weights, obs, [self.rngs[env] for env in env_ids], greedy=False)

    def learn(self) -> None:
        """Take one gradient step; never called while `pending_updates` is 0."""

    def update(self) -> dict[str, float]:
        """Finish a rollout and return its statistics under their metric keys."""
        self.updates_done += 1
        return {}

    def forget_pending(self) -> None:
        """Drop steps that wait for later ones: the environments were reset."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as tensors and plain types."""
        return {
            "policy": tensors(self.weights),
            "optimizer": {},
            "rng": {"actions": [rng.bit_generator.state for rng in self.rngs]},
            **counts_of(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raise ValueError for a state of other sizes."""
        restored = {name: np.array(tensor) for name, tensor in state["policy"].items()}
        shapes = {name: array.shape for name, array in self.weights.items()}
        if shapes != {name: array.shape for name, array in restored.items()}:
            raise ValueError("the checkpoint's learner has other weights; use the operators it was trained with")
        if len(state["rng"]["actions"]) != len(self.rngs):
            raise ValueError(f"the checkpoint has {len(state['rng']['actions'])} environments; use as many processes")
        self.weights = restored
        for rng, stream in zip(self.rngs, state["rng"]["actions"], strict=True):
            rng.bit_generator.state = stream
        restore_counts(self, state)
