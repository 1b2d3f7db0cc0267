"""Generalized advantage estimation (Schulman et al., 2016, arXiv:1506.02438).

T steps, N envs; every array is [T, N], next_values [N]
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_gae(
    rewards: Tensor,
    values: Tensor,
    terminations: Tensor,
    truncations: Tensor,
    final_values: Tensor,
    next_values: Tensor,
    valid: Tensor | None = None,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [T, N]; 0 at invalid steps.

    `terminations[t]` and `truncations[t]` mark that step t ended its episode: a termination has no future value, a
    truncation bootstraps from `final_values[t]`. `next_values` are those after the last step. An invalid step is
    skipped: the chain runs from the step before it to the step after it. An episode may end at an invalid step.
    """
    valid = torch.ones_like(terminations) if valid is None else valid
    ended = terminations | truncations
    nothing = torch.zeros_like(next_values)
    after_end = torch.where(truncations & ~terminations, final_values, 0.0)
    advantages = torch.zeros_like(rewards)
    next_value, next_advantage = next_values, nothing
    # Backward over time: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}
    for t in range(len(rewards) - 1, -1, -1):
        next_value = torch.where(ended[t], after_end[t], next_value)
        next_advantage = torch.where(ended[t], nothing, next_advantage)
        advantage = rewards[t] + gamma * next_value - values[t] + gamma * gae_lambda * next_advantage
        advantages[t] = advantage
        next_value = torch.where(valid[t], values[t], next_value)
        next_advantage = torch.where(valid[t], advantage, next_advantage)
    return torch.where(valid, advantages, 0.0), torch.where(valid, advantages + values, 0.0)
