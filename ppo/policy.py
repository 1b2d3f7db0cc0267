"""Actor and critic: two small tanh networks. `Policy` trains with torch, `frozen.FrozenPolicy` infers with numpy.

n rows, D obs, A actions, H hidden; 2 = the actor (0) and the critic (1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ppo.frozen import MASKED_LOGIT, FrozenPolicy


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
        self.actor_head = orthogonal_linear(hidden_sizes[-1], num_actions, gain=0.01, generator=generator)
        self.critic_head = orthogonal_linear(hidden_sizes[-1], 1, gain=1.0, generator=generator)
        self.register_buffer("closed", masked(mask_columns, obs_dim, num_actions=num_actions))  # [A], or none

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


def orthogonal_linear(in_features: int, out_features: int, *, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with biases of 0 and orthogonal weights."""
    # On "meta" a layer draws no initial weights from torch's global random stream.
    linear = nn.Linear(in_features, out_features, device="meta").to_empty(device="cpu")
    nn.init.orthogonal_(linear.weight, gain, generator=generator)
    nn.init.zeros_(linear.bias)
    return linear


def masked(mask_columns: slice | None, obs_dim: int, *, num_actions: int) -> Tensor:
    """Return the columns of an observation [A] that are 1 where an action is not allowed; none without masking."""
    columns = [] if mask_columns is None else range(obs_dim)[mask_columns]
    if mask_columns is not None and len(columns) != num_actions:
        raise ValueError(f"{len(columns)} mask columns for {num_actions} actions")
    return torch.tensor(columns, dtype=torch.int64)
