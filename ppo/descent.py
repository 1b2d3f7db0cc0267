"""Adam with global gradient clipping, over all parameters as one tensor.

P numbers in all parameters together

For a small network the cost of clipping and Adam is the number of calls, not arithmetic. With torch's fused Adam and
`clip_grad_norm_` a gradient step of the default networks takes 27 to 47 % longer (docs/log.md), and creating it loads
torch's compiler, 1.2 s of processor time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class FlatAdam:
    """Makes the parameters of `module` views of one tensor and optimizes that; `module` must stay on its device.

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

    def gradient_step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Take one gradient step on `loss`; return the norms of its gradient before and after it is clipped."""
        gradients = torch.autograd.grad(loss, self._parameters)
        gradient = torch.cat([piece.flatten() for piece in gradients])  # [P]
        norm: Tensor = torch.linalg.vector_norm(gradient)
        gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        after: Tensor = torch.linalg.vector_norm(gradient)
        self._adam(gradient)
        return norm, after

    @torch.no_grad()
    def _adam(self, gradient: Tensor) -> None:
        first, second = self.betas
        self._steps += 1
        self._mean.lerp_(gradient, 1 - first)
        self._square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = self._square.sqrt().mul_((1 - second**self._steps) ** -0.5).add_(self.eps)
        self._flat.addcdiv_(self._mean, root, value=-self.lr / (1 - first**self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Return Adam's state: tensors and plain types."""
        return {"steps": self._steps, "lr": self.lr, "mean": self._mean.clone(), "square": self._square.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._steps, self.lr = int(state["steps"]), float(state["lr"])
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
