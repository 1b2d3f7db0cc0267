"""Settings of the off-policy learners: the trainer's flags, and the record an IQN learner is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from query_mutator.cli.bounds import check_bounds


@dataclass(frozen=True, kw_only=True)
class IQNFlags:
    """Settings of IQN and its replay buffer; an invalid value is a ValueError that says what is valid."""

    train_batch_size: int = 512
    """Transitions in one gradient step; --batch-size is the number of model calls in flight."""
    replay_ratio: float = 64.0
    """Times that a transition is learned from on average; the achieved ratio is logged."""
    replay_size: int = 100_000
    """Transitions in the replay buffer; new ones replace the oldest."""
    learning_starts: int = 256
    """Transitions to collect before the first gradient step."""
    sync_every: int = 1
    """Gradient steps after which the collectors get the new weights."""
    n_step: int = 3
    """Steps of the n-step return."""
    target_tau: float = 0.02
    """Share of the online weights in each update of the target network (Polyak)."""
    per_alpha: float = 0.5
    """Priority exponent of the replay; 0 samples uniformly."""
    per_beta: float = 0.4
    """Exponent of the importance weights at the start of the run; 1 at its end."""
    epsilon_start: float = 1.0
    """Share of random actions (among the allowed ones) at the start."""
    epsilon_end: float = 0.05
    """Share of random actions from --epsilon-fraction of the run on."""
    epsilon_fraction: float = 1.0
    """Share of the run in which it falls linearly."""
    num_quantiles: int = 8
    """Quantiles drawn per sample in a gradient step, for the prediction and for its target."""
    num_eval_quantiles: int = 32
    """Quantiles averaged for a value when actions are chosen."""
    num_cosines: int = 64
    """Cosine features in the embedding of a quantile."""
    kappa: float = 1.0
    """Error below which the quantile Huber loss is quadratic."""

    def __post_init__(self) -> None:
        check_bounds(type(self), vars(self))
        if not self.target_tau:
            raise ValueError("target_tau=0.0 must be above 0: the target network would never change")
        if self.num_quantiles % 2:
            raise ValueError(f"num_quantiles={self.num_quantiles} must be even, they are drawn in pairs; try 8")
        if self.learning_starts > self.replay_size:
            raise ValueError(
                f"learning_starts={self.learning_starts} is more than replay_size={self.replay_size} holds; "
                f"try --replay-size {self.learning_starts}"
            )


@dataclass(frozen=True, kw_only=True)
class CollectorFlags:
    """Threads that collect for an off-policy learner."""

    num_collectors: int = 8
    """Threads that collect; they share the environments evenly and are at most as many."""
    max_pending_updates: Annotated[int, arg(aliases=["--max-update-debt"])] = 8
    """Gradient steps that may be due before collectors wait for the learner; large numbers let the achieved replay
    ratio fall below --replay-ratio."""


@dataclass(frozen=True, kw_only=True)
class BanditFlags:
    """The contextual bandit, LinUCB."""

    ucb_alpha: float = 0.3
    """Standard errors added to an action's estimated reward while learning; 0 never explores."""
    ridge: float = 1.0
    """L2 penalty of all coefficients."""


@dataclass(frozen=True, kw_only=True)
class IQNConfig(IQNFlags):
    """Settings of an IQN learner: its own and those it shares with PPO."""

    total_steps: Annotated[int, arg(aliases=["--num-env-steps", "--total-timesteps"])] = 10_000
    """Environment steps of the run; schedules end there."""
    num_processes: Annotated[int, arg(aliases=["--num-envs"])] = 8
    """Environments; each has its own random stream."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 1e-3
    """Adam's step size at the start."""
    use_linear_lr_decay: Annotated[bool, arg(aliases=["--anneal-lr"])] = True
    """Lower the step size linearly towards 0 over the run."""
    gamma: float = 0.99
    """Discount of a reward one step later."""
    max_grad_norm: float = 10.0
    """Largest norm of the gradient of all parameters; a larger one is clipped."""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """Widths of the layers that encode an observation."""
    seed: int = 1
    """Seed of the initial weights, the replay and, with the environment's number, each environment's actions."""
    device: str = "cpu"
    """Torch device of gradient steps; acting is always on the CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise ValueError(f"hidden_sizes={self.hidden_sizes} needs at least one width of 1 or more; try 64 64")
