"""The shapes of ACT, the action chunking transformer (Zhao et al., 2023), as LeRobot trains it by default.

B samples, C cameras, S state, A actions, T actions of a chunk, H W of a picture, 512 wide

pictures -> ResNet18, its norms frozen -> [C H/32 W/32, B, 512]  -+
state -> [1, B, 512]                                             -+-> 4 layers -> memory -> 1 layer -> [T, B, A]
state, chunk of actions -> 4 layers -> latent of 32 -> [1, B, 512] -+
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from query_mutator.sizing.memory import Workload
from query_mutator.sizing.networks import resnet18_trunk

WIDTH, HEADS, FEED_FORWARD, LATENT = 512, 8, 3200, 32
KL_WEIGHT, DROPOUT = 10.0, 0.1


@dataclass(frozen=True, kw_only=True)
class Views:
    """What a robot sees, and the sizes of its state and actions."""

    cameras: int = 1
    height: int = 480
    width: int = 640
    state: int = 14
    actions: int = 14
    chunk: int = 100


class FrozenNorm(nn.Module):
    """Batch normalisation whose statistics and weights are not learned."""

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
    """Two layers with dropout, added to what came in and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEED_FORWARD), nn.Linear(FEED_FORWARD, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return [L, B, 512]."""
        more = self.down(self.drop(F.relu(self.up(x))))
        return self.norm(x + self.drop(more))  # type: ignore[no-any-return]


class Attend(nn.Module):
    """Attention with its weights computed, added to what came in and normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=DROPOUT)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, *, padded: Tensor | None = None) -> Tensor:
        """Return [L, B, 512]; places that are `padded` [B, K] are not looked at."""
        seen = self.attention(query, key, value, key_padding_mask=padded)[0]
        return self.norm(x + self.drop(seen))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Four layers; places are added to queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.ModuleList(Attend() for _ in range(4))
        self.feed = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: Tensor, place: Tensor, *, padded: Tensor | None = None) -> Tensor:
        """Return [L, B, 512]."""
        for attend, feed in zip(self.attend, self.feed, strict=True):
            at = x + place
            x = feed(attend(x, at, at, x, padded=padded))
        return x


class Decoder(nn.Module):
    """One layer: a place for each action of the chunk looks at the others, then at what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attend, self.attend, self.feed = Attend(), Attend(), FeedForward()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor, place: Tensor, memory_place: Tensor) -> Tensor:
        """Return [T, B, 512]."""
        at = x + place
        x = self.self_attend(x, at, at, x)
        x = self.attend(x, x + place, memory + memory_place, memory)
        return self.norm(self.feed(x))  # type: ignore[no-any-return]


class ACT(nn.Module):
    """Actions of a chunk from pictures and state, with a variational encoder of the actions shown."""

    variational_place: Tensor

    def __init__(self, views: Views) -> None:
        super().__init__()
        self.views = views
        self.backbone = resnet18_trunk(FrozenNorm)
        self.picture = nn.Conv2d(WIDTH, WIDTH, 1)
        self.state, self.latent = nn.Linear(views.state, WIDTH), nn.Linear(LATENT, WIDTH)
        self.variational, self.encoder, self.decoder = Encoder(), Encoder(), Decoder()
        self.shown_class = nn.Embedding(1, WIDTH)
        self.shown_state, self.shown_action = nn.Linear(views.state, WIDTH), nn.Linear(views.actions, WIDTH)
        self.to_latent = nn.Linear(WIDTH, 2 * LATENT)
        self.register_buffer("variational_place", torch.zeros(views.chunk + 2, 1, WIDTH))
        self.places, self.queries = nn.Embedding(2, WIDTH), nn.Embedding(views.chunk, WIDTH)
        self.head = nn.Linear(WIDTH, views.actions)

    def forward(self, pictures: list[Tensor], state: Tensor, shown: Tensor, padded: Tensor) -> tuple[Tensor, ...]:
        """Return actions [B, T, A], mean [B, 32] and log variance [B, 32] of the latent."""
        mean, log_variance = self._latent(state, shown, padded)
        latent = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        tokens, places = [self.latent(latent), self.state(state)], [*self.places.weight[:, None]]
        for one in pictures:
            features = self.backbone(one)
            tokens += list(self.picture(features).flatten(2).permute(2, 0, 1))
            places += list(_sines(features))
        memory_place = torch.stack(places)
        memory = self.encoder(torch.stack(tokens), memory_place)
        start = torch.zeros(self.views.chunk, len(state), WIDTH)
        made = self.decoder(start, memory, self.queries.weight[:, None], memory_place)
        return self.head(made.transpose(0, 1)), mean, log_variance

    def _latent(self, state: Tensor, shown: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        first = self.shown_class.weight[None].expand(len(state), -1, -1)
        tokens = torch.cat([first, self.shown_state(state)[:, None], self.shown_action(shown)], dim=1)
        hidden = torch.cat([torch.zeros(len(state), 2, dtype=torch.bool), padded], dim=1)
        seen = self.variational(tokens.permute(1, 0, 2), self.variational_place, padded=hidden)
        mean, log_variance = self.to_latent(seen[0]).chunk(2, dim=-1)
        return mean, log_variance


def act(views: Views = Views()) -> Workload:
    """Return the training of ACT on batches of its cameras' pictures."""

    def batch(size: int) -> tuple[Tensor, ...]:
        pictures = [torch.randn(size, 3, views.height, views.width) for _ in range(views.cameras)]
        chunk = torch.randn(size, views.chunk, views.actions)
        return (*pictures, torch.randn(size, views.state), chunk, torch.zeros(size, views.chunk, dtype=torch.bool))

    def loss(module: nn.Module, *inputs: Tensor) -> Tensor:
        *pictures, state, shown, padded = inputs
        made, mean, log_variance = module(pictures, state, shown, padded)
        error = (F.l1_loss(shown, made, reduction="none") * ~padded[:, :, None]).mean()
        divergence = (-0.5 * (1 + log_variance - mean.square() - log_variance.exp())).sum(dim=-1).mean()
        return error + KL_WEIGHT * divergence  # type: ignore[no-any-return]

    name = f"act, {views.cameras} x {views.height}x{views.width}"
    return Workload(name=name, build=lambda: ACT(views), batch=batch, loss=loss)


def _sines(features: Tensor) -> Tensor:
    """Return the places [H W, 1, 512] of a feature map [B, 512, H, W]."""
    height, width = features.shape[2:]
    rates = 10000 ** (torch.arange(WIDTH // 4) / (WIDTH // 4))
    rows, columns = (torch.arange(1, size + 1)[:, None] / size * 2 * torch.pi / rates for size in (height, width))
    waves = [torch.stack([part.sin(), part.cos()], dim=-1).flatten(1) for part in (rows, columns)]  # [H, 256], [W, 256]
    whole = torch.cat([waves[0][:, None].expand(-1, width, -1), waves[1][None].expand(height, -1, -1)], dim=-1)
    return whole.reshape(height * width, 1, WIDTH)
