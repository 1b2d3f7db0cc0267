"""Step a gymnasium vector environment into a rollout buffer.

N envs, D obs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ppo.frozen import FloatArray, InferencePolicy

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv

    from ppo.algorithm import PPO
    from ppo.rollout import RolloutBuffer


class NotFiniteError(ValueError):
    """An environment returned a number that is not finite; learning from it would turn every weight into NaN."""


def require_finite(what: str, values: NDArray[Any], place: Callable[[int], tuple[int, int]]) -> None:
    """Raise NotFiniteError unless all `values` [n] or [n, D] are; `place(row)` is an environment and its step."""
    is_finite = np.isfinite(values)
    if is_finite.all():
        return
    row, *_ = np.argwhere(~is_finite)[0].tolist()
    env, step = place(row)
    raise NotFiniteError(
        f"environment {env}, step {step}: the {what} has the value {values[~is_finite][0]}; correct the environment, "
        "or wrap it in one whose numbers are finite"
    )


class RolloutCollector:
    """Collects rollouts. Holds the current observations and the returns of unfinished episodes."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], *, seed: int | None = None) -> None:
        from gymnasium.vector import AutoresetMode

        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"autoreset_mode={mode} of {envs} wastes steps; make it with autoreset_mode=AutoresetMode.SAME_STEP"
            )
        self.envs = envs
        self._steps = 0  # of each environment
        self.obs = self._checked("first observation", _copied(envs.reset(seed=seed)[0]))  # [N, D]
        self._returns = np.zeros(envs.num_envs)

    def collect(self, ppo: PPO, buffer: RolloutBuffer) -> list[float]:
        """Step all environments until the buffer is full; return the undiscounted returns of episodes that ended."""
        returns: list[float] = []
        while not buffer.full:
            returns += self._step(ppo, buffer)
        return returns

    def _step(self, ppo: PPO, buffer: RolloutBuffer) -> list[float]:
        acted = ppo.act(self.obs)
        next_obs, rewards, terminations, truncations, infos = self.envs.step(acted.actions)
        self._steps += 1
        self._checked("reward", rewards)
        next_obs = self._checked("observation", _copied(next_obs))
        buffer.add(
            obs=self.obs,
            actions=acted.actions,
            logprobs=acted.logprobs,
            values=acted.values,
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            final_values=self._final_values(ppo, truncations, infos["final_obs"]) if truncations.any() else 0.0,
        )
        self.obs = next_obs
        self._returns += rewards
        ended = np.flatnonzero(terminations | truncations)
        returns: list[float] = self._returns[ended].tolist()
        self._returns[ended] = 0.0
        return returns

    def _final_values(self, ppo: PPO, truncations: NDArray[np.bool_], final_obs: Any) -> FloatArray:
        ended = np.flatnonzero(truncations)
        final_values = np.zeros(len(truncations), dtype=np.float32)
        last = np.array([final_obs[i] for i in ended], dtype=np.float32)
        require_finite("last observation", last, lambda row: (int(ended[row]), self._steps))
        final_values[ended] = ppo.get_value(last)
        return final_values

    def _checked(self, what: str, values: NDArray[Any]) -> NDArray[Any]:
        """Return what every environment returned; NotFiniteError unless it is finite."""
        require_finite(what, values, lambda env: (env, self._steps))
        return values


def first_episode_returns(
    policy: InferencePolicy, envs: VectorEnv[Any, Any, Any], *, seed: int | None = None
) -> NDArray[np.float64]:
    """Return the greedy policy's return [N] in the first episode of each environment.

    One episode each: the first n to finish would over-sample short ones.
    """
    obs = envs.reset(seed=seed)[0]
    returns = np.zeros(envs.num_envs)
    running = np.ones(envs.num_envs, dtype=bool)
    while running.any():
        obs, rewards, terminations, truncations, _ = envs.step(policy.act(obs, (), greedy=True).actions)
        returns += np.where(running, rewards, 0.0)
        running &= ~(terminations | truncations)
    return returns


def _copied(obs: Any) -> FloatArray:
    """Return a float32 copy [N, D] of observations: a vector environment may reuse its array."""
    return np.array(obs, dtype=np.float32)
