"""Steps on their way from environments to a learner."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FloatArray", "Steps", "last_obs"]

FloatArray = NDArray[np.float32]


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


def last_obs(obs: FloatArray, ended: NDArray[np.bool_], infos: dict[str, Any]) -> FloatArray:
    """Return observations [n, D] in which an ended episode has its own last one, not that of the next episode."""
    if not ended.any():
        return obs
    last = obs.copy()
    last[ended] = np.stack(infos["final_obs"][ended])
    return last
