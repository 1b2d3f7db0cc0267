"""Networks to size: a GPT, an IQN on images, ResNet18, and those of Stable-Baselines3 and CleanRL with their defaults.

mlp      Gymnasium's CartPole-v1: 4 numbers, 2 actions; separate actor and critic
cnn      Atari: 4 x 84 x 84 images, 6 actions; the convolutions of Mnih et al., 2015
sac      MuJoCo: 17 numbers, 6 continuous actions; two critics and their targets
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "ATARI_ACTIONS", "GPT", "MLP_ACTIONS", "MLP_OBS", "SAC_ACTIONS", "SAC_OBS", "ActorCritic", "GPTShape", "IQNConv",
    "SACNets", "WithTarget", "mlp_layers", "nature_cnn", "resnet18_trunk",
]  # fmt: skip

MLP_OBS, MLP_ACTIONS = 4, 2
ATARI_ACTIONS = 6
SAC_OBS, SAC_ACTIONS = 17, 6

Norm = Callable[[int], nn.Module]


def mlp_layers(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return linear layers with an activation after each but the last."""
    made = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*made[:-1])


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """The sizes of a GPT."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    vocabulary: int = 256
    length: int = 256


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, width]."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width)
        x = x + self.out(seen)
        more: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + more


class GPT(nn.Module):
    """A decoder-only language model."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(shape.vocabulary, shape.width), nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary]."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class IQNConv(nn.Module):
    """An implicit quantile network on images and floats: convolutions, cosine embedding, dueling heads."""

    def __init__(self, *, actions: int = 12, floats: int = 64, quantiles: int = 8) -> None:
        super().__init__()
        widths = (1, 16, 32, 64, 32)
        self.image = nn.Sequential(
            *(layer for pair in pairwise(widths) for layer in (nn.Conv2d(*pair, 4, 2, 1), nn.LeakyReLU()))
        )
        self.floats, self.cosine = nn.Linear(floats, 128), nn.Linear(64, 128 + 32 * 16)
        self.value = nn.Sequential(nn.Linear(128 + 32 * 16, 256), nn.LeakyReLU(), nn.Linear(256, 1))
        self.advantage = nn.Sequential(nn.Linear(128 + 32 * 16, 256), nn.LeakyReLU(), nn.Linear(256, actions))
        self.quantiles = quantiles

    def forward(self, image: Tensor, floats: Tensor) -> Tensor:
        """Return quantiles [B, quantiles, actions]."""
        seen = torch.cat([self.image(image).flatten(1), F.leaky_relu(self.floats(floats))], dim=1)
        tau = torch.rand(len(image), self.quantiles, 1)
        waves = torch.cos(tau * torch.arange(1, 65) * torch.pi)
        x = seen[:, None] * F.leaky_relu(self.cosine(waves))
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(dim=-1, keepdim=True)  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """A basic block of ResNet18."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after)
        self.conv_2, self.norm_2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), norm(after)
        same = stride == 1 and before == after
        fitting = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after)) if not same else None
        self.skip = fitting or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, H/stride, W/stride]."""
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        return F.relu(self.norm_2(self.conv_2(y)) + self.skip(x), inplace=True)


def resnet18_trunk(norm: Norm = nn.BatchNorm2d) -> nn.Sequential:
    """Return ResNet18 up to its last feature map [B, 512, H/32, W/32]."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    layers: list[nn.Module] = [*stem]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(before, width, stride, norm), ResidualBlock(width, width, 1, norm)]
        before = width
    return nn.Sequential(*layers)


def nature_cnn() -> nn.Sequential:
    """Return convolutions that map images [B, 4, 84, 84] to 512 features."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
    )  # fmt: skip


class ActorCritic(nn.Module):
    """A policy and a value; on images they share their features."""

    def __init__(self, *, images: bool) -> None:
        super().__init__()
        self.images = images
        if images:
            self.features: nn.Module = nature_cnn()
            self.actor: nn.Module = nn.Linear(512, ATARI_ACTIONS)
            self.critic: nn.Module = nn.Linear(512, 1)
        else:
            self.features = nn.Identity()
            self.actor, self.critic = (mlp_layers((MLP_OBS, 64, 64, out), nn.Tanh) for out in (MLP_ACTIONS, 1))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, A] and values [B]; images are bytes."""
        seen = self.features(obs.float() / 255 if self.images else obs)
        return self.actor(seen), self.critic(seen)[:, 0]


class WithTarget(nn.Module):
    """A network that learns, and its target network that does not."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)


class SACNets(nn.Module):
    """The actor of soft actor-critic, two critics, and their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = mlp_layers((SAC_OBS, 256, 256, 2 * SAC_ACTIONS), nn.ReLU)
        self.critics, self.targets = (
            nn.ModuleList(mlp_layers((SAC_OBS + SAC_ACTIONS, 256, 256, 1), nn.ReLU) for _ in range(2)) for _ in range(2)
        )
        self.targets.requires_grad_(False)

    def sample(self, obs: Tensor) -> Tensor:
        """Return actions drawn by the actor [B, 6]."""
        mean, log_deviation = self.actor(obs).chunk(2, dim=1)
        return torch.tanh(mean + log_deviation.clamp(-20, 2).exp() * torch.randn_like(mean))
