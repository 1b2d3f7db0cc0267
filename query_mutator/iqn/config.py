"""Every knob of the off-policy learners in frozen records: the flags, and what an IQN learner is made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

_AT_LEAST_ONE = {
    "train_batch_size": 512,
    "replay_size": 100_000,
    "learning_starts": 256,
    "sync_every": 1,
    "n_step": 3,
    "num_quantiles": 8,
    "num_eval_quantiles": 32,
    "num_cosines": 64,
}
_SHARES = {
    "target_tau": 0.02,
    "per_alpha": 0.5,
    "per_beta": 0.4,
    "epsilon_start": 1.0,
    "epsilon_end": 0.05,
    "epsilon_fraction": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """What learning from a replay takes; a value that cannot work is a ValueError that says what would."""

    train_batch_size: int = 512
    """Transitions in one gradient step of the off-policy learner; has nothing to do with --batch-size, which is the
    number of model calls in flight."""
    replay_ratio: float = 64.0
    """Times a transition is learned from on average; what was really achieved is logged beside it."""
    replay_size: int = 100_000
    """Transitions kept; the oldest make room for new ones."""
    learning_starts: int = 256
    """Transitions to gather before the first gradient step."""
    sync_every: int = 1
    """Gradient steps between two hand-overs of weights to the collectors."""
    n_step: int = 3
    """Rewards summed before a transition looks at the value of the state it led to."""
    target_tau: float = 0.02
    """Share of the online weights that the target network takes over at each gradient step."""
    per_alpha: float = 0.5
    """How strongly replay prefers transitions with large errors; 0 draws evenly."""
    per_beta: float = 0.4
    """Importance weights' exponent at the start, 1 at the end of the run."""
    epsilon_start: float = 1.0
    """Share of actions drawn at random (among those open) at the start."""
    epsilon_end: float = 0.05
    """The same from --epsilon-fraction of the run on."""
    epsilon_fraction: float = 1.0
    """Share of the run over which it falls, linearly."""
    num_quantiles: int = 8
    """Quantiles drawn for each sample of a gradient step, of the prediction and of its target."""
    num_eval_quantiles: int = 32
    """Quantiles that a value is the mean of when actions are chosen."""
    num_cosines: int = 64
    """Cosine features a quantile is embedded by."""
    kappa: float = 1.0
    """Error up to which the quantile Huber loss is quadratic."""

    def __post_init__(self) -> None:
        for name, usual in _AT_LEAST_ONE.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; the usual value is {usual}")
        for name, share in _SHARES.items():
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be between 0 and 1; the usual value is {share}")
        if self.num_quantiles % 2:
            raise ValueError(f"num_quantiles={self.num_quantiles} must be even, they are drawn in pairs; try 8")
        for name in ("replay_ratio", "kappa", "target_tau"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.learning_starts > self.replay_size:
            raise ValueError(
                f"learning_starts={self.learning_starts} is more than replay_size={self.replay_size} holds; "
                f"try --replay-size {self.learning_starts}"
            )


@dataclass(frozen=True, kw_only=True)
class OffPolicyFlags(ReplayFlags):
    """What the trainer's off-policy learners take besides: collectors, and the bandit's two knobs."""

    num_collectors: int = 8
    """Threads that collect for the one off-policy learner; they share the environments evenly, and are no more than
    those."""
    max_pending_updates: Annotated[int, arg(aliases=["--max-update-debt"])] = 8
    """Gradient steps the learner may be behind before collectors wait for it; large numbers let the achieved
    replay ratio fall below the one asked for."""
    ucb_alpha: float = 0.3
    """Bandit: standard errors added to an action's estimated reward while learning; 0 never explores."""
    ridge: float = 1.0
    """Bandit: pull of all coefficients towards 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_collectors < 1:
            raise ValueError(f"num_collectors={self.num_collectors} must be at least 1; the usual value is 8")
        if self.max_pending_updates < 0:
            raise ValueError(
                f"max_pending_updates={self.max_pending_updates} must not be negative; 0 learns before collecting more"
            )
        if not 0 < self.ridge < math.inf:
            raise ValueError(f"ridge={self.ridge} must be above 0; the usual value is 1")
        if not 0 <= self.ucb_alpha < math.inf:
            raise ValueError(f"ucb_alpha={self.ucb_alpha} must not be negative; 0 never explores")


@dataclass(frozen=True, kw_only=True)
class IQNConfig(ReplayFlags):
    """What an IQN learner is made from: its own knobs and those it shares with PPO."""

    total_steps: Annotated[int, arg(aliases=["--num-env-steps", "--total-timesteps"])] = 10_000
    """Environment steps of the run: schedules end there."""
    num_processes: Annotated[int, arg(aliases=["--num-envs"])] = 8
    """Environments; each has a random stream of its own."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 1e-3
    """Adam's step size at the start."""
    use_linear_lr_decay: Annotated[bool, arg(aliases=["--anneal-lr"])] = True
    """Lower the step size linearly towards 0 over the run."""
    gamma: float = 0.99
    """Discount of a reward one step later."""
    max_grad_norm: float = 10.0
    """Norm the gradient of all parameters together is clipped to."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the layers that read an observation."""
    seed: int = 1
    """Seed of the initial weights, of replay and (with the environment's number) of each environment's actions."""
    device: str = "cpu"
    """Where gradient steps run, as torch names it; acting is always on the CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("total_steps", "num_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("lr", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma} must be between 0 and 1; try 0.99")
        if not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise ValueError(f"hidden_sizes={self.hidden_sizes} needs at least one width of 1 or more; try 64 64")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
