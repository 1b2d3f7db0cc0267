"""Models to size by name: the trainer's policy network, an MLP, a GPT, an IQN on pictures, ResNet18."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from query_mutator.registry import Registry
from query_mutator.sizing.memory import Workload

PRESETS: Registry[Callable[[], Workload]] = Registry("preset")


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

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary]."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class IQNConv(nn.Module):
    """An implicit quantile network on pictures and floats: convolutions, cosine embedding, dueling heads."""

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

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        norm = nn.BatchNorm2d
        self.conv_1, self.norm_1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), norm(after)
        self.conv_2, self.norm_2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), norm(after)
        same = stride == 1 and before == after
        fitting = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after)) if not same else None
        self.skip = fitting or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, after, H/stride, W/stride]."""
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        return F.relu(self.norm_2(self.conv_2(y)) + self.skip(x), inplace=True)


def resnet18_trunk() -> nn.Sequential:
    """Return ResNet18 up to its last feature map [B, 512, H/32, W/32]."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    layers: list[nn.Module] = [*stem]
    before = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [ResidualBlock(before, width, stride), ResidualBlock(width, width, 1)]
        before = width
    return nn.Sequential(*layers)


def _classes(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _supervised(module: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return _classes(module(x), target)


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """The sizes of a GPT."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    vocabulary: int = 256
    length: int = 256


def gpt(shape: GPTShape = GPTShape()) -> Workload:
    """Return the training of a small GPT on sequences of 256 tokens."""
    s = shape

    def batch(size: int) -> tuple[Tensor, ...]:
        tokens = torch.randint(0, s.vocabulary, (size, s.length))
        return tokens, torch.randint(0, s.vocabulary, (size, s.length))

    return Workload(
        name="gpt",
        build=lambda: GPT(layers=s.layers, width=s.width, heads=s.heads, vocabulary=s.vocabulary, length=s.length),
        batch=batch,
        loss=_supervised,
    )


def mlp() -> Workload:
    """Return the training of an MLP 4096-2048-2048-2048-2048-10."""
    widths = (4096, 2048, 2048, 2048, 2048)

    def build() -> nn.Module:
        layers = (layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU()))
        return nn.Sequential(*layers, nn.Linear(widths[-1], 10))

    return Workload(
        name="mlp",
        build=build,
        batch=lambda size: (torch.randn(size, 4096), torch.randint(0, 10, (size,))),
        loss=_supervised,
    )


def iqn_conv() -> Workload:
    """Return the training of an IQN on 64 x 64 pictures and 64 floats."""

    def loss(module: nn.Module, image: Tensor, floats: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(module(image, floats).mean(dim=1), target)

    return Workload(
        name="iqn-conv",
        build=IQNConv,
        batch=lambda size: (torch.randn(size, 1, 64, 64), torch.randn(size, 64), torch.randn(size, 12)),
        loss=loss,
    )


def resnet18() -> Workload:
    """Return the training of ResNet18 on 224 x 224 pictures, 1000 classes."""
    return Workload(
        name="resnet18",
        build=lambda: nn.Sequential(resnet18_trunk(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)),
        batch=lambda size: (torch.randn(size, 3, 224, 224), torch.randint(0, 1000, (size,))),
        loss=_supervised,
    )


def policy() -> Workload:
    """Return an update of the trainer's own policy: minibatches of PPO on its default observation."""
    from ppo.policy import Policy

    def build() -> nn.Module:
        with _disable_current_modes():  # its layers are drawn on another device and moved, which fake tensors cannot be
            made: nn.Module = Policy(32, 14)
        for module in made.modules():
            for name, parameter in module.named_parameters(recurse=False):
                module.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))
        return made

    def loss(module: nn.Module, obs: Tensor) -> Tensor:
        logits, value = module(obs)
        surrogate: Tensor = -torch.log_softmax(logits, dim=-1).mean()
        error: Tensor = value.square().mean()
        return surrogate + error

    return Workload(name="policy", build=build, batch=lambda size: (torch.randn(size, 32),), loss=loss)


for _name, _make in {"policy": policy, "mlp": mlp, "gpt": gpt, "iqn-conv": iqn_conv, "resnet18": resnet18}.items():
    PRESETS.add(_name, _make)
