"""The base class of learners: what PPO, IQN, the direct method and your learner have in common.

n environments of N, D observation

A learner chooses actions, observes the steps that come of them, and learns: on-policy ones in `update`, at the end of a
rollout during which their weights are frozen; off-policy ones in `learn`, while steps arrive. For your learner
subclass `BaseLearner` and register the class in `query_mutator.learners.named.LEARNERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppo.config import LearnerConfig
from ppo.frozen import InferencePolicy, action_streams, restore_streams
from query_mutator.types import FloatArray

Weights = dict[str, NDArray[Any]]
COUNTS = ("env_steps", "gradient_steps", "samples_learned")


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
    calls: NDArray[np.float64]  # [n] model calls of the step, with prices in calls to the cheapest model

    @property
    def ended(self) -> NDArray[np.bool_]:
        """Return which steps [n] ended their episode."""
        return self.terminations | self.truncations


def last_obs(obs: FloatArray, ended: NDArray[np.bool_], infos: dict[str, Any]) -> FloatArray:
    """Return observations [n, D] in which an ended episode has its own last one, not that of the next episode."""
    if not ended.any():
        return obs
    last = obs.copy()
    last[ended] = np.stack(infos["final_obs"][ended])
    return last


class Acted(NamedTuple):
    """Actions for n observations."""

    actions: NDArray[np.int64]  # [n]


def explored(
    actions: NDArray[np.int64], allowed: NDArray[np.bool_], rngs: Sequence[np.random.Generator], *, share: float
) -> NDArray[np.int64]:
    """Return actions [n] of which a random share is drawn from the allowed ones [n, A], each by its own stream."""
    drawn = [row for row, rng in enumerate(rngs) if rng.random() < share]
    actions[drawn] = [rngs[row].choice(np.flatnonzero(allowed[row])) for row in drawn]
    return actions


class Learner:
    """Chooses actions and learns from the steps; owns the weights, the optimizer and every random stream.

    Its class is registered by name: class attributes and class methods say what is known before torch is imported.
    """

    on_policy = False  # weights are frozen during a rollout, from which `update` learns
    deterministic = False  # supports --deterministic
    made_by = ""  # the command that makes its checkpoints, for a policy that is not trained

    frozen: InferencePolicy  # the acting policy; `act` of an on-policy learner uses it until the next update
    rngs: Sequence[np.random.Generator]  # one for each environment: the order in which steps finish changes nothing
    version = 0  # of the acting weights; it counts up
    updates_done = 0  # rollouts learned from
    env_steps = 0
    gradient_steps = 0
    samples_learned = 0  # steps learned from, counted once per use

    @classmethod
    def make(cls, obs_dim: int, num_actions: int, config: Any, *, mask_columns: slice) -> Learner:
        """Return a new learner; `mask_columns` of an observation are 1 where an action is not allowed."""
        return cls(obs_dim, num_actions, config, mask_columns=mask_columns)  # type: ignore[call-arg]

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference, given the flags of its run; ValueError for others."""
        raise NotImplementedError

    @staticmethod
    def planned_updates(config: Any) -> int:
        """Return the gradient steps of a whole run; 0 where they are not known before."""
        return 0

    @property
    def pending_updates(self) -> int:
        """Return the gradient steps that are due for the steps observed so far."""
        return 0

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]."""
        raise NotImplementedError

    def observe(self, steps: Steps) -> None:
        """Store finished steps, at most one per environment."""
        raise NotImplementedError

    def learn(self) -> None:
        """Take one gradient step; never called while `pending_updates` is 0."""

    def update(self) -> dict[str, float]:
        """Finish a rollout (on-policy: learn from it) and return its statistics under their metric keys."""
        self.updates_done += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and random streams; a learner adds its weights under `policy`, arrays or tensors."""
        return {
            "optimizer": {},
            "rng": {"actions": [rng.bit_generator.state for rng in self.rngs]},
            "updates_done": self.updates_done,
            "counts": {name: getattr(self, name) for name in COUNTS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for a state of other sizes."""
        restore_streams(self.rngs, state["rng"]["actions"])
        self.updates_done = int(state["updates_done"])
        for name in COUNTS:
            setattr(self, name, int(state["counts"][name]))


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The policy of a BaseLearner for inference."""

    choose: Callable[..., NDArray[np.int64]]
    weights: Weights

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool = False) -> Acted:
        return Acted(self.choose(self.weights, obs, rngs, greedy=greedy))


class BaseLearner(Learner):
    """Base of a learner whose policy is a function of arrays: implement `choose` and `observe`.

    `weights` holds every array the policy needs; it is saved, restored and copied for inference by this class.
    """

    def __init__(self, obs_dim: int, num_actions: int, config: LearnerConfig, *, mask_columns: slice) -> None:
        self.weights: Weights = {"mask_columns": np.arange(obs_dim)[mask_columns]}  # [A]
        self.rngs = action_streams(config.seed, config.num_processes)

    @staticmethod
    def choose(
        weights: Weights, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool
    ) -> NDArray[np.int64]:
        """Return actions [n] for observations [n, D]; `greedy` draws nothing from `rngs` [n]."""
        raise NotImplementedError

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference."""
        return _Snapshot(cls.choose, {name: np.asarray(tensor) for name, tensor in state.items()})

    @property
    def frozen(self) -> InferencePolicy:  # type: ignore[override]  # the weights change in place
        """Return a copy of the policy for inference."""
        return _Snapshot(self.choose, deepcopy(self.weights))

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]."""
        return self.choose(self.weights, obs, [self.rngs[env] for env in env_ids], greedy=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as arrays and plain types."""
        return {**super().state_dict(), "policy": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for a state of other sizes."""
        restored = {name: np.array(tensor) for name, tensor in state["policy"].items()}
        shapes = {name: array.shape for name, array in self.weights.items()}
        if shapes != {name: array.shape for name, array in restored.items()}:
            raise ValueError("the checkpoint's learner has other weights; use the operators it was trained with")
        super().load_state_dict(state)
        self.weights = restored
