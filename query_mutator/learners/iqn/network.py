"""The quantile function of the return, for every action.

`QuantileNetwork` trains with torch, `frozen.FrozenQuantiles` infers with numpy.

n rows, D obs, A actions, H hidden, K quantiles, C cosines

obs -> trunk -> [H]      tau -> cos(pi i tau), i < C -> [H]      their product -> value + advantage - mean advantage
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from query_mutator.learners.iqn.frozen import MASKED_VALUE, FrozenQuantiles


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


def quantile_huber_loss(predicted: Tensor, target: Tensor, taus: Tensor, *, kappa: float) -> Tensor:
    """Return the loss [B] of `predicted` [B, K] at `taus` [K] against samples `target` [B, J] of the return.

    Mean over all K x J pairs of |tau - 1{error < 0}| x Huber(error) / kappa (Dabney et al., 2018, arXiv:1806.06923,
    whose sum over K is a mean here, so that the number of quantiles does not act as a step size).
    """
    errors = target[:, None, :] - predicted[:, :, None]  # [B, K, J]
    size = errors.abs()
    huber = torch.where(size <= kappa, 0.5 * errors.square(), kappa * (size - 0.5 * kappa)) / kappa
    weights = (taus[:, None] - (errors.detach() < 0).float()).abs()
    return (weights * huber).mean(dim=(1, 2))
