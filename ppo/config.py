"""Settings of PPO in one frozen record; subclass it to add flags or to change defaults (tyro parses them)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

#: names of settings, which values are valid, and that in words; what is above the largest is a slip
_LIMITS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("num_processes num_steps ppo_epoch num_mini_batch", lambda value: value >= 1, "at least 1"),
    ("num_processes num_steps ppo_epoch", lambda value: value <= 100_000, "at most 100000"),
    ("num_env_steps", lambda value: 1 <= value <= 10**12, "at least 1 and at most 10^12"),
    ("lr clip_param max_grad_norm", lambda value: value > 0, "above 0"),
    ("lr", lambda value: value <= 10, "at most 10"),
    ("clip_param max_grad_norm", lambda value: value <= 1e12, "at most 1e12"),
    ("target_kl", lambda value: 0 < value <= 1e6, "above 0 and at most 1e6; leave it out for no limit"),
    ("gamma gae_lambda", lambda value: 0 <= value <= 1, "between 0 and 1; try 0.99"),
    ("entropy_coef value_loss_coef seed", lambda value: value >= 0, "at least 0"),
    ("entropy_coef value_loss_coef", lambda value: value <= 1e6, "at most 1e6"),
    ("seed", lambda value: value < 2**32, "below 2^32"),
)
MOST_WIDE, MOST_TRANSITIONS = 16_384, 10**8


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO; an invalid value is a ValueError that says what is valid."""

    num_env_steps: Annotated[int, arg(aliases=["--total-timesteps"])] = 10_000
    """Environment steps to train for; rounded up to whole rollouts."""
    num_processes: Annotated[int, arg(aliases=["--num-envs"])] = 16
    """Parallel environments."""
    num_steps: int = 32
    """Steps of each environment in a rollout."""
    ppo_epoch: Annotated[int, arg(aliases=["--update-epochs"])] = 4
    """Passes over each rollout."""
    num_mini_batch: Annotated[int, arg(aliases=["--num-minibatches"])] = 4
    """Minibatches a pass is split into; must divide num_processes * num_steps."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 3e-4
    """Adam's step size at the start."""
    use_linear_lr_decay: Annotated[bool, arg(aliases=["--anneal-lr"])] = True
    """Lower the step size linearly towards 0 over the run."""
    gamma: float = 0.99
    """Discount of a reward one step later."""
    gae_lambda: float = 0.95
    """Lambda of generalized advantage estimation: 0 relies on the critic, 1 on the rewards."""
    clip_param: Annotated[float, arg(aliases=["--clip-coef"])] = 0.2
    """Clip range of the probability ratio, and with --clip-vloss of the value."""
    clip_vloss: bool = True
    """Clip the change of the value as well."""
    norm_adv: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 in each minibatch."""
    entropy_coef: Annotated[float, arg(aliases=["--ent-coef"])] = 0.01
    """Weight of the entropy bonus."""
    value_loss_coef: Annotated[float, arg(aliases=["--vf-coef"])] = 0.5
    """Weight of the value loss (half the squared error)."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient of all parameters; a larger one is clipped."""
    target_kl: float | None = None
    """Stop an update when the approximate KL divergence of a pass exceeds this."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the tanh layers, in the actor and in the critic."""
    seed: int = 1
    """Seed of the initial weights, the shuffling and, with the environment's number, each environment's actions."""
    device: str = "cpu"
    """Torch device of updates; acting is always on the CPU."""
    deterministic: bool = False
    """Act row by row, so that results do not depend on how environments are batched."""

    def __post_init__(self) -> None:
        for names, is_valid, wanted in _LIMITS:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not is_valid(value):
                    raise ValueError(f"{name}={value} must be {wanted}")
        if not self.hidden_sizes or not 1 <= min(self.hidden_sizes) <= max(self.hidden_sizes) <= MOST_WIDE:
            raise ValueError(f"hidden_sizes={self.hidden_sizes} needs widths from 1 to {MOST_WIDE}; try 64 64")
        self._check_minibatches()

    def _check_minibatches(self) -> None:
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
