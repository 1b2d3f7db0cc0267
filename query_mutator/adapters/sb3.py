"""Stable-Baselines3's VecEnv over a gymnasium VectorEnv.

N environments

    envs = GymVecEnv(make_vector_env(16, backend="recorded"))
    model = MaskablePPO("MlpPolicy", envs).learn(2048)

It takes any VectorEnv whose autoreset mode is SAME_STEP, as SB3 resets an environment in the step that ends its
episode: `SyncVectorEnv`, `AsyncVectorEnv`, `BatchedQueryMutationEnv`, and gymnasium's vector wrappers around them. In
the last step of an episode, `terminal_observation` is `final_obs`, `TimeLimit.truncated` says whether to bootstrap from
it, the other keys are those of `final_info`, and `reset_infos` has the info of the reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

try:
    from stable_baselines3.common.env_util import is_wrapped
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvObs, VecEnvStepReturn
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("query_mutator.adapters.sb3 needs `pip install stable-baselines3`") from error

FINAL_KEYS = ("final_obs", "final_info")


class GymVecEnv(VecEnv):
    """A VecEnv over `envs`; ValueError unless their autoreset mode is SAME_STEP.

    An AsyncVectorEnv calls methods of all its environments or of none, and knows their wrappers by class name. A
    VectorEnv without single environments lends its own attributes and methods; a method returns one row for each.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        if not isinstance(envs, VectorEnv):
            raise TypeError(f"envs must be a gymnasium.vector.VectorEnv; for a {type(envs).__name__} use DummyVecEnv")
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            name = mode.name if isinstance(mode, AutoresetMode) else mode
            raise ValueError(
                f"autoreset mode {name} must be SAME_STEP, as Stable-Baselines3 resets an environment in the step "
                "that ends its episode; make it with autoreset_mode=AutoresetMode.SAME_STEP"
            )
        self.envs = envs
        self._base: Any = envs.unwrapped
        self._singles: list[gym.Env[Any, Any]] | None = getattr(self._base, "envs", None)
        self._actions: Any = None
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    # --- steps -----------------------------------------------------------------------------------------------------

    def reset(self) -> VecEnvObs:
        """Reset all environments with the seeds of `seed()` and the options of `set_options()`, which are used once."""
        if any(options != self._options[0] for options in self._options):
            raise ValueError("a VectorEnv takes the same options for all environments; pass one dict to set_options()")
        obs, infos = self.envs.reset(seed=list(self._seeds), options=self._options[0] or None)  # type: ignore[arg-type]
        self.reset_infos = _rows(infos, self.num_envs)
        self._reset_seeds()
        self._reset_options()
        return self._own(obs)

    def step_async(self, actions: NDArray[Any]) -> None:
        """Set the actions [N] of the next step."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; return observations [N, ...], rewards [N], dones [N] and N infos."""
        obs, rewards, terminations, truncations, vector_infos = self.envs.step(self._actions)
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
        self.envs.close()

    def get_images(self) -> Sequence[NDArray[Any] | None]:
        """Return one RGB image for each environment, None in other render modes."""
        frames: Any = self.envs.render() if self.render_mode == "rgb_array" else None
        return [None] * self.num_envs if frames is None else list(frames)

    def _own(self, obs: Any) -> VecEnvObs:
        """Return observations that the next step does not overwrite."""
        owned: VecEnvObs = obs if getattr(self._base, "copy", True) else deepcopy(obs)
        return owned

    # --- single environments ---------------------------------------------------------------------------------------

    def has_attr(self, attr_name: str) -> bool:
        """Return whether all environments have an attribute or method of this name."""
        if hasattr(self._base, "call"):  # an AttributeError would end other processes
            return all(self._base.call("has_wrapper_attr", attr_name))
        return hasattr(self._base, attr_name)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of each of the environments; an AsyncVectorEnv returns what a method returns."""
        if not self.has_attr(attr_name):
            raise AttributeError(f"the environments have no attribute {attr_name}")
        if self._singles is not None:
            return [self._singles[index].get_wrapper_attr(attr_name) for index in self._get_indices(indices)]
        values = self._base.get_attr(attr_name) if hasattr(self._base, "call") else None
        if values is None:
            values = [getattr(self._base, attr_name)] * self.num_envs
        return [values[index] for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute in each of the environments to the same value."""
        chosen = list(self._get_indices(indices))
        if self._singles is not None:
            for index in chosen:
                self._singles[index].set_wrapper_attr(attr_name, value)
        elif hasattr(self._base, "call"):
            values = [value] * self.num_envs if len(set(chosen)) == self.num_envs else self.get_attr(attr_name)
            self._base.set_attr(attr_name, [value if index in chosen else old for index, old in enumerate(values)])
        else:
            self._require_all(chosen, "set_attr")
            setattr(self._base, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Return what a method of each of the environments returns."""
        chosen = list(self._get_indices(indices))
        if self._singles is not None:
            methods = [self._singles[index].get_wrapper_attr(method_name) for index in chosen]
            return [method(*method_args, **method_kwargs) for method in methods]
        self._require_all(chosen, "env_method")
        if not self.has_attr(method_name):
            raise AttributeError(f"the environments have no method {method_name}")
        if hasattr(self._base, "call"):
            return list(self._base.call(method_name, *method_args, **method_kwargs))
        return list(getattr(self._base, method_name)(*method_args, **method_kwargs))

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Return whether each of the environments is in a wrapper of this class."""
        if self._singles is not None:
            return [is_wrapped(self._singles[index], wrapper_class) for index in self._get_indices(indices)]
        if not hasattr(self._base, "call"):
            return [False for _ in self._get_indices(indices)]
        nestings = self._base.call("__str__")  # as <TimeLimit<OrderEnforcing<CartPoleEnv<CartPole-v1>>>>
        return [wrapper_class.__name__ in nestings[index].split("<") for index in self._get_indices(indices)]

    def _require_all(self, chosen: Sequence[int], name: str) -> None:
        if sorted(set(chosen)) != list(range(self.num_envs)):
            kind = type(self._base).__name__
            raise ValueError(f"{kind} has no access to single environments; call {name}() without indices")


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
