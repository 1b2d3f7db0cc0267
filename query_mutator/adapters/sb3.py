"""Stable-Baselines3's VecEnv over a gymnasium VectorEnv.

N environments

    envs = GymVecEnv(make_vector_env(16, backend="recorded"))
    model = MaskablePPO("MlpPolicy", envs).learn(2048)

It takes any VectorEnv that holds its environments, as `BatchedQueryMutationEnv` and `SyncVectorEnv` do, also within
gymnasium's vector wrappers, whose autoreset mode is SAME_STEP: SB3 resets an environment in the step that ends its
episode. In the last step of an episode, `terminal_observation` is `final_obs`, `TimeLimit.truncated` says whether to
bootstrap from it, the other keys are those of `final_info`, and `reset_infos` has the info of the reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

try:
    from stable_baselines3.common.vec_env import DummyVecEnv
    from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("query_mutator.adapters.sb3 needs `pip install stable-baselines3`") from error

FINAL_KEYS = ("final_obs", "final_info")


class GymVecEnv(DummyVecEnv):
    """SB3's own VecEnv of the single environments of `envs`, which it resets and steps together."""

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        if not isinstance(envs, VectorEnv) or not hasattr(envs.unwrapped, "envs"):
            kind = type(envs).__name__
            raise TypeError(f"envs must be a VectorEnv that holds its environments; for a {kind} use a VecEnv of SB3")
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"autoreset_mode={mode} must be SAME_STEP, as Stable-Baselines3 resets an environment in the step "
                "that ends its episode; make it with autoreset_mode=AutoresetMode.SAME_STEP"
            )
        self.vector = envs
        singles: list[Any] = envs.unwrapped.envs
        super().__init__([partial(singles.__getitem__, index) for index in range(envs.num_envs)])

    def reset(self) -> VecEnvObs:
        """Reset all environments with the seeds of `seed()` and the options of `set_options()`, which are used once."""
        if any(options != self._options[0] for options in self._options):
            raise ValueError("a VectorEnv takes the same options for all environments; pass one dict to set_options()")
        obs, infos = self.vector.reset(seed=list(self._seeds), options=self._options[0] or None)  # type: ignore[arg-type]
        self.reset_infos = _rows(infos, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return self._own(obs)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; return observations [N, ...], rewards [N], dones [N] and N infos."""
        obs, rewards, terminations, truncations, vector_infos = self.vector.step(self.actions)
        dones, infos = np.logical_or(terminations, truncations), _rows(vector_infos, self.num_envs)
        for index, info in enumerate(infos):
            if dones[index]:
                self.reset_infos[index] = {key: value for key, value in info.items() if key not in FINAL_KEYS}
                # What vector wrappers add, such as "episode", is outside final_info.
                infos[index] = {**self.reset_infos[index], **info.get("final_info", {})}
                infos[index]["terminal_observation"] = info["final_obs"]
            infos[index]["TimeLimit.truncated"] = bool(truncations[index] and not terminations[index])
        return self._own(obs), np.asarray(rewards, dtype=np.float32), dones, infos

    def close(self) -> None:
        """Close the environments."""
        self.vector.close()

    def _own(self, obs: Any) -> VecEnvObs:
        """Return observations that the next step does not overwrite."""
        owned: VecEnvObs = obs if getattr(self.vector.unwrapped, "copy", True) else deepcopy(obs)
        return owned


def _rows(infos: Mapping[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return one info for each environment from a dict of arrays [N]; `_key` [N] says which of them have the key.

    gymnasium's `DictInfoToList` would drop all keys with an underscore, and so the texts of our environment.
    """
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        values = _rows(value, num_envs) if isinstance(value, Mapping) else value
        for index in np.flatnonzero(infos.get(f"_{key}", np.ones(num_envs, dtype=np.bool_))):
            rows[index][key] = values[index]
    return rows
