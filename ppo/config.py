"""Every knob of PPO in one frozen record; subclass it to add flags or change defaults (tyro makes the command line)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Hyper-parameters of PPO; a value that cannot work is a ValueError that says what would."""

    num_env_steps: Annotated[int, arg(aliases=["--total-timesteps"])] = 10_000
    """Environment steps to train for; rounded up to whole rollouts."""
    num_processes: Annotated[int, arg(aliases=["--num-envs"])] = 16
    """Environments stepped side by side."""
    num_steps: int = 32
    """Steps each environment takes between two updates."""
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
    """Generalised advantage estimation: 0 trusts the critic, 1 the rewards alone."""
    clip_param: Annotated[float, arg(aliases=["--clip-coef"])] = 0.2
    """How far the probability ratio (and with clip_vloss the value) may move before it is clipped."""
    clip_vloss: bool = True
    """Clip the value's change as well."""
    norm_adv: bool = True
    """Normalise advantages to mean 0, deviation 1 in each minibatch."""
    entropy_coef: Annotated[float, arg(aliases=["--ent-coef"])] = 0.01
    """Weight of the entropy bonus."""
    value_loss_coef: Annotated[float, arg(aliases=["--vf-coef"])] = 0.5
    """Weight of the value loss (half the squared error)."""
    max_grad_norm: float = 0.5
    """Norm the gradient of all parameters together is clipped to."""
    target_kl: float | None = None
    """Stop an update's passes once the approximate KL divergence of one exceeds this."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the tanh layers, in the actor and in the critic."""
    seed: int = 1
    """Seed of the initial weights, the shuffling and (with the environment's number) each environment's actions."""
    device: str = "cpu"
    """Where updates run, as torch names it; acting is always on the CPU."""
    deterministic: bool = False
    """Act row by row, so that results do not depend on which environments are asked together."""

    def __post_init__(self) -> None:
        for name in ("num_env_steps", "num_processes", "num_steps", "ppo_epoch", "num_mini_batch"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least 1; try {type(self).__name__}'s default"
                )
        for name in ("lr", "clip_param", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1; try 0.99")
        for name in ("entropy_coef", "value_loss_coef"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative; 0 switches it off")
        if self.target_kl is not None and not self.target_kl > 0:
            raise ValueError(f"target_kl={self.target_kl} must be above 0; leave it out for no limit")
        if not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise ValueError(f"hidden_sizes={self.hidden_sizes} needs at least one width of 1 or more; try 64 64")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        self._check_minibatches()

    def _check_minibatches(self) -> None:
        size = self.rollout_steps
        if size % self.num_mini_batch:
            near = {max(d for d in _divisors(size) if d < self.num_mini_batch)}
            near |= set(sorted(d for d in _divisors(size) if d > self.num_mini_batch)[:1])
            advice = " or ".join(str(d) for d in sorted(near))
            raise ValueError(
                f"num_mini_batch={self.num_mini_batch} must divide num_processes*num_steps={size}; try {advice}"
            )

    @property
    def rollout_steps(self) -> int:
        """Environment steps between two updates."""
        return self.num_processes * self.num_steps

    @property
    def num_updates(self) -> int:
        """Rollouts in the run, rounded up, never 0."""
        return -(-self.num_env_steps // self.rollout_steps)

    @property
    def total_steps(self) -> int:
        """Environment steps the run really takes: whole rollouts."""
        return self.num_updates * self.rollout_steps


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
