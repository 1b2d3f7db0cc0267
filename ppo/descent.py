"""Adam with global gradient clipping, over all parameters as one tensor.

P numbers in all parameters together

A small network has many small parameters, and what clipping and Adam cost is calls, not arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class GradNorms(NamedTuple):
    """Norms of one gradient, each measured on what it names."""

    before: Tensor  # as the loss gave it
    after: Tensor  # as Adam got it


class FlatAdam:
    """Makes the parameters of `module` views of one tensor and descends on that; `module` must stay on its device."""

    def __init__(self, module: nn.Module, *, lr: float, max_grad_norm: float, eps: float = 1e-5) -> None:
        self.max_grad_norm = max_grad_norm
        self._parameters = list(module.parameters())
        self._flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in self._parameters]))  # [P]
        sizes = [parameter.numel() for parameter in self._parameters]
        pieces = torch.split(self._flat.detach(), sizes)
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.data = piece.view_as(parameter)
        self._adam = torch.optim.Adam([self._flat], lr=lr, eps=eps, fused=True)

    def descend(self, loss: Tensor) -> GradNorms:
        """Take one step down the gradient of `loss`, clipped to `max_grad_norm`; return its norms."""
        gradients = torch.autograd.grad(loss, self._parameters)
        gradient = torch.cat([piece.flatten() for piece in gradients])  # [P]
        norm: Tensor = torch.linalg.vector_norm(gradient)
        self._flat.grad = gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        after: Tensor = torch.linalg.vector_norm(gradient)
        self._adam.step()
        return GradNorms(norm, after)

    def set_lr(self, lr: float) -> None:
        """Use step size `lr` from here on."""
        self._adam.param_groups[0]["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state: tensors and plain types."""
        return self._adam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._adam.load_state_dict(state)
