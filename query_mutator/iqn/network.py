"""The quantile function of the return, for every action.

`QuantileNetwork` trains with torch, `FrozenQuantiles` infers with numpy.

n rows, D obs, A actions, H hidden, K quantiles, C cosines

obs -> trunk -> [H]      tau -> cos(pi i tau), i < C -> [H]      their product -> value + advantage - mean advantage
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

FloatArray = NDArray[np.float32]

#: Subtracted from the value of a masked action, so that it is below all others; not part of what is learned.
MASKED_VALUE = 1e6


class Acted(NamedTuple):
    """Actions for n observations, with their values."""

    actions: NDArray[np.int64]  # [n]
    values: FloatArray  # [n] what the best allowed action was thought to be worth


class QuantileNetwork(nn.Module):
    """Dueling implicit quantile network (Dabney et al., 2018; Wang et al., 2016); initial weights drawn from `seed`."""

    closed: Tensor
    frequencies: Tensor

    def __init__(
        self,
        obs_dim: int,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        num_cosines: int = 64,
        seed: int = 0,
        mask_columns: slice | None = None,
    ) -> None:
        """Take sizes; the A `mask_columns` of an observation are 1 where an action is not allowed."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        wide = hidden_sizes[-1]
        sizes = pairwise([obs_dim, *hidden_sizes])
        self.trunk = nn.ModuleList(_layer(*size, generator=generator) for size in sizes)
        self.cosine = _layer(num_cosines, wide, generator=generator)
        self.streams = _layer(wide, 2 * wide, generator=generator)  # the value's half, the advantage's half
        self.value_head = _layer(wide, 1, gain=1.0, generator=generator)
        # Nearly equal first advantages: the first best action is learned, not drawn.
        self.advantage_head = _layer(wide, num_actions, gain=0.01, generator=generator)
        columns = [] if mask_columns is None else range(obs_dim)[mask_columns]
        if mask_columns is not None and len(columns) != num_actions:
            raise ValueError(f"{len(columns)} mask columns for {num_actions} actions")
        self.register_buffer("closed", torch.tensor(columns, dtype=torch.int64))  # [A], or none
        self.register_buffer("frequencies", math.pi * torch.arange(num_cosines, dtype=torch.float32))  # [C]

    def forward(self, obs: Tensor, taus: Tensor) -> Tensor:
        """Return the return's quantiles [n, K, A] at `taus` [K] under observations [n, D]."""
        hidden = obs
        for layer in self.trunk:
            hidden = layer(hidden).relu()
        quantiles = self.cosine((taus[:, None] * self.frequencies).cos()).relu()  # [K, H]
        value, advantage = self.streams(hidden[:, None] * quantiles).relu().chunk(2, dim=-1)
        advantages = self.advantage_head(advantage)  # [n, K, A]
        quantile_values: Tensor = self.value_head(value) + advantages - advantages.mean(-1, keepdim=True)
        return quantile_values

    def mask(self, obs: Tensor) -> Tensor:
        """Return the penalty on the values [n, A] of masked actions; 0 without masking."""
        return MASKED_VALUE * obs[:, self.closed] if len(self.closed) else obs.new_zeros(())

    def frozen(self, *, num_quantiles: int = 32) -> FrozenQuantiles:
        """Return a copy of the weights for inference without torch, on means of `num_quantiles` quantiles."""
        return FrozenQuantiles(self.state_dict(), num_quantiles=num_quantiles)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> QuantileNetwork:
        """Return the network of a saved state dict, sized by its weights; ValueError for other contents."""
        try:
            depth = sum(name.startswith("trunk") for name in state) // 2
            sizes = [len(state[f"trunk.{index}.bias"]) for index in range(depth)]
            network = cls(
                state["trunk.0.weight"].shape[1],
                len(state["advantage_head.bias"]),
                sizes,
                num_cosines=len(state["frequencies"]),
            )
            network.closed = network.closed.new_empty(len(state["closed"]))
            network.load_state_dict(state)
        except (KeyError, IndexError, AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(f"these are not the weights of a quantile network: {error}") from error
        return network


class FrozenQuantiles:
    """A snapshot of a network for inference: the mean over evenly spaced quantiles, without torch."""

    def __init__(self, state: Mapping[str, Tensor], *, num_quantiles: int = 32) -> None:
        self._weights = {name: np.array(tensor.cpu()) for name, tensor in state.items()}
        self._depth = sum(name.startswith("trunk") for name in state) // 2
        taus = (np.arange(num_quantiles, dtype=np.float32) + 0.5) / num_quantiles
        self._quantiles = _relu(self._apply("cosine", np.cos(taus[:, None] * self._weights["frequencies"])))  # [K, H]

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

    def act(
        self, obs: FloatArray, rngs: Sequence[np.random.Generator] = (), *, greedy: bool = False, epsilon: float = 0.0
    ) -> Acted:
        """Return actions for observations [n, D]: the best, or with probability `epsilon` any allowed one.

        Row i draws one uniform number from `rngs[i]`, so each environment has its own stream; `greedy` draws nothing.
        """
        values = self.q_values(obs)
        best = values.argmax(axis=1)
        if greedy:
            return Acted(best, values.max(axis=1))
        uniform = np.array([rng.random() for rng in rngs])
        return Acted(
            np.where(uniform < epsilon, drawn(self.allowed(obs), uniform / max(epsilon, 1e-9)), best),
            values.max(axis=1),
        )

    def allowed(self, obs: FloatArray) -> NDArray[np.bool_]:
        """Return the action mask [n, A] of observations [n, D]."""
        closed = self._weights["closed"]
        if not len(closed):
            return np.ones((len(obs), len(self._weights["advantage_head.bias"])), dtype=np.bool_)
        return np.asarray(obs[:, closed] < 0.5, dtype=np.bool_)

    def _apply(self, name: str, rows: FloatArray) -> FloatArray:
        return np.asarray(rows @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"], dtype=np.float32)


def drawn(allowed: NDArray[np.bool_], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return one allowed action of [n, A] each, picked uniformly by numbers [n] of [0, 1)."""
    rank = np.floor(np.clip(uniform, 0.0, 1.0) * allowed.sum(axis=1))
    return np.asarray(np.argmax(allowed.cumsum(axis=1) > rank[:, None], axis=1), dtype=np.int64)


def _relu(rows: FloatArray) -> FloatArray:
    return np.maximum(rows, 0.0)


class _Linear(nn.Module):
    """A linear layer whose orthogonal weights come from a generator, never from torch's global random stream."""

    def __init__(self, in_features: int, out_features: int, *, gain: float, generator: torch.Generator) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features)
        nn.init.orthogonal_(weight, gain, generator=generator)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)


def _layer(in_features: int, out_features: int, *, gain: float = math.sqrt(2), generator: torch.Generator) -> _Linear:
    return _Linear(in_features, out_features, gain=gain, generator=generator)
