"""Networks to size: a GPT, an IQN on pictures, a residual network."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]


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
