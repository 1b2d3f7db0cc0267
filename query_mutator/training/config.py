"""Every flag of the trainer in one frozen record, in groups, and the remarks that a run begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ppo.config import PPOConfig
from query_mutator import settings
from query_mutator.bounds import defaults
from query_mutator.cli.flags import Base, parse_flags
from query_mutator.env.episode import EpisodeRules
from query_mutator.files.gguf_file import gguf_address
from query_mutator.learners import LEARNERS
from query_mutator.llm.backends import ServerAddressFlags
from query_mutator.llm.recorded import recording_address

PROG = "train_query_mutator.py"
EVAL_POINTS = 10  # periodic evaluations in a run, when --eval-interval leaves it open


@dataclass(frozen=True, kw_only=True)
@defaults(
    lr=2e-3,
    gamma=0.9,
    ask="form",
    max_asks=4,
    max_episode_steps=6,
    answer="learned",
    budget=2.0,
    call_price=(0.005, 0.02, 0.08),
)
class TrainConfig(
    settings.Run,
    settings.PeriodicEvaluation,
    settings.Comparison,
    settings.CallBudget,
    settings.FailureRate,
    settings.TaskSettings,
    ServerAddressFlags,
    settings.ModelSettings,
    settings.Learning,
    PPOConfig,
    settings.DirectConfig,
    settings.IQNConfig,
):
    """Learn which rewrite makes a question get a better answer.

    In each step the mutator model rewrites a question or the target model answers it. With --deterministic the results
    do not depend on --batch-size or --no-batching, to the bit; without it they agree statistically only, because the
    last bits of a matrix product depend on its number of rows.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "num_env_steps", "num_processes", "num_steps", "batch_size", "backend", "ollama_url", "gguf", "target_model",
        "mutator_model", "dataset", "algo", "seed", "lr", "save_dir", "resume", "dry_run",
    )  # fmt: skip
    IN_FILE: ClassVar[tuple[str, ...]] = (
        "answer_column", "call_price", "clip_vloss", "entropy_coef",
        "epsilon_end", "epsilon_fraction", "epsilon_start", "kappa", "keep_alive", "local_server_url",
        "max_grad_norm", "max_pending_updates", "max_reply_mb", "mutator_max_tokens", "n_step", "norm_adv",
        "num_cosines", "num_eval_quantiles", "num_models", "num_quantiles", "per_alpha", "per_beta", "price",
        "question_column", "random_share", "ray_address", "replay_size", "sample_temperature", "samples",
        "skip_unchanged", "sync_every", "target_kl", "target_tau", "value_loss_coef",
    )  # fmt: skip

    def __post_init__(self) -> None:
        object.__setattr__(self, "gguf", tuple(map(gguf_address, self.gguf)))
        if self.recording is not None:
            object.__setattr__(self, "recording", recording_address(self.recording))
        self._fit_asking()
        super().__post_init__()
        if self.latency_ms and self.running_speed:
            raise ValueError("latency_ms and running_speed both set the time of a call; leave one of them out")
        self._check_learner()

    def _fit_asking(self) -> None:
        """Drop the defaults that need several answers, or a policy that asks, where there are none."""
        if self.ask == "every_step":
            if self.max_asks not in (None, TrainConfig.max_asks):
                raise ValueError(f"--max-asks {self.max_asks} needs --ask form; add it, or leave --max-asks out")
            object.__setattr__(self, "max_asks", None)
        if self.max_asks == 1 or self.ask == "every_step":
            for name in ("answer", "budget", "call_price"):
                if getattr(self, name) == getattr(TrainConfig, name):
                    object.__setattr__(self, name, getattr(EpisodeRules, name, None))

    def _check_learner(self) -> None:
        learner = LEARNERS.get(self.algo)
        if learner.made_by:
            raise ValueError(f"--algo {self.algo} is not trained; make it with `{learner.made_by}`")
        if self.deterministic and not learner.deterministic:
            raise ValueError(f"--algo {self.algo} has no deterministic mode; leave out --deterministic")
        self._check_workers()

    def _check_workers(self) -> None:
        if self.engine == "local":
            for name, is_given in (("num_workers", self.num_workers > 1), ("local_server_url", self.local_server_url)):
                if is_given:
                    raise ValueError(f"--{name.replace('_', '-')} needs --engine ray")
            return
        if self.num_workers > self.num_processes:
            raise ValueError(f"--num-workers {self.num_workers} is more than --num-processes {self.num_processes}")
        calls, flag = (self.batch_size, "--batch-size") if self.use_batching else (1, "--no-batching")
        if self.num_workers > calls:
            raise ValueError(f"--num-workers {self.num_workers} is more than the {calls} calls in flight of {flag}")

    @property
    def updates_between_evals(self) -> int:
        """Return the updates between two periodic evaluations; 0 for none."""
        if self.eval_interval is not None:
            return self.eval_interval
        return max(1, round(self.num_updates / EVAL_POINTS))


def parse_config(argv: Sequence[str], *, base: Base | None = None, prog: str = PROG) -> TrainConfig:
    """Return the trainer's flags: the command line over --config over `base` or ./qm.toml over the defaults."""
    return parse_flags(TrainConfig, argv, prog=prog, base=base, table="train")


def remarks(config: TrainConfig) -> list[str]:
    """Return what a user should know before the run starts, one line each."""
    lines = []
    if config.total_steps != config.num_env_steps:
        lines.append(
            f"--num-env-steps {config.num_env_steps} is not a whole number of rollouts "
            f"({config.num_processes} processes x {config.num_steps} steps): rounded up to {config.total_steps}"
        )
    if not config.use_batching:
        lines.append("--no-batching: --batch-size is ignored, calls are made one at a time")
    elif not config.batch_size <= config.num_processes <= 2 * config.batch_size:
        lines.append(_size_advice(config.batch_size, config.num_processes))
    return lines


def _size_advice(batch_size: int, num_processes: int) -> str:
    rule = "advice: batch_size <= num_processes <= 2 x batch_size keeps all calls in flight"
    if num_processes < batch_size:
        return f"{rule}; {num_processes} processes cannot fill {batch_size} calls: try --batch-size {num_processes}"
    return f"{rule}; {num_processes} processes wait for {batch_size} calls: try --batch-size {-(-num_processes // 2)}"
