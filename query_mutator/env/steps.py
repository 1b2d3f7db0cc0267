"""Steps on their way from environments to a learner."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from query_mutator.types import FloatArray

__all__ = ["StepResult", "Steps", "VectorStep", "last_obs"]

#: gymnasium's five of one environment: observation [O], reward, terminated, truncated, info
StepResult = tuple[FloatArray, float, bool, bool, dict[str, Any]]
#: the same of n environments: observations [n, O], then arrays [n]
VectorStep = tuple[FloatArray, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]


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
