"""The shapes of ACT, the action chunking transformer (Zhao et al., 2023), as LeRobot trains it by default.

B samples, C cameras, S state, A actions, T actions of a chunk, H W of an image, width 512

images -> ResNet18, frozen norms -> [C H/32 W/32, B, 512]  -+
state -> [1, B, 512]                                        +-> 4 layers -> memory -> 1 layer -> [T, B, A]
state, action chunk -> 4 layers -> latent -> [1, B, 512]   -+
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from query_mutator.lab.sizing.networks import resnet18_trunk
from query_mutator.lab.sizing.workload import Workload

__all__ = ["ACT", "act"]

WIDTH, HEADS, FEED_FORWARD, LATENT = 512, 8, 3200, 32
STATE, ACTIONS, CHUNK = 14, 14, 100  # of Aloha, two arms of seven joints
KL_WEIGHT, DROPOUT = 10.0, 0.1


class FrozenNorm(nn.Module):
    """Batch normalization whose statistics and weights are not learned."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "mean", "variance"):
            self.register_buffer(name, torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, width, H, W]."""
        scale = self.weight * (self.variance + 1e-5).rsqrt()
        shift = self.bias - self.mean * scale
        return x * scale[None, :, None, None] + shift[None, :, None, None]


class FeedForward(nn.Module):
    """Two linear layers with dropout, a residual connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEED_FORWARD), nn.Linear(FEED_FORWARD, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return [L, B, 512]."""
        more = self.down(self.drop(F.relu(self.up(x))))
        return self.norm(x + self.drop(more))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention that computes its weights, a residual connection and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=DROPOUT)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, *, padded: Tensor | None = None) -> Tensor:
        """Return [L, B, 512]; positions that are `padded` [B, K] are masked."""
        attended = self.attention(query, key, value, key_padding_mask=padded)[0]
        return self.norm(x + self.drop(attended))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Four layers; positions are added to queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention() for _ in range(4))
        self.feed = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor, *, padded: Tensor | None = None) -> Tensor:
        """Return [L, B, 512]."""
        for attention, feed in zip(self.attention, self.feed, strict=True):
            at = x + positions
            x = feed(attention(x, at, at, x, padded=padded))
        return x


class Decoder(nn.Module):
    """One layer: the actions of the chunk attend to each other, then to the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.attention, self.feed = Attention(), Attention(), FeedForward()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor, memory_positions: Tensor) -> Tensor:
        """Return [T, B, 512]."""
        at = x + positions
        x = self.self_attention(x, at, at, x)
        x = self.attention(x, x + positions, memory + memory_positions, memory)
        return self.norm(self.feed(x))  # type: ignore[no-any-return]


class ACT(nn.Module):
    """Predict a chunk of actions from images and state, with a variational encoder of the demonstrated actions."""

    latent_positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.backbone = resnet18_trunk(FrozenNorm)
        self.image = nn.Conv2d(WIDTH, WIDTH, 1)
        self.state, self.latent = nn.Linear(STATE, WIDTH), nn.Linear(LATENT, WIDTH)
        self.variational, self.encoder, self.decoder = Encoder(), Encoder(), Decoder()
        self.demo_class = nn.Embedding(1, WIDTH)
        self.demo_state, self.demo_action = nn.Linear(STATE, WIDTH), nn.Linear(ACTIONS, WIDTH)
        self.to_latent = nn.Linear(WIDTH, 2 * LATENT)
        self.register_buffer("latent_positions", torch.zeros(CHUNK + 2, 1, WIDTH))
        self.positions, self.queries = nn.Embedding(2, WIDTH), nn.Embedding(CHUNK, WIDTH)
        self.head = nn.Linear(WIDTH, ACTIONS)

    def forward(self, images: list[Tensor], state: Tensor, demo: Tensor, padded: Tensor) -> tuple[Tensor, ...]:
        """Return actions [B, T, A], mean [B, 32] and log variance [B, 32] of the latent."""
        mean, log_variance = self._latent(state, demo, padded)
        latent = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        tokens, positions = [self.latent(latent), self.state(state)], [*self.positions.weight[:, None]]
        for image in images:
            features = self.backbone(image)
            tokens += list(self.image(features).flatten(2).permute(2, 0, 1))
            positions += list(_sines(features))
        memory_positions = torch.stack(positions)
        memory = self.encoder(torch.stack(tokens), memory_positions)
        start = torch.zeros(CHUNK, len(state), WIDTH)
        decoded = self.decoder(start, memory, self.queries.weight[:, None], memory_positions)
        return self.head(decoded.transpose(0, 1)), mean, log_variance

    def _latent(self, state: Tensor, demo: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        first = self.demo_class.weight[None].expand(len(state), -1, -1)
        tokens = torch.cat([first, self.demo_state(state)[:, None], self.demo_action(demo)], dim=1)
        masked = torch.cat([torch.zeros(len(state), 2, dtype=torch.bool), padded], dim=1)
        encoded = self.variational(tokens.permute(1, 0, 2), self.latent_positions, padded=masked)
        mean, log_variance = self.to_latent(encoded[0]).chunk(2, dim=-1)
        return mean, log_variance


def act(*, cameras: int = 1, resolution: tuple[int, int] = (480, 640)) -> Workload:
    """Return the training of ACT on images of some cameras, all of one resolution (height, width)."""
    height, width = resolution

    def batch(size: int) -> tuple[Tensor, ...]:
        images = [torch.randn(size, 3, height, width) for _ in range(cameras)]
        demo = torch.randn(size, CHUNK, ACTIONS)
        return (*images, torch.randn(size, STATE), demo, torch.zeros(size, CHUNK, dtype=torch.bool))

    def loss(module: nn.Module, *inputs: Tensor) -> Tensor:
        *images, state, demo, padded = inputs
        actions, mean, log_variance = module(images, state, demo, padded)
        error = (F.l1_loss(demo, actions, reduction="none") * ~padded[:, :, None]).mean()
        divergence = (-0.5 * (1 + log_variance - mean.square() - log_variance.exp())).sum(dim=-1).mean()
        return error + KL_WEIGHT * divergence  # type: ignore[no-any-return]

    return Workload(name=f"act, {cameras} x {height}x{width}", build=ACT, batch=batch, loss=loss)


def _sines(features: Tensor) -> Tensor:
    """Return the sinusoidal positions [H W, 1, 512] of a feature map [B, 512, H, W]."""
    height, width = features.shape[2:]
    rates = 10000 ** (torch.arange(WIDTH // 4) / (WIDTH // 4))
    rows, columns = (torch.arange(1, size + 1)[:, None] / size * 2 * torch.pi / rates for size in (height, width))
    waves = [torch.stack([part.sin(), part.cos()], dim=-1).flatten(1) for part in (rows, columns)]  # [H, 256], [W, 256]
    whole = torch.cat([waves[0][:, None].expand(-1, width, -1), waves[1][None].expand(height, -1, -1)], dim=-1)
    return whole.reshape(height * width, 1, WIDTH)
