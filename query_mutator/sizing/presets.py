"""Models to size by name: our networks, MLP, GPT, ResNet18, ACT, those of SB3 and CleanRL, language models."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from query_mutator.errors import UsageError
from query_mutator.registry import Registry
from query_mutator.sizing import control, language
from query_mutator.sizing.act import Views, act
from query_mutator.sizing.memory import Workload
from query_mutator.sizing.networks import GPT, IQNConv, resnet18_trunk

OBS, ACTIONS = 32, 14  # of the trainer, as it comes

PRESETS: Registry[Callable[..., Workload]] = Registry("preset")


def preset(name: str, **sizes: Any) -> Workload:
    """Return the preset with the sizes given; UsageError for a size that it does not have."""
    make = PRESETS.get(name)
    taken = inspect.signature(make).parameters
    for size in sizes:
        if size not in taken:
            fitting = [other for other in PRESETS if size in inspect.signature(PRESETS.get(other)).parameters]
            raise UsageError(f"--{size} is not for {name}; it is for {', '.join(fitting)}")
    return make(**sizes)


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

    def loss(module: nn.Module, obs: Tensor) -> Tensor:
        logits, value = module(obs)
        surrogate: Tensor = -torch.log_softmax(logits, dim=-1).mean()
        error: Tensor = value.square().mean()
        return surrogate + error

    return Workload(
        name="policy",
        build=lambda: _drawn_elsewhere(lambda: Policy(OBS, ACTIONS)),
        batch=lambda size: (torch.randn(size, OBS),),
        loss=loss,
    )


def iqn() -> Workload:
    """Return a gradient step of `--algo iqn`: its own network and loss, with the target network beside it."""
    from query_mutator.iqn.loss import quantile_huber_loss
    from query_mutator.iqn.network import QuantileNetwork

    quantiles = 8

    def values(found: Tensor, actions: Tensor) -> Tensor:
        return found.gather(2, actions[:, None, None].expand(-1, quantiles, 1))[..., 0]

    def loss(module: control.Targeted, obs: Tensor, next_obs: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        taus = torch.rand(quantiles)
        with torch.no_grad():
            following = module.online(next_obs, taus).mean(1).argmax(1)
            target = returns[:, None] + values(module.target(next_obs, taus), following)
        predicted = values(module.online(obs, taus), actions)
        return quantile_huber_loss(predicted, target, taus, kappa=1.0).mean()

    def batch(size: int) -> tuple[Tensor, ...]:
        actions = torch.zeros(size, dtype=torch.int64)
        return torch.randn(size, OBS), torch.randn(size, OBS), actions, torch.randn(size)

    return Workload(
        name="iqn",
        build=lambda: control.Targeted(_drawn_elsewhere(lambda: QuantileNetwork(OBS, ACTIONS))),
        batch=batch,
        loss=loss,
    )


def _drawn_elsewhere(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a module whose own weights are drawn with a generator, which fake tensors cannot be, with fake weights."""
    with _disable_current_modes():
        made = make()
    for module in made.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(torch.zeros(parameter.shape)))
    return made


def act_views(*, cameras: int = 1, resolution: tuple[int, int] = (480, 640)) -> Workload:
    """Return the training of ACT with cameras of one resolution (height, width)."""
    return act(Views(cameras=cameras, height=resolution[0], width=resolution[1]))


_PLAIN: dict[str, Callable[..., Workload]] = {
    "policy": policy,
    "iqn": iqn,
    "mlp": mlp,
    "gpt": gpt,
    "iqn-conv": iqn_conv,
    "resnet18": resnet18,
    "act": act_views,
}
_CONTROL: dict[str, Callable[..., Workload]] = {
    "sb3-ppo-mlp": control.ppo, "sb3-ppo-cnn": partial(control.ppo, pictures=True),
    "sb3-dqn-cnn": control.dqn, "sb3-sac": control.sac, "cleanrl-ppo": control.ppo,
    "cleanrl-ppo-atari": partial(control.ppo, pictures=True), "cleanrl-dqn": partial(control.dqn, pictures=False),
    "cleanrl-dqn-atari": control.dqn, "cleanrl-sac": control.sac,
}  # fmt: skip
for _name, _make in {**_PLAIN, **_CONTROL, **language.by_name()}.items():
    PRESETS.add(_name, _make)
