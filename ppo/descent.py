"""Adam with global gradient clipping, over all parameters as one tensor.

P numbers in all parameters together

A small network has many small parameters, and what clipping and Adam cost is calls, not arithmetic. Written out here
because torch's class loads its compiler when it is made, which takes seconds.
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
    """Makes the parameters of `module` views of one tensor and descends on that; `module` must stay on its device.

    Adam as by Kingma and Ba (2015), arXiv:1412.6980, algorithm 1.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        lr: float,
        max_grad_norm: float,
        eps: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.lr, self.max_grad_norm, self.eps, self.betas = lr, max_grad_norm, eps, betas
        self._parameters = list(module.parameters())
        self._flat = torch.cat([parameter.detach().flatten() for parameter in self._parameters])  # [P]
        pieces = torch.split(self._flat, [parameter.numel() for parameter in self._parameters])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.data = piece.view_as(parameter)
        self._steps = 0
        self._mean, self._square = torch.zeros_like(self._flat), torch.zeros_like(self._flat)  # [P] of gradients

    def gradient_step(self, loss: Tensor) -> GradNorms:
        """Take one step down the gradient of `loss`, clipped to `max_grad_norm`; return its norms."""
        gradients = torch.autograd.grad(loss, self._parameters)
        gradient = torch.cat([piece.flatten() for piece in gradients])  # [P]
        norm: Tensor = torch.linalg.vector_norm(gradient)
        gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        after: Tensor = torch.linalg.vector_norm(gradient)
        self._adam(gradient)
        return GradNorms(norm, after)

    @torch.no_grad()
    def _adam(self, gradient: Tensor) -> None:
        first, second = self.betas
        self._steps += 1
        self._mean.lerp_(gradient, 1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = self._square.sqrt().mul_((1 - second**self._steps) ** -0.5).add_(self.eps)
        self._flat.addcdiv_(self._mean, root, value=-self.lr / (1 - first**self._steps))

    def set_lr(self, lr: float) -> None:
        """Use step size `lr` from here on."""
        self.lr = lr

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state: tensors and plain types."""
        return {"steps": self._steps, "lr": self.lr, "mean": self._mean.clone(), "square": self._square.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._steps, self.lr = int(state["steps"]), float(state["lr"])
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
