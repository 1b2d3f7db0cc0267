"""The base class of learners: what PPO, IQN, the direct method and your learner have in common; and PPO.

T steps, N environments, n of them, D observation

A learner chooses actions, observes the steps that come of them, and learns: on-policy ones in `update`, at the end of a
rollout during which their weights are frozen; off-policy ones in `learn`, while steps arrive. For your learner
subclass `BaseLearner` and register the class in `query_mutator.learners.LEARNERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppo.config import LearnerConfig, PPOConfig
from ppo.frozen import FrozenPolicy, InferencePolicy, action_streams, restore_streams
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


class PPOLearner(Learner):
    """Stores steps with the log-probabilities and values they were chosen with; `update` learns from a rollout."""

    on_policy = True
    deterministic = True

    def __init__(self, obs_dim: int, num_actions: int, config: PPOConfig, *, mask_columns: slice | None) -> None:
        from ppo.algorithm import PPO  # it loads torch
        from ppo.rollout import RolloutBuffer

        self._ppo = PPO(obs_dim, num_actions, config, mask_columns=mask_columns)
        num_envs = config.num_processes
        self._buffer = RolloutBuffer(config.num_steps, num_envs, obs_dim)
        self._next_obs = np.zeros((num_envs, obs_dim), dtype=np.float32)  # [N, D] after each environment's last step
        # What the policy said when it chose each environment's present action, [N] each.
        self._actions = np.zeros(num_envs, dtype=np.int64)
        self._logprobs = np.zeros(num_envs, dtype=np.float32)
        self._values = np.zeros(num_envs, dtype=np.float32)
        self._take_over()

    def _take_over(self) -> None:
        """Show the policy and counts of the algorithm as those of this learner."""
        ppo = self._ppo
        self.frozen: FrozenPolicy = ppo.frozen
        self.rngs, self.version, self.updates_done = ppo.action_rngs, ppo.updates_done, ppo.updates_done
        self.gradient_steps, self.samples_learned = ppo.gradient_steps, ppo.samples_learned

    @classmethod
    def load_policy(cls, state: Mapping[str, Any], flags: Mapping[str, Any]) -> InferencePolicy:
        """Return the policy of saved weights for inference."""
        return FrozenPolicy(state, deterministic=bool(flags.get("deterministic")))

    @staticmethod
    def planned_updates(config: PPOConfig) -> int:
        """Return the gradient steps of a whole run."""
        return config.num_updates * config.ppo_epoch * config.num_mini_batch

    def act(self, obs: FloatArray, env_ids: Sequence[int]) -> NDArray[np.int64]:
        """Return actions [n] in environments `env_ids` for observations [n, D]."""
        ids = list(env_ids)
        self._actions[ids], self._logprobs[ids], self._values[ids] = self._ppo.act(obs, ids)
        return self._actions[ids]

    def observe(self, steps: Steps) -> None:
        """Store finished steps, at most one per environment."""
        envs, cut = steps.env_ids, steps.truncations
        logprobs = self._logprobs[envs]
        if (steps.actions != self._actions[envs]).any():
            # A resumed run takes the stored actions; the last bits of a probability led to another choice now.
            logprobs = self.frozen.logprobs(steps.obs, steps.actions)
        final_values = np.zeros(len(steps.rewards), dtype=np.float32)
        if cut.any():
            final_values[cut] = self._ppo.get_value(steps.next_obs[cut])
        self._buffer.add(
            envs,
            obs=steps.obs,
            actions=steps.actions,
            logprobs=logprobs,
            values=self._values[envs],
            rewards=steps.rewards,
            terminations=steps.terminations,
            truncations=cut,
            final_values=final_values,
            valid=steps.valid,
        )
        self._next_obs[envs] = steps.next_obs

    def update(self) -> dict[str, float]:
        """Learn from the rollout, which every environment has filled."""
        assert self._buffer.full
        stats = self._ppo.update(self._buffer, self._next_obs)
        self._buffer.reset()
        self._take_over()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two rollouts as tensors and plain types."""
        return self._ppo.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; ValueError for a state of other sizes."""
        self._ppo.load_state_dict(state)
        self._take_over()
