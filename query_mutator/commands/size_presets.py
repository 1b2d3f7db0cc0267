"""Workloads of `qm size` for the trainer's own learners: the policy of PPO, and IQN.

B samples, A actions
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ppo.policy import Policy
from query_mutator.lab.sizing.workload import Workload
from query_mutator.learners.iqn.learner import QuantileNetwork, quantile_huber_loss

OBS, ACTIONS = 32, 14  # of the trainer, at its default sizes
IQN_QUANTILES = 8


class WithTarget(nn.Module):
    """A network that learns, and its target network that does not."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)


def policy() -> Workload:
    """Return an update of the trainer's own policy: a minibatch of PPO on its default observation."""

    def loss(module: nn.Module, obs: Tensor) -> Tensor:
        logits, value = module(obs)
        surrogate: Tensor = -torch.log_softmax(logits, dim=-1).mean()
        error: Tensor = value.square().mean()
        return surrogate + error

    return Workload(
        name="policy",
        build=lambda: _with_fake_weights(lambda: Policy(OBS, ACTIONS)),
        batch=lambda size: (torch.randn(size, OBS),),
        loss=loss,
    )


def iqn() -> Workload:
    """Return a gradient step of `--algo iqn`: its own network, target network and loss."""

    def values(quantiles: Tensor, actions: Tensor) -> Tensor:
        return quantiles.gather(2, actions[:, None, None].expand(-1, IQN_QUANTILES, 1))[..., 0]

    def loss(module: WithTarget, obs: Tensor, next_obs: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        taus = torch.rand(IQN_QUANTILES)
        with torch.no_grad():
            greedy = module.online(next_obs, taus).mean(1).argmax(1)
            target = returns[:, None] + values(module.target(next_obs, taus), greedy)
        predicted = values(module.online(obs, taus), actions)
        return quantile_huber_loss(predicted, target, taus, kappa=1.0).mean()

    def batch(size: int) -> tuple[Tensor, ...]:
        actions = torch.zeros(size, dtype=torch.int64)
        return torch.randn(size, OBS), torch.randn(size, OBS), actions, torch.randn(size)

    return Workload(
        name="iqn",
        build=lambda: WithTarget(_with_fake_weights(lambda: QuantileNetwork(OBS, ACTIONS))),
        batch=batch,
        loss=loss,
    )


def _with_fake_weights(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a module with zero weights that draws its own with a generator, which fake tensors do not support."""
    with _disable_current_modes():
        made = make()
    for module in made.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    return made
