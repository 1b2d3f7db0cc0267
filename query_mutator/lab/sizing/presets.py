"""The models to size by name: small classics, ACT for robots, RL and language models; others register theirs.

    PRESETS.add("mine", function)    in a module that `ModelSpec.plugins` names; the function returns a Workload

B samples, A actions
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from query_mutator.errors import UsageError
from query_mutator.lab.sizing import networks
from query_mutator.lab.sizing.act import act
from query_mutator.lab.sizing.language import LANGUAGE_MODELS
from query_mutator.lab.sizing.networks import GPTShape, WithTarget
from query_mutator.lab.sizing.workload import Workload
from query_mutator.registry import Registry

__all__ = ["PRESETS", "dqn", "gpt", "iqn_conv", "ppo", "preset", "resnet18", "sac"]

GPT_SHAPE = GPTShape()


def preset(name: str, **sizes: Any) -> Workload:
    """Return a preset with the sizes given; UsageError for an unknown name or a size that it does not have."""
    make = PRESETS.get(name)
    for size in sizes:
        if size not in _sizes_of(make):
            takers = [other for other in PRESETS if size in _sizes_of(PRESETS.get(other))]
            raise UsageError(f"--{size} is not for {name}; it is for {', '.join(takers)}")
    return make(**sizes)


def _sizes_of(make: Callable[..., Workload]) -> set[str]:
    return set(inspect.signature(make).parameters)


# --- supervised ------------------------------------------------------------------------------------------------------


def _cross_entropy(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(module(x).flatten(0, -2), target.flatten())


def gpt(shape: GPTShape = GPT_SHAPE) -> Workload:
    """Return the training of a small GPT, by default on sequences of 256 tokens."""

    def tokens(size: int) -> Tensor:
        return torch.randint(0, shape.vocabulary, (size, shape.length))

    return Workload(
        name="gpt",
        build=lambda: networks.GPT(shape),
        batch=lambda size: (tokens(size), tokens(size)),
        loss=_cross_entropy,
    )


def mlp() -> Workload:
    """Return the training of an MLP 4096-2048-2048-2048-2048-10."""
    return Workload(
        name="mlp",
        build=lambda: networks.mlp_layers((4096, 2048, 2048, 2048, 2048, 10), nn.ReLU),
        batch=lambda size: (torch.randn(size, 4096), torch.randint(0, 10, (size,))),
        loss=_cross_entropy,
    )


def resnet18() -> Workload:
    """Return the training of ResNet18 on 224 x 224 images, 1000 classes."""
    return Workload(
        name="resnet18",
        build=lambda: nn.Sequential(
            networks.resnet18_trunk(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
        ),
        batch=lambda size: (torch.randn(size, 3, 224, 224), torch.randint(0, 1000, (size,))),
        loss=_cross_entropy,
    )


# --- reinforcement learning ------------------------------------------------------------------------------------------


def iqn_conv() -> Workload:
    """Return the training of an IQN on 64 x 64 images and 64 floats."""
    return Workload(
        name="iqn-conv",
        build=networks.IQNConv,
        batch=lambda size: (torch.randn(size, 1, 64, 64), torch.randn(size, 64), torch.randn(size, 12)),
        loss=lambda module, image, floats, target: F.smooth_l1_loss(module(image, floats).mean(dim=1), target),
    )


def ppo(*, images: bool = False) -> Workload:
    """Return a minibatch of PPO."""

    def batch(size: int) -> tuple[Tensor, ...]:
        actions = torch.zeros(size, dtype=torch.int64)
        return _observations(size, images), actions, torch.randn(size), torch.randn(size), torch.randn(size)

    def loss(
        module: nn.Module, obs: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, returns: Tensor
    ) -> Tensor:
        logits, values = module(obs)
        logprobs = F.log_softmax(logits, dim=-1)
        ratio = (logprobs.gather(1, actions[:, None])[:, 0] - old).exp()
        surrogate: Tensor = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        error: Tensor = F.mse_loss(values, returns)
        entropy: Tensor = -(logprobs.exp() * logprobs).sum(dim=-1).mean()
        return surrogate + 0.5 * error - 0.01 * entropy

    name = "ppo, images" if images else "ppo, mlp"
    return Workload(name=name, build=lambda: networks.ActorCritic(images=images), batch=batch, loss=loss)


def dqn(*, images: bool = True) -> Workload:
    """Return a batch of DQN with its target network."""
    scale = 255 if images else 1

    def build() -> nn.Module:
        if images:
            return WithTarget(nn.Sequential(networks.nature_cnn(), nn.Linear(512, networks.ATARI_ACTIONS)))
        return WithTarget(networks.mlp_layers((networks.MLP_OBS, 120, 84, networks.MLP_ACTIONS), nn.ReLU))

    def batch(size: int) -> tuple[Tensor, ...]:
        obs = _observations(size, images)
        return obs, torch.zeros_like(obs), torch.zeros(size, 1, dtype=torch.int64), torch.randn(size)

    def loss(module: WithTarget, obs: Tensor, next_obs: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        with torch.no_grad():
            target = rewards + 0.99 * module.target(next_obs.float() / scale).max(dim=1).values
        predicted = module.online(obs.float() / scale).gather(1, actions)[:, 0]
        return F.smooth_l1_loss(predicted, target)

    return Workload(name="dqn, images" if images else "dqn, mlp", build=build, batch=batch, loss=loss)


def sac() -> Workload:
    """Return a batch of soft actor-critic, actor and critics in one step."""
    widths = (networks.SAC_OBS, networks.SAC_OBS, networks.SAC_ACTIONS, 1)

    def loss(module: networks.SACNets, obs: Tensor, next_obs: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        with torch.no_grad():
            following = torch.cat([next_obs, module.sample(next_obs)], dim=1)
            target = rewards + 0.99 * torch.min(*(critic(following) for critic in module.targets))
        taken = torch.cat([obs, actions], dim=1)
        error: Tensor = torch.stack([F.mse_loss(critic(taken), target) for critic in module.critics]).sum()
        greedy = torch.cat([obs, module.sample(obs)], dim=1)
        value: Tensor = torch.min(*(critic(greedy) for critic in module.critics)).mean()
        return error - value

    return Workload(
        name="sac",
        build=networks.SACNets,
        batch=lambda size: tuple(torch.randn(size, width) for width in widths),
        loss=loss,
    )


def _observations(size: int, images: bool) -> Tensor:
    """Return observations of Atari as bytes, or of CartPole."""
    return torch.zeros(size, 4, 84, 84, dtype=torch.uint8) if images else torch.randn(size, networks.MLP_OBS)


# --- the table -------------------------------------------------------------------------------------------------------

PRESETS: Registry[Callable[..., Workload]] = Registry("preset")
_TABLE: dict[str, Callable[..., Workload]] = {
    "mlp": mlp, "gpt": gpt, "iqn-conv": iqn_conv, "resnet18": resnet18, "act": act,
    "sb3-ppo-mlp": ppo, "sb3-ppo-cnn": partial(ppo, images=True), "sb3-dqn-cnn": dqn, "sb3-sac": sac,
    "cleanrl-ppo": ppo, "cleanrl-ppo-atari": partial(ppo, images=True), "cleanrl-dqn": partial(dqn, images=False),
    "cleanrl-dqn-atari": dqn, "cleanrl-sac": sac, **LANGUAGE_MODELS,
}  # fmt: skip
for _name, _make in _TABLE.items():
    PRESETS.add(_name, _make)
