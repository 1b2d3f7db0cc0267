"""Every flag of the trainer in one frozen record, and the remarks a run begins with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from ppo.config import PPOConfig
from query_mutator.cli.flags import parse_flags
from query_mutator.iqn.config import OffPolicyFlags
from query_mutator.plugins import absolute, load_plugins
from query_mutator.training.learners import LEARNERS
from query_mutator.types import AnswerRule

PROG = "train_query_mutator.py"
EVAL_POINTS = 10  # periodic evaluations in a run, when --eval-interval leaves it open

_AT_LEAST_ONE = {
    "batch_size": 8,
    "save_interval": 5,
    "log_interval": 1,
    "eval_questions": 120,
    "max_episode_steps": 5,
    "embedding_dims": 6,
    "mutator_max_tokens": 128,
    "target_max_tokens": 256,
}
_NOT_NEGATIVE = (
    "max_policy_lag",
    "max_retries",
    "eval_interval",
    "step_cost",
    "temperature",
    "running_speed",
    "latency_ms",
    "latency_sigma",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(PPOConfig, OffPolicyFlags):
    """Learn which rewrite makes a question get a better answer.

    Every step has a mutator model rewrite a question and the target model answer it. With --deterministic the results
    do not depend on --batch-size or --no-batching, to the bit; without it they agree statistically only, because the
    last bits of a matrix product depend on how many rows it is given.
    """

    plugin: tuple[str, ...] = ()
    """Modules or .py files to load first, which register operators, reward parts, backends or learners of yours."""
    algo: str = "ppo"
    """The learner: ppo, iqn (off-policy, with a replay buffer), bandit (LinUCB), or the name of a plugin's."""
    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 2e-3
    """Step size of Adam at the start of the run."""
    gamma: float = 0.9
    """Discount of a reward one step later; episodes are a few steps long."""
    max_policy_lag: int = 0
    """Updates by which the policy that acts may be behind the one that learns; above 0 environments that
    finish early begin the next rollout while the update runs, and a resumed run begins new episodes."""
    batch_size: int = 8
    """Model calls in flight at once, of all kinds together; what a gradient step learns from is --train-batch-size."""
    use_batching: Annotated[bool, arg(aliases=["--batching"])] = True
    """Make calls side by side; with --no-batching one at a time, and --batch-size is ignored."""
    backend: Literal["auto", "embedded", "ollama", "openai"] = "auto"
    """Who answers: auto takes an Ollama server if one answers, else the embedded assistant."""
    ollama_url: tuple[str, ...] = ()
    """Address of the Ollama server, or of several that share the calls; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server (vLLM, llama-server, ...); the key is read from OPENAI_API_KEY."""
    allow_mixed: bool = False
    """Let several servers have different weights under one model's name."""
    target_model: str | None = None
    """The model whose answers are to get better."""
    mutator_model: str | None = None
    """The model that carries out rewrites; by default the target model. hf:FOLDER runs one in this process."""
    mutator_max_tokens: int = 128
    """Longest rewrite, in tokens."""
    target_max_tokens: int = 256
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """Sampling temperature of both models."""
    timeout_s: Annotated[float, arg(aliases=["--timeout"])] = 120.0
    """Seconds to wait for one reply, from connecting to its last byte."""
    deadline_s: Annotated[float | None, arg(aliases=["--deadline"])] = None
    """Seconds after the first attempt at a call beyond which none is begun; by default --max-retries alone decides."""
    max_retries: int = 4
    """Further attempts at a call that failed for a reason that may pass; a time-out gets one."""
    max_failure_rate: float = 0.2
    """Stop with a checkpoint and exit code 3 when calls failed for good in more than this share of recent steps."""
    adaptive: bool = False
    """Find how many calls in flight the server bears, between 1 and --batch-size, from the times it reports."""
    cache: Literal["off", "eval", "all"] = "eval"
    """Whose replies are remembered on disk and not asked for again: nobody's, those of evaluation, or all."""
    cache_path: str | None = None
    """File of remembered replies; by default one in the user's cache folder."""
    early_stop: bool = False
    """Stream answers and leave those that begin with a refusal at the end of their first sentence."""
    num_ctx: int | None = None
    """Context length of an Ollama model, sent with every call; by default the server's own."""
    keep_alive: str = "30m"
    """How long an Ollama server keeps a model loaded after a call."""
    encoder: str = "all-MiniLM-L6-v2"
    """Sentence encoder: a folder, a hub name, ollama:NAME, or hash (instant, for benchmarks)."""
    encoder_max_tokens: int | None = None
    """Tokens of a text that the sentence encoder reads at most; by default all that it can."""
    dataset: str = "python_docs"
    """Questions: python_docs (bundled), or a .jsonl, .csv or .parquet file."""
    question_column: str | None = None
    """Column of the question, when it is none of query, question, prompt, text."""
    answer_column: str | None = None
    """Column of the answer, when it is none of accept, answer, reference, response."""
    operators: str = ""
    """Rewrite operators the policy may choose from, as a,b,c; by default all."""
    domain: str = "Python's standard library"
    """What the questions are about, for the operators that mention it."""
    reward: str = ""
    """Weights of the score's parts, as right=0.7,similarity=0.2; by default the documented ones."""
    answer: AnswerRule = "best"
    """What an episode submits: the answer that best fits its question, the one closest to the original, or the last."""
    max_episode_steps: int = 5
    """Steps after which an episode is cut off."""
    step_cost: float = 0.01
    """Taken off the reward for every rewrite, because it costs calls."""
    embedding_dims: int = 6
    """Principal components of the embeddings that the policy sees."""
    latency_ms: float = 0.0
    """Time a call to the embedded assistant takes at least."""
    latency_sigma: float = 0.0
    """Spread of that time: sigma of a log-normal, the same for the same prompt."""
    running_speed: float = 0.0
    """Instead of --latency-ms: 16 s divided by this number; 0 adds no time."""
    save_dir: str = "runs"
    """Folder of run folders."""
    name: str | None = None
    """Last part of the run folder's name; by default the algorithm."""
    save_interval: int = 5
    """Updates between two checkpoints."""
    log_interval: int = 1
    """Updates between two rows of metrics."""
    eval_interval: int | None = None
    """Updates between two looks at held-out questions; by default about ten looks a run, 0 for none."""
    eval_questions: int = 120
    """Held-out questions in such a look; the same ones each time."""
    evaluate: bool = True
    """Compare the policy with what a sceptic would do on all held-out questions at the end."""
    resume: str | None = None
    """Go on in a run folder where it ended, calls in flight alone being made again; or from a .pt, in a new folder."""
    config: str | None = None
    """JSON file of flags; the command line wins."""
    dry_run: bool = False
    """Print the plan (updates, steps, model calls, time) and stop."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(map(absolute, self.plugin)))
        load_plugins(self.plugin)  # first: they may register what other flags name
        super().__post_init__()
        OffPolicyFlags.__post_init__(self)
        for name, usual in _AT_LEAST_ONE.items():
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1; the usual value is {usual}")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must not be negative; 0 switches it off")
        if self.latency_ms and self.running_speed:
            raise ValueError("latency_ms and running_speed both set the time of a call; give one of them")
        for name, usual in (("timeout_s", 120), ("deadline_s", 300), ("num_ctx", 4096)):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0; the usual value is {usual}")
        if self.encoder_max_tokens is not None and self.encoder_max_tokens < 8:
            raise ValueError(
                f"encoder_max_tokens={self.encoder_max_tokens} must be at least 8; leave it out to read all"
            )
        self._check_learner()
        if not 0 <= self.max_failure_rate <= 1:
            raise ValueError(f"max_failure_rate={self.max_failure_rate} must be between 0 and 1; 1 never stops")
        if self.name is not None and (not self.name or "/" in self.name or self.name.startswith(".")):
            raise ValueError(f"name={self.name!r} must be usable in a folder's name; try letters, digits and -")

    def _check_learner(self) -> None:
        learner = LEARNERS.get(self.algo)
        if self.deterministic and not learner.deterministic:
            raise ValueError(f"--algo {self.algo} has no deterministic mode; leave out --deterministic")
        if self.max_policy_lag and not learner.on_policy:
            raise ValueError(
                f"--max-policy-lag is for on-policy learners; --algo {self.algo} acts by the newest weights, "
                "see --sync-every"
            )

    @property
    def calls_in_flight(self) -> int:
        """Return how many calls are made at once."""
        return self.batch_size if self.use_batching else 1

    @property
    def updates_between_evals(self) -> int:
        """Return the updates between two periodic evaluations; 0 for none."""
        if self.eval_interval is not None:
            return self.eval_interval
        return max(1, round(self.num_updates / EVAL_POINTS))


def parse_config(argv: Sequence[str], *, base: Mapping[str, Any] | None = None, base_name: str = "") -> TrainConfig:
    """Return the trainer's flags: the command line over its --config file over `base` over the defaults."""
    return parse_flags(TrainConfig, argv, prog=PROG, base=base, base_name=base_name)


def remarks(config: TrainConfig) -> list[str]:
    """Return what a user should know before the run starts, a line each."""
    lines = []
    if config.total_steps != config.num_env_steps:
        lines.append(
            f"--num-env-steps {config.num_env_steps} is no whole number of rollouts "
            f"({config.num_processes} processes x {config.num_steps} steps): rounded up to {config.total_steps}"
        )
    if not config.use_batching:
        lines.append("--no-batching: --batch-size is ignored, calls are made one at a time")
    elif not config.batch_size <= config.num_processes <= 2 * config.batch_size:
        lines.append(_size_advice(config.batch_size, config.num_processes))
    return lines


def _size_advice(batch_size: int, num_processes: int) -> str:
    rule = "advice: batch_size <= num_processes <= 2 x batch_size keeps all calls busy"
    if num_processes < batch_size:
        return f"{rule}; {num_processes} processes cannot fill {batch_size} calls: try --batch-size {num_processes}"
    return f"{rule}; {num_processes} processes wait for {batch_size} calls: try --batch-size {-(-num_processes // 2)}"
