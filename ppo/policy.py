"""Actor and critic: two small tanh networks. `Policy` learns with torch, `FrozenPolicy` acts with numpy.

    n rows, D obs, A actions, H hidden; 2 = the actor (0) and the critic (1) side by side

Acting asks for a few rows at a time, where torch's cost per call is several times that of the arithmetic; a copy of
the weights in numpy answers the same to about 1e-6 and needs no device, autograd or threads.
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

FloatArray = NDArray[np.float32]


class ActOutput(NamedTuple):
    """What the policy decided for n observations."""

    actions: NDArray[np.int64]  # [n]
    logprobs: FloatArray  # [n]
    values: FloatArray  # [n]


class Policy(nn.Module):
    """Separate actor and critic networks with orthogonal initial weights drawn from `seed`."""

    def __init__(
        self, obs_dim: int, num_actions: int, hidden_sizes: Sequence[int] = (64, 64), *, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        # A nearly flat first policy explores; a critic head of gain 1 starts at the scale of normalised returns.
        self.actor = _mlp([obs_dim, *hidden_sizes, num_actions], head_gain=0.01, generator=generator)
        self.critic = _mlp([obs_dim, *hidden_sizes, 1], head_gain=1.0, generator=generator)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, A] and values [n] of observations [n, D]."""
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def frozen(self, *, deterministic: bool = False) -> FrozenPolicy:
        """Return a copy of today's weights that acts without torch."""
        return FrozenPolicy(self, deterministic=deterministic)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Policy:
        """Return the policy of a saved state dict; sizes are read off the weights, other contents are a ValueError."""
        try:
            weights = [state[f"actor.{2 * i}.weight"] for i in range(len(state) // 4)]
            policy = cls(weights[0].shape[1], weights[-1].shape[0], [w.shape[0] for w in weights[:-1]])
            policy.load_state_dict(state)
        except (KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise ValueError(f"these are not the weights of an actor-critic policy: {error}") from error
        return policy


def _mlp(sizes: Sequence[int], *, head_gain: float, generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (wide_in, wide_out) in enumerate(pairwise(sizes)):
        # Made on "meta", a layer draws no weights of its own from torch's global random stream.
        linear = nn.Linear(wide_in, wide_out, device="meta").to_empty(device="cpu")
        gain = head_gain if index == len(sizes) - 2 else math.sqrt(2)
        nn.init.orthogonal_(linear.weight, gain, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class FrozenPolicy:
    """A policy's weights as they stood, for acting; `deterministic` makes every row's result independent of the others.

    A matrix product's last bits depend on how many rows it is given. Deterministic acting takes one row at a time
    and sums its products in a fixed order, without BLAS, whose threads may change it.
    """

    def __init__(self, policy: Policy, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        actor, critic = _linears(policy.actor), _linears(policy.critic)
        self._hidden = [
            (np.stack([a.weight, c.weight]), np.stack([a.bias, c.bias])[:, None])  # [2, in, H], [2, 1, H]
            for a, c in zip(actor[:-1], critic[:-1], strict=True)
        ]
        self._actor_head, self._critic_head = actor[-1], critic[-1]
        self.obs_dim = int(self._hidden[0][0].shape[1])

    def get_value(self, obs: FloatArray) -> FloatArray:
        """Return the critic's values [n] of observations [n, D]."""
        if self.deterministic and len(obs) > 1:
            return np.concatenate([self.get_value(obs[i : i + 1]) for i in range(len(obs))])
        return self._forward(obs)[1]

    def act(self, obs: FloatArray, rngs: Sequence[np.random.Generator], *, greedy: bool = False) -> ActOutput:
        """Return actions, their log-probabilities and the values of observations [n, D].

        Row i draws one uniform number from `rngs[i]` and inverts its cumulative distribution, so a stream serves its
        environment alone. `greedy` takes the likeliest action and draws nothing.
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
            uniform = np.array([rng.random(dtype=np.float32) for rng in rngs], dtype=np.float32)
            actions = (cumulative <= (uniform * total)[:, None]).sum(axis=1)
            # uniform < 1, but its product with the total may round up to the total.
            np.minimum(actions, logits.shape[1] - 1, out=actions)
        logprobs = logits[np.arange(len(actions)), actions] - np.log(total)
        return ActOutput(actions, logprobs, values)

    def _forward(self, obs: FloatArray) -> tuple[FloatArray, FloatArray]:
        product = _ordered_product if self.deterministic else np.matmul
        hidden = np.asarray(obs, dtype=np.float32)  # [n, D], then [2, n, H]
        for weight, bias in self._hidden:
            hidden = product(hidden, weight)
            hidden += bias
            np.tanh(hidden, out=hidden)
        logits = product(hidden[0], self._actor_head.weight) + self._actor_head.bias
        values = product(hidden[1], self._critic_head.weight) + self._critic_head.bias
        return logits, values[:, 0]


class _Linear(NamedTuple):
    weight: FloatArray  # [in, out]
    bias: FloatArray  # [out]


def _linears(network: nn.Module) -> list[_Linear]:
    return [
        _Linear(layer.weight.detach().cpu().numpy().T.copy(), layer.bias.detach().cpu().numpy().copy())
        for layer in network.modules()
        if isinstance(layer, nn.Linear)
    ]


def _ordered_product(rows: FloatArray, weight: FloatArray) -> FloatArray:
    """Return rows [..., n, in] times weight [..., in, out], each sum taken in one fixed order."""
    summed: FloatArray = (rows[..., None] * weight[..., None, :, :]).sum(axis=-2)
    return summed
