"""Actor and critic: two small tanh networks. `Policy` trains with torch, `FrozenPolicy` infers with numpy.

    n rows, D obs, A actions, H hidden; 2 = the actor (0) and the critic (1)

Inference is on a few rows at a time, where torch's overhead per call is several times the arithmetic. A copy of the
weights in numpy gives the same results to about 1e-6 without device, autograd or threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

FloatArray = NDArray[np.float32]

#: Subtracted from the logit of a masked action: its probability becomes e^-40, and all terms of the loss stay finite.
MASKED_LOGIT = 40.0


class ActOutput(NamedTuple):
    """Actions for n observations, with their log-probabilities and values."""

    actions: NDArray[np.int64]  # [n]
    logprobs: FloatArray  # [n]
    values: FloatArray  # [n]


class Chosen(Protocol):
    """Actions for n observations."""

    @property
    def actions(self) -> NDArray[np.int64]:
        """Return the actions [n]."""


class InferencePolicy(Protocol):
    """A policy for inference: a snapshot that later updates do not change."""

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool = False) -> Chosen:
        """Return actions for observations [n, D]; `greedy` draws nothing from `rngs`."""


class TwinLinear(nn.Module):
    """Two linear layers of one shape, for actor and critic, applied in one matrix product."""

    def __init__(self, in_features: int, out_features: int, *, generator: torch.Generator) -> None:
        super().__init__()
        weight = torch.empty(2, in_features, out_features)
        for half in weight:
            nn.init.orthogonal_(half, math.sqrt(2), generator=generator)
        self.weight = nn.Parameter(weight)  # [2, in, out]
        self.bias = nn.Parameter(torch.zeros(2, 1, out_features))

    def forward(self, rows: Tensor) -> Tensor:
        """Return [2, n, out] of rows [2, n, in]."""
        return torch.baddbmm(self.bias, rows, self.weight)


class Policy(nn.Module):
    """Separate actor and critic networks of one shape; orthogonal initial weights from `seed`."""

    closed: Tensor

    def __init__(
        self,
        obs_dim: int,
        num_actions: int,
        hidden_sizes: Sequence[int] = (64, 64),
        *,
        seed: int = 0,
        mask_columns: slice | None = None,
    ) -> None:
        """Take sizes; the A `mask_columns` of an observation are 1 where an action is not allowed."""
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = pairwise([obs_dim, *hidden_sizes])
        self.hidden = nn.ModuleList(TwinLinear(*size, generator=generator) for size in sizes)
        # A nearly uniform first policy explores; a critic head of gain 1 starts at the scale of normalized returns.
        self.actor_head = _head(hidden_sizes[-1], num_actions, gain=0.01, generator=generator)
        self.critic_head = _head(hidden_sizes[-1], 1, gain=1.0, generator=generator)
        columns = [] if mask_columns is None else range(obs_dim)[mask_columns]
        if mask_columns is not None and len(columns) != num_actions:
            raise ValueError(f"{len(columns)} mask columns for {num_actions} actions")
        self.register_buffer("closed", torch.tensor(columns, dtype=torch.int64))  # [A], or none

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, A] and values [n] of observations [n, D]."""
        hidden = obs.expand(2, -1, -1)
        for layer in self.hidden:
            hidden = layer(hidden).tanh()
        logits, values = self.actor_head(hidden[0]), self.critic_head(hidden[1]).squeeze(-1)
        if len(self.closed):
            logits = logits - MASKED_LOGIT * obs[:, self.closed]
        return logits, values

    def frozen(self, *, deterministic: bool = False) -> FrozenPolicy:
        """Return a copy of the weights for inference without torch."""
        return FrozenPolicy(self.state_dict(), deterministic=deterministic)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Policy:
        """Return the policy of a saved state dict, sized by its weights; ValueError for other contents."""
        try:
            obs_dim, *_ = sizes = [state["hidden.0.weight"].shape[1]]
            for index in range(sum(name.startswith("hidden") for name in state) // 2):
                sizes.append(state[f"hidden.{index}.weight"].shape[2])
            policy = cls(obs_dim, len(state["actor_head.bias"]), sizes[1:])
            policy.closed = policy.closed.new_empty(len(state["closed"]))
            policy.load_state_dict(state)
        except (KeyError, IndexError, AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(f"these are not the weights of an actor-critic policy: {error}") from error
        return policy


def _head(in_features: int, out_features: int, *, gain: float, generator: torch.Generator) -> nn.Linear:
    # On "meta" a layer draws no initial weights from torch's global random stream.
    linear = nn.Linear(in_features, out_features, device="meta").to_empty(device="cpu")
    nn.init.orthogonal_(linear.weight, gain, generator=generator)
    nn.init.zeros_(linear.bias)
    return linear


class FrozenPolicy:
    """A snapshot of a policy for inference; `deterministic` makes each row's result independent of the others.

    The last bits of a matrix product depend on its number of rows. Deterministic inference takes one row at a time
    and sums its products in a fixed order, without BLAS, whose threads may change the order.
    """

    def __init__(self, state: Mapping[str, Tensor], *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._weights = {name: np.array(tensor.cpu()) for name, tensor in state.items()}
        self._depth = sum(name.startswith("hidden") for name in state) // 2

    def get_value(self, obs: FloatArray) -> FloatArray:
        """Return the critic's values [n] of observations [n, D]."""
        if self.deterministic and len(obs) > 1:
            return np.concatenate([self.get_value(obs[i : i + 1]) for i in range(len(obs))])
        return self._forward(obs)[1]

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool = False) -> ActOutput:
        """Return actions, their log-probabilities and the values of observations [n, D].

        Row i draws one uniform number from `rngs[i]` and inverts its cumulative distribution, so each environment has
        its own stream. `greedy` takes the most probable action and draws nothing.
        """
        if self.deterministic and len(obs) > 1:
            rows = [self.act(obs[i : i + 1], rngs[i : i + 1], greedy=greedy) for i in range(len(obs))]
            return ActOutput(*(np.concatenate(column) for column in zip(*rows, strict=True)))
        logits, values = self._forward(obs)
        logits -= logits.max(axis=1, keepdims=True)
        cumulative = np.exp(logits).cumsum(axis=1)
        total = cumulative[:, -1]
        if greedy:
            actions = logits.argmax(axis=1)
        else:
            uniform = np.array([rng.random() for rng in rngs])
            actions = (cumulative <= (uniform * total)[:, None]).sum(axis=1)
            # uniform < 1, but its product with the total may round up to the total.
            np.minimum(actions, logits.shape[1] - 1, out=actions)
        logprobs = logits[np.arange(len(actions)), actions] - np.log(total)
        return ActOutput(actions, logprobs, values)

    def logprobs(self, obs: FloatArray, actions: NDArray[np.int64]) -> FloatArray:
        """Return the log-probabilities [n] of given actions [n] under observations [n, D]."""
        logits, _ = self._forward(obs)
        logits -= logits.max(axis=1, keepdims=True)
        chosen: FloatArray = logits[np.arange(len(actions)), actions] - np.log(np.exp(logits).sum(axis=1))
        return chosen

    def _forward(self, obs: FloatArray) -> tuple[FloatArray, FloatArray]:
        product = _ordered_product if self.deterministic else np.matmul
        weights = self._weights
        hidden = np.asarray(obs, dtype=np.float32)  # [n, D], then [2, n, H]
        for layer in range(self._depth):
            hidden = product(hidden, weights[f"hidden.{layer}.weight"])
            hidden += weights[f"hidden.{layer}.bias"]
            np.tanh(hidden, out=hidden)
        logits = product(hidden[0], weights["actor_head.weight"].T) + weights["actor_head.bias"]
        values = product(hidden[1], weights["critic_head.weight"].T) + weights["critic_head.bias"]
        closed = weights["closed"]
        if len(closed):
            logits -= MASKED_LOGIT * np.asarray(obs, dtype=np.float32)[:, closed]
        return logits, values[:, 0]


def _ordered_product(rows: FloatArray, weight: FloatArray) -> FloatArray:
    """Return rows [..., n, in] times weight [..., in, out], each sum in one fixed order."""
    summed: FloatArray = (rows[..., None] * weight[..., None, :, :]).sum(axis=-2)
    return summed
