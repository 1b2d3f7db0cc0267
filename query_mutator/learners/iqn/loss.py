"""The quantile Huber loss per sample, so that losses of different batch sizes compare.

B samples, K quantiles of the prediction, J quantiles of its target
"""

from __future__ import annotations

import torch
from torch import Tensor


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
