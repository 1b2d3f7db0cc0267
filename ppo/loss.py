"""PPO's loss (Schulman et al., 2017, arXiv:1707.06347): clipped ratio, clipped value, entropy bonus.

B steps in the minibatch, A actions
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, nll_loss

from ppo.config import PPOConfig
from ppo.rollout import Batch


def ppo_loss(
    logits: Tensor, values: Tensor, batch: Batch, config: PPOConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean loss of current `logits` [B, A] and `values` [B] over the steps of `batch`, and its terms.

    The terms are policy loss, value loss and entropy; then the log [B] of the ratio of new to old probability.
    """
    # Ratio of new to old probability, and entropy
    all_logprobs = logits.log_softmax(-1)
    log_ratio = -nll_loss(all_logprobs, batch.actions, reduction="none") - batch.logprobs
    entropy = -(all_logprobs.exp() * all_logprobs).sum(-1).mean()
    # Clipped surrogate and clipped value loss
    advantages = normalized(batch.advantages) if config.norm_adv else batch.advantages
    policy_loss = clipped_policy_loss(log_ratio.exp(), advantages, clip_param=config.clip_param)
    value_clip = config.clip_param if config.clip_vloss else None
    value_loss = clipped_value_loss(values, batch.values, batch.returns, clip_param=value_clip)
    total = policy_loss - config.entropy_coef * entropy + config.value_loss_coef * value_loss
    return total, policy_loss, value_loss, entropy, log_ratio


def normalized(advantages: Tensor) -> Tensor:
    """Return advantages [B] with mean 0 and standard deviation 1; a single one is returned unchanged."""
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip_param: float) -> Tensor:
    """Return the negated clipped surrogate, averaged: min(ratio A, clip(ratio) A).

    That minimum equals min(ratio A, A + clip_param |A|), which takes fewer operations.
    """
    at_most = advantages + clip_param * advantages.abs()
    return -torch.min(ratio * advantages, at_most).mean()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip_param: float | None) -> Tensor:
    """Return half the mean squared error, the larger of value and clipped value (`clip_param` None: no clipping)."""
    if clip_param is None:
        return 0.5 * mse_loss(values, returns)
    clipped = old_values + (values - old_values).clamp(-clip_param, clip_param)
    return 0.5 * torch.max((values - returns).square(), (clipped - returns).square()).mean()
