"""Implicit quantile networks: an off-policy learner that replays every transition many times.

    n rows, D obs, A actions, H hidden, K quantiles, C cosines

`learner` has the network with torch, its loss, the replay buffer and the learner. Here is what acting needs, with
numpy: importing this package loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ppo.frozen import array_of
from query_mutator.learners.learner import Acted
from query_mutator.types import FloatArray

__all__ = ["MASKED_VALUE", "FrozenQuantiles", "learner"]

#: Subtracted from the value of a masked action, so that it is below all others; not part of what is learned.
MASKED_VALUE = 1e6
MAX_COSINES = 10**7  # of a state, which may be a stranger's: 40 MB; 2,048 are usual


class FrozenQuantiles:
    """A snapshot of a network for inference: the mean over evenly spaced quantiles, without torch."""

    def __init__(self, state: Mapping[str, Any], *, num_quantiles: int = 32) -> None:
        """Copy the weights of a `QuantileNetwork`, as arrays or as tensors; ValueError for other contents."""
        self._weights = {name: array_of(value) for name, value in state.items()}
        self._depth = sum(name.startswith("trunk") for name in state) // 2
        taus = (np.arange(num_quantiles, dtype=np.float32) + 0.5) / num_quantiles
        try:
            frequencies = self._weights["frequencies"]
            if num_quantiles * frequencies.size > MAX_COSINES:
                raise ValueError(f"{num_quantiles} quantiles with {frequencies.size} cosines each")
            cosines = np.cos(taus[:, None] * frequencies)
            self._quantiles = _relu(self._apply("cosine", cosines))  # [K, H]
            obs = np.zeros((1, self._weights["trunk.0.weight"].shape[1]), np.float32)
            self.num_actions = self.q_values(obs).shape[1]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise ValueError(f"these are not the weights of a quantile network: {error}") from error

    def q_values(self, obs: FloatArray) -> FloatArray:
        """Return the mean returns [n, A] under observations [n, D]; those of masked actions are below all others."""
        hidden = np.asarray(obs, dtype=np.float32)
        for layer in range(self._depth):
            hidden = _relu(self._apply(f"trunk.{layer}", hidden))
        streams = _relu(self._apply("streams", hidden[:, None] * self._quantiles))  # [n, K, 2H]
        # The heads are linear: the mean over quantiles may be taken before them.
        value, advantage = np.split(streams.mean(axis=1), 2, axis=-1)
        advantages = self._apply("advantage_head", advantage)
        values = self._apply("value_head", value) + advantages - advantages.mean(axis=-1, keepdims=True)
        closed = self._weights["closed"]
        if len(closed):
            values = values - np.float32(MASKED_VALUE) * np.asarray(obs, dtype=np.float32)[:, closed]
        return np.asarray(values, dtype=np.float32)

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator] = (), *, greedy: bool = False) -> Acted:
        """Return the best actions for observations [n, D]; nothing is random."""
        return Acted(self.q_values(obs).argmax(axis=1))

    def allowed(self, obs: FloatArray) -> NDArray[np.bool_]:
        """Return the action mask [n, A] of observations [n, D]."""
        closed = self._weights["closed"]
        if not len(closed):
            return np.ones((len(obs), len(self._weights["advantage_head.bias"])), dtype=np.bool_)
        return np.asarray(obs[:, closed] < 0.5, dtype=np.bool_)

    def _apply(self, name: str, rows: FloatArray) -> FloatArray:
        return np.asarray(rows @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"], dtype=np.float32)


def _relu(rows: FloatArray) -> FloatArray:
    return np.maximum(rows, 0.0)
