"""gymnasium's interface of vector environments: seeds, masks, steps of n environments as arrays, autoreset.

N environments, n of them that finished a step, O observation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from query_mutator.env.scheduling import Flow
from query_mutator.registry import check_known
from query_mutator.types import FloatArray

#: gymnasium's five of one environment: observation [O], reward, terminated, truncated, info
StepResult = tuple[FloatArray, float, bool, bool, dict[str, Any]]
#: the same of n environments: observations [n, O], then arrays [n]
VectorStep = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


def parse_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Return gymnasium's mode for its name or value; ValueError with the known ones for others."""
    known = {name: one for one in AutoresetMode for name in (one.name, one.value)}
    if isinstance(mode, AutoresetMode):
        return mode
    check_known("autoreset mode", mode, known)
    return known[mode]


def env_seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Return a seed for each environment [N]: one number counts up, as gymnasium has it."""
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + index for index in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(f"{len(seed)} seeds for {num_envs} environments")
    return list(seed)


def reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> NDArray[np.bool_]:
    """Return which environments [N] to reset: all, or those of `options["reset_mask"]`."""
    if not options or "reset_mask" not in options:
        return np.ones(num_envs, dtype=np.bool_)
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(f"options['reset_mask'] must be a bool array of shape ({num_envs},) with at least one True")
    return mask


def as_arrays(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return an info with its numbers as arrays of no dimension, which gymnasium, SB3 and torchrl's reader take."""
    return {key: value if isinstance(value, dict) else np.asarray(value) for key, value in info.items()}


def infos_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one dict of arrays [n] for n infos; `_key` [n] says which of them have the key, as gymnasium does."""
    from gymnasium.vector import VectorEnv

    vector, infos = VectorEnv[Any, Any, Any](), dict[str, Any]()
    vector.num_envs = len(rows)
    for index, info in enumerate(rows):
        infos = vector._add_info(infos, dict(info), index)
    return infos


def rows_of(infos: Mapping[str, Any], rows: NDArray[np.int64] | NDArray[np.bool_]) -> dict[str, Any]:
    """Return the given rows of every array of infos, nested dicts included."""
    return {key: rows_of(value, rows) if isinstance(value, dict) else value[rows] for key, value in infos.items()}


def of_step(infos: Mapping[str, Any], key: str) -> NDArray[Any]:
    """Return what the infos [n] of steps say, such as `valid` (no call failed for good) or `step_calls`.

    After the end of an episode it is in `final_info`: the rest is of the next one.
    """
    found: NDArray[Any] = infos[key]
    if "final_info" in infos:
        found = np.where(infos["_final_info"], infos["final_info"][key], found)
    return found


def gather(results: Mapping[int, StepResult], obs_dim: int) -> VectorStep:
    """Return the steps of environments, by number, as arrays [n] in their order; `infos["env_id"]` [n] names them."""
    env_ids = sorted(results)
    found = [results[env] for env in env_ids]
    obs, rewards, terminations, truncations, infos = zip(*found, strict=True) if found else [()] * 5
    rows = np.array(obs, dtype=np.float32).reshape(-1, obs_dim)
    ends = np.array(terminations, dtype=np.bool_), np.array(truncations, dtype=np.bool_)
    named = {**infos_of(infos), "env_id": np.array(env_ids, dtype=np.int64)}
    return rows, np.array(rewards, dtype=np.float64), *ends, named


def reset_as_step(env: Any, *, seed: int | None = None, **about: bool) -> Flow:
    """Yield the calls of a reset; return it as a step without reward, with `about` in its info."""
    obs, info = yield from env.reset_flow(seed=seed)
    return obs, 0.0, False, False, {**about, **info}


def step_and_reset(env: Any, action: int) -> Flow:
    """Yield the calls of a step and, if the episode ends, those of the next reset."""
    obs, reward, terminated, truncated, info = yield from env.step_flow(action)
    if terminated or truncated:
        next_obs, next_info = yield from env.reset_flow()
        obs, info = next_obs, {"final_obs": obs, "final_info": info, **next_info}
    return obs, reward, terminated, truncated, info
