"""Inference with numpy: act with a trained policy, without torch.

    n rows, D obs, A actions, H hidden; 2 = the actor (0) and the critic (1)

Inference takes a few rows at a time, so torch's overhead per call is several times the arithmetic. A copy of the
weights in numpy gives the same results to about 1e-6 without device, autograd or threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

#: Subtracted from the logit of a masked action: its probability becomes e^-40, and all terms of the loss stay finite.
MASKED_LOGIT = 40.0

# Purposes of random streams; gymnasium's streams have none, so no two coincide.
ACTION_STREAM, SHUFFLE_STREAM = 1, 2


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


class FrozenPolicy:
    """A snapshot of a policy for inference; `deterministic` makes each row's result independent of the others.

    The last bits of a matrix product depend on its number of rows. Deterministic inference takes one row at a time
    and sums its products in a fixed order, without BLAS, whose threads may change the order.
    """

    def __init__(self, state: Mapping[str, Any], *, deterministic: bool = False) -> None:
        """Copy the weights of a `Policy`, as arrays or as tensors; ValueError for other contents."""
        self.deterministic = deterministic
        self._weights = {name: array_of(value) for name, value in state.items()}
        self._depth = sum(name.startswith("hidden") for name in state) // 2
        try:
            logits, _ = self._forward(np.zeros((1, self._weights["hidden.0.weight"].shape[1]), np.float32))
            self.num_actions = logits.shape[1]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise ValueError(f"these are not the weights of an actor-critic policy: {error}") from error

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


def array_of(weight: Any) -> NDArray[Any]:
    """Return a copy of an array, or of a tensor on any device."""
    return np.array(weight.cpu() if hasattr(weight, "cpu") else weight)


def action_streams(seed: int, num_envs: int) -> list[np.random.Generator]:
    """Return a random stream for each environment."""
    return [np.random.default_rng((seed + env, ACTION_STREAM)) for env in range(num_envs)]


def restore_streams(rngs: Sequence[np.random.Generator], states: Sequence[Any]) -> None:
    """Restore the environments' random streams; ValueError if their number differs."""
    if len(states) != len(rngs):
        raise ValueError(
            f"the checkpoint has {len(states)} environments, this run {len(rngs)}; try num_processes={len(states)}"
        )
    for rng, state in zip(rngs, states, strict=True):
        rng.bit_generator.state = state
