"""Settings of PPO in one frozen record; subclass it to add flags, and change its defaults with `defaults`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from ppo.fields import Ge, Gt, Le, Matches, check_values

MOST_TRANSITIONS = 10**8

Share = Annotated[float, Ge(0), Le(1)]
Weight = Annotated[float, Ge(0), Le(1e6)]
Device = Annotated[str, Matches(r"[a-z][a-z0-9]{1,12}(:\d{1,3})?", "is not a device of torch; try cpu or cuda:0")]


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Device, seed and determinism; an invalid value is a ValueError that says what is valid."""

    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 1
    """Seed of the initial weights, the shuffling and, with the environment's number, each environment's actions."""
    device: Device = "cpu"
    """Torch device of updates and of the encoder; acting is always on the CPU."""
    deterministic: bool = False
    """Compute row by row, so that results do not depend on how environments are batched."""

    def __post_init__(self) -> None:
        check_values(type(self), vars(self))
        if after := getattr(super(), "__post_init__", None):  # of a program's own settings, next to these
            after()


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(ComputeConfig):
    """Settings shared by all learners."""

    num_env_steps: Annotated[int, Ge(1), Le(10**12), Parameter(alias=("--total-timesteps", "--total-steps"))] = 10_000
    """Environment steps to train for; on-policy, rounded up to whole rollouts."""
    num_processes: Annotated[int, Ge(1), Le(10**5), Parameter(alias="--num-envs")] = 16
    """Parallel environments; each has its own random stream."""
    lr: Annotated[float, Gt(0), Le(10), Parameter(alias="--learning-rate")] = 3e-4
    """Adam's step size at the start."""
    use_linear_lr_decay: Annotated[bool, Parameter(alias="--anneal-lr")] = True
    """Lower the step size linearly towards 0 over the run."""
    gamma: Share = 0.99
    """Discount factor per step."""
    max_grad_norm: Annotated[float, Gt(0), Le(1e12)] = 0.5
    """Maximum global gradient norm; larger gradients are clipped."""
    hidden_sizes: tuple[Annotated[int, Ge(1), Le(16_384)], ...] = (64, 64)
    """Widths of the hidden layers."""

    @property
    def total_steps(self) -> int:
        """Return the environment steps of the run."""
        return self.num_env_steps


@dataclass(frozen=True, kw_only=True)
class PPOConfig(LearnerConfig):
    """Settings of PPO."""

    num_steps: Annotated[int, Ge(1), Le(10**5)] = 32
    """Steps of each environment in a rollout."""
    ppo_epoch: Annotated[int, Ge(1), Le(10**4), Parameter(alias="--update-epochs")] = 4
    """Passes over each rollout."""
    num_mini_batch: Annotated[int, Ge(1), Le(10**8), Parameter(alias="--num-minibatches")] = 4
    """Minibatches a pass is split into; must divide num_processes * num_steps."""
    gae_lambda: Share = 0.95
    """Lambda of generalized advantage estimation: 0 relies on the critic, 1 on the rewards."""
    clip_param: Annotated[float, Gt(0), Le(1e6), Parameter(alias="--clip-coef")] = 0.2
    """Clip range of the probability ratio, and with --clip-vloss of the value."""
    clip_vloss: bool = True
    """Clip the value loss too."""
    norm_adv: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 in each minibatch."""
    entropy_coef: Annotated[Weight, Parameter(alias="--ent-coef")] = 0.01
    """Weight of the entropy bonus."""
    value_loss_coef: Annotated[Weight, Parameter(alias="--vf-coef")] = 0.5
    """Weight of the value loss (half the squared error)."""
    target_kl: Annotated[float, Gt(0), Le(1e6)] | None = None
    """Stop an update when the approximate KL divergence of a pass exceeds this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.rollout_steps
        if size > MOST_TRANSITIONS:
            raise ValueError(f"num_processes*num_steps={size} transitions of a rollout must be at most 10^8")
        if size % self.num_mini_batch:
            near = {max(d for d in _divisors(size) if d < self.num_mini_batch)}
            near |= set(sorted(d for d in _divisors(size) if d > self.num_mini_batch)[:1])
            advice = " or ".join(str(d) for d in sorted(near))
            raise ValueError(
                f"num_mini_batch={self.num_mini_batch} must divide num_processes*num_steps={size}; try {advice}"
            )

    @property
    def rollout_steps(self) -> int:
        """Return the environment steps between two updates."""
        return self.num_processes * self.num_steps

    @property
    def num_updates(self) -> int:
        """Return the rollouts of the run, rounded up to at least one."""
        return -(-self.num_env_steps // self.rollout_steps)

    @property
    def total_steps(self) -> int:
        """Return the environment steps of the run: a whole number of rollouts."""
        return self.num_updates * self.rollout_steps


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
