"""Networks of Stable-Baselines3 and CleanRL to size, by the shapes of their defaults.

mlp      Gymnasium's CartPole-v1: 4 numbers, 2 actions; actor and critic apart
cnn      Atari: 4 x 84 x 84 pictures, 6 actions; the convolutions of Mnih et al., 2015
sac      MuJoCo: 17 numbers, 6 actions in a continuum; two critics and their targets
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from query_mutator.sizing.memory import Workload

OBS, ACTIONS = 4, 2
ATARI_ACTIONS = 6
SAC_OBS, SAC_ACTIONS = 17, 6


def layers(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers with an activation after each but the last."""
    made = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*made[:-1])


def nature_cnn() -> nn.Sequential:
    """Return the convolutions, and 512 features of pictures [B, 4, 84, 84]."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
    )  # fmt: skip


class ActorCritic(nn.Module):
    """A policy and a value, on features of their own or shared."""

    def __init__(self, *, pictures: bool) -> None:
        super().__init__()
        self.pictures = pictures
        if pictures:
            self.features: nn.Module = nature_cnn()
            self.actor: nn.Module = nn.Linear(512, ATARI_ACTIONS)
            self.critic: nn.Module = nn.Linear(512, 1)
        else:
            self.features = nn.Identity()
            self.actor, self.critic = layers((OBS, 64, 64, ACTIONS), nn.Tanh), layers((OBS, 64, 64, 1), nn.Tanh)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, A] and values [B]; pictures come as bytes."""
        seen = self.features(obs.float() / 255 if self.pictures else obs)
        return self.actor(seen), self.critic(seen)[:, 0]


class Targeted(nn.Module):
    """Networks that learn beside copies that do not."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)


class SACNets(nn.Module):
    """An actor and two critics of soft actor-critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = layers((SAC_OBS, 256, 256, 2 * SAC_ACTIONS), nn.ReLU)
        self.critics = _critics()
        self.targets = _critics().requires_grad_(False)


def ppo(*, pictures: bool = False) -> Workload:
    """Return a minibatch of PPO."""

    def batch(size: int) -> tuple[Tensor, ...]:
        obs = torch.zeros(size, 4, 84, 84, dtype=torch.uint8) if pictures else torch.randn(size, OBS)
        actions = torch.zeros(size, dtype=torch.int64)
        return obs, actions, torch.randn(size), torch.randn(size), torch.randn(size)

    def loss(
        module: nn.Module, obs: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, returns: Tensor
    ) -> Tensor:
        logits, values = module(obs)
        log_chances = F.log_softmax(logits, dim=-1)
        ratio = (log_chances.gather(1, actions[:, None])[:, 0] - old).exp()
        surrogate: Tensor = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        error: Tensor = F.mse_loss(values, returns)
        entropy: Tensor = -(log_chances.exp() * log_chances).sum(dim=-1).mean()
        return surrogate + 0.5 * error - 0.01 * entropy

    return Workload(
        name="ppo, pictures" if pictures else "ppo, mlp",
        build=lambda: ActorCritic(pictures=pictures),
        batch=batch,
        loss=loss,
    )


def dqn(*, pictures: bool = True) -> Workload:
    """Return a batch of DQN with its target network."""

    def build() -> nn.Module:
        if pictures:
            return Targeted(nn.Sequential(nature_cnn(), nn.Linear(512, ATARI_ACTIONS)))
        return Targeted(layers((OBS, 120, 84, ACTIONS), nn.ReLU))

    def batch(size: int) -> tuple[Tensor, ...]:
        one = torch.zeros(size, 4, 84, 84, dtype=torch.uint8) if pictures else torch.randn(size, OBS)
        return one, torch.zeros_like(one), torch.zeros(size, 1, dtype=torch.int64), torch.randn(size)

    def loss(module: Targeted, obs: Tensor, next_obs: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        scale = 255 if pictures else 1
        with torch.no_grad():
            wanted = rewards + 0.99 * module.target(next_obs.float() / scale).max(dim=1).values
        found = module.online(obs.float() / scale).gather(1, actions)[:, 0]
        return F.smooth_l1_loss(found, wanted)

    return Workload(name="dqn, pictures" if pictures else "dqn, mlp", build=build, batch=batch, loss=loss)


def sac() -> Workload:
    """Return a batch of soft actor-critic, actor and critics in one step."""

    def batch(size: int) -> tuple[Tensor, ...]:
        return (
            torch.randn(size, SAC_OBS), torch.randn(size, SAC_OBS), torch.randn(size, SAC_ACTIONS),
            torch.randn(size, 1),
        )  # fmt: skip

    def loss(module: SACNets, obs: Tensor, next_obs: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
        with torch.no_grad():
            following = torch.cat([next_obs, _drawn(module.actor(next_obs))], dim=1)
            wanted = rewards + 0.99 * torch.min(*(critic(following) for critic in module.targets))
        taken = torch.cat([obs, actions], dim=1)
        error: Tensor = torch.stack([F.mse_loss(critic(taken), wanted) for critic in module.critics]).sum()
        would = torch.cat([obs, _drawn(module.actor(obs))], dim=1)
        worth: Tensor = torch.min(*(critic(would) for critic in module.critics)).mean()
        return error - worth

    return Workload(name="sac", build=SACNets, batch=batch, loss=loss)


def _critics() -> nn.ModuleList:
    return nn.ModuleList(layers((SAC_OBS + SAC_ACTIONS, 256, 256, 1), nn.ReLU) for _ in range(2))


def _drawn(found: Tensor) -> Tensor:
    mean, log_deviation = found.chunk(2, dim=1)
    return torch.tanh(mean + log_deviation.clamp(-20, 2).exp() * torch.randn_like(mean))
