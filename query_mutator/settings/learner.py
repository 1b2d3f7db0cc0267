"""Settings of learning: those of all learners, and the groups of IQN and the direct method next to ppo's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from ppo.config import LearnerConfig
from ppo.fields import Gt, Le
from query_mutator.bounds import (
    Count,
    CountOrNone,
    Group,
    Parallel,
    Positive,
    Share,
    Threads,
    Tokens,
    defaults,
)

#: Defaults of --preset by its name: a file of flags and the command line replace them.
PRESETS: dict[str, dict[str, Any]] = {
    "frugal": {
        "algo": "direct",
        "num_env_steps": 1000,
        "num_processes": 8,
        "max_asks": 2,
        "budget": 1.5,
        "answer_calls": 600,
        "plan_calls": 600,
        "eval_calls": 2000,
        "eval_questions": 40,
    }
}


@dataclass(frozen=True, kw_only=True)
class Learning(Group):
    """The learner, and where it collects; see docs/how-to/sweep-settings.md."""

    preset: Literal["frugal"] | None = None
    """Other defaults; frugal, for expensive calls: --algo direct, and fewer calls to learn from and per question."""

    algo: str = "ppo"
    """The learner: ppo, iqn (off-policy, with a replay buffer), direct (boosted trees fitted to all steps so far, for
    expensive calls), or a plugin's name."""
    max_pending_updates: Annotated[CountOrNone, Parameter(alias="--max-update-debt")] = 8
    """Gradient steps that may be due before the collector of an off-policy learner waits for it; large numbers let the
    achieved replay ratio fall below --replay-ratio."""
    engine: Literal["local", "ray"] = "local"
    """Where rollouts are collected: in this process, or by workers on a Ray cluster."""
    num_workers: Threads = 1
    """Rollout workers of --engine ray; each has its share of --num-processes and of --batch-size."""
    ray_address: str | None = None
    """Address of a Ray cluster, as 10.0.0.1:6379 or auto; by default RAY_ADDRESS, else one that ends with the run."""
    local_server_url: str | None = None
    """Address of a model server as each worker reaches it on its own machine, as http://127.0.0.1:11434; without it
    the workers share out the servers of --ollama-url."""


@dataclass(frozen=True, kw_only=True)
class DirectConfig(LearnerConfig):
    """Fitted Q iteration on all steps so far."""

    num_models: Parallel = 4
    """Models of the value of actions, each fitted to another resampling of the episodes; while learning an environment
    acts by one of them, afterwards their mean decides."""
    random_share: Share = 0.1
    """Share of random actions (among the allowed ones) while learning."""


@dataclass(frozen=True, kw_only=True)
@defaults(num_processes=8, lr=1e-3, max_grad_norm=10.0)
class IQNConfig(LearnerConfig):
    """IQN and its replay buffer."""

    train_batch_size: Tokens = 512
    """Transitions in one gradient step; --batch-size is the number of model calls in flight."""
    replay_ratio: Positive = 64.0
    """Times that a transition is learned from on average; the achieved ratio is logged."""
    replay_size: Tokens = 100_000
    """Transitions in the replay buffer; new ones replace the oldest."""
    learning_starts: Tokens = 256
    """Transitions to collect before the first gradient step."""
    sync_every: Count = 1
    """Gradient steps after which the collector gets the new weights."""
    n_step: Parallel = 3
    """Steps of the n-step return."""
    target_tau: Annotated[float, Gt(0), Le(1)] = 0.02
    """Share of the online weights in each update of the target network (Polyak)."""
    per_alpha: Share = 0.5
    """Priority exponent of the replay; 0 samples uniformly."""
    per_beta: Share = 0.4
    """Exponent of the importance weights at the start of the run; 1 at its end."""
    epsilon_start: Share = 1.0
    """Share of random actions (among the allowed ones) at the start."""
    epsilon_end: Share = 0.05
    """Share of random actions from --epsilon-fraction of the run on."""
    epsilon_fraction: Share = 1.0
    """Share of the run in which it falls linearly."""
    num_quantiles: Parallel = 8
    """Quantiles drawn per sample in a gradient step, for the prediction and for its target."""
    num_eval_quantiles: Parallel = 32
    """Quantiles averaged for a value when actions are chosen."""
    num_cosines: Parallel = 64
    """Cosine features in the embedding of a quantile."""
    kappa: Positive = 1.0
    """Error below which the quantile Huber loss is quadratic."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_quantiles % 2:
            raise ValueError(f"num_quantiles={self.num_quantiles} must be even, they are drawn in pairs; try 8")
        if self.learning_starts > self.replay_size:
            raise ValueError(
                f"learning_starts={self.learning_starts} is more than replay_size={self.replay_size} holds; "
                f"try --replay-size {self.learning_starts}"
            )
