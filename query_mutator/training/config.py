"""Every flag of the trainer in one frozen record, in groups, and the remarks that a run begins with."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

from ppo.config import PPOConfig
from query_mutator.cli.flags import parse_flags
from query_mutator.data.split import ValidationFold
from query_mutator.iqn.config import BanditFlags, CollectorFlags, IQNFlags
from query_mutator.llm.address import check_addresses
from query_mutator.llm.away import DEFAULT_WAIT_S
from query_mutator.llm.backends import AUTO, check_backend
from query_mutator.plugins import absolute, load_plugins
from query_mutator.runs.run_dir import check_name
from query_mutator.runs.tracking import TrackFlags, check_trackers
from query_mutator.training.failure_rate import DEFAULT_MAX_FAILURE_RATE
from query_mutator.training.judging import rubric_text
from query_mutator.training.learners import LEARNERS, SEARCH
from query_mutator.training.workers import WorkerFlags, check_workers
from query_mutator.types import CALL_PRICE, AnswerRule, AskRule

PROG = "train_query_mutator.py"
SEARCH_CALLS = 3000  # of the plan search before a comparison with the baselines
EVAL_POINTS = 10  # periodic evaluations in a run, when --eval-interval leaves it open


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The run: its folder, its log, its checkpoints."""

    plugin: tuple[str, ...] = ()
    """Modules or .py files to load first, which register operators, reward parts, backends or learners of yours."""
    algo: str = "ppo"
    """The learner: ppo, iqn (off-policy, with a replay buffer), bandit (LinUCB), or the name of a plugin's."""
    save_dir: Annotated[str, arg(aliases=["--out"])] = "runs"
    """Folder of the run folders."""
    name: str | None = None
    """Last part of the run folder's name; by default the learner's name."""
    save_interval: int = 5
    """Updates between two checkpoints."""
    log_interval: int = 1
    """Updates between two rows of metrics."""
    validation_fold: ValidationFold = 0
    """Fifth of the training questions, by target, for periodic evaluations only; none: all are learned from."""
    eval_interval: Annotated[int | None, arg(aliases=["--validation-interval"])] = None
    """Updates between two evaluations on validation questions; by default about ten per run, 0 for none."""
    eval_questions: Annotated[int, arg(aliases=["--validation-questions"])] = 120
    """Most validation questions of a periodic evaluation; the same ones each time."""
    evaluate: bool = True
    """Compare the policy with the baselines on all held-out questions at the end."""
    eval_calls: int | None = None
    """Most model calls of that comparison, retries aside: a random sample of the questions that fits is asked."""
    plan_calls: int = SEARCH_CALLS
    """Model calls to search for the best plan on training questions, a row of that comparison; 0 leaves it out. With
    --teacher search this is done before training."""
    max_policy_lag: int = 0
    """Updates by which the acting policy may lag behind the learner; above 0 environments that finish early start the
    next rollout during the update, and a resumed run starts new episodes."""
    teacher: str | None = None
    """Policy to imitate before learning by trial: a plan, as spelling,expand,neutral, or search (the best plan within
    --plan-calls), both with --ask policy; or a checkpoint with the same actions. It takes the first --teacher-steps
    steps of the run."""
    teacher_steps: int = 1024
    """Steps that the teacher takes, in whole rollouts; they count as steps of the run."""
    max_failure_rate: float = DEFAULT_MAX_FAILURE_RATE
    """Stop with a checkpoint and exit code 3 when more than this share of recent steps, or of the questions of an
    evaluation, failed for good."""
    resume: str | None = None
    """Resume in a run folder, repeating only calls that were in flight; or start a new folder from a .pt file."""
    break_lock: bool = False
    """Take over a folder that is locked by a process on another host, after making sure that it has ended."""
    config: str | None = None
    """JSON or TOML file of flags; the command line takes precedence."""
    dry_run: bool = False
    """Print an estimate (updates, steps, model calls, time) and stop."""


@dataclass(frozen=True, kw_only=True)
class QuestionFlags:
    """Questions, what may be done with one, and the reward."""

    dataset: str = "python_docs"
    """Questions: python_docs or reference_tables (bundled), a .jsonl, .json, .csv or .parquet file, or a set of the
    Hugging Face hub as hf:NAME[:CONFIG][@SPLIT]; see docs/how-to/use-your-own-data.md."""
    question_column: str | None = None
    """Column of the question, if it is not called query, question, prompt or text."""
    answer_column: str | None = None
    """Column of the answer, if it is not called accept, answer, reference or response."""
    operators: str = ""
    """Rewrite operators that the policy may choose, as a,b,c; by default all."""
    domain: str = "Python's standard library"
    """Subject of the questions, for the operators that mention it."""
    reward: str = ""
    """Weights of the parts of the score, as right=0.7,similarity=0.2; see docs/reference/rewards.md."""
    judge_model: str | None = None
    """Model of the reward part judge; another one than the model that answers."""
    judge_rubric: str = ""
    """File with the rubric of the judge, kept in the run's settings; by default whether the answer is correct."""
    judge_form: Literal["auto", "schema", "logprobs", "words"] = "auto"
    """How the judge says yes or no: JSON of a schema, probabilities of the first token, its first word; auto asks the
    server once."""
    max_asks: int | None = None
    """Most questions to the target in an episode with --ask policy; 1: it rewrites without seeing any answer."""
    call_price: tuple[float, ...] = (CALL_PRICE,)
    """Subtracted from the reward for every model call; of several prices each episode draws one and sees it."""
    skip_unchanged: bool = True
    """Make no call for a rewrite whose local test says that it would change nothing (no misspelt word, no slang)."""
    encoder: str = "all-MiniLM-L6-v2"
    """Sentence encoder: a folder, a hub name, ollama:NAME, or hash (instant, for benchmarks)."""
    encoder_max_tokens: int | None = None
    """Tokens of a text that the sentence encoder reads; by default as many as the model allows."""

    def keep_rubric(self) -> None:
        """Replace the name of the rubric's file by its text, which a resumed run and an evaluation read again."""
        object.__setattr__(self, "judge_rubric", rubric_text(self.judge_rubric))


@dataclass(frozen=True, kw_only=True)
class EpisodeFlags:
    """An episode of a policy that is trained."""

    answer: AnswerRule = "best"
    """Answer that an episode submits: best fits its question, closest is nearest to the original, the last one, or
    round_trip: that from which the mutator can tell the question, one call for each of several answers."""
    ask: AskRule = "every_step"
    """When the target is asked: after every rewrite, or when the policy decides to (policy)."""
    max_episode_steps: int = 5
    """Steps after which an episode ends."""
    embedding_dims: int = 6
    """Principal components of the embeddings in an observation."""


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The models that rewrite and answer, and the servers that run them."""

    backend: str = AUTO
    """Server: auto, embedded, ollama, openai, llama, a plugin's; auto uses Ollama if it answers, else embedded."""
    ollama_url: tuple[str, ...] = ()
    """Address of the Ollama server, or of several that share the calls; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server (vLLM, llama-server, ...); the key is read from OPENAI_API_KEY."""
    gguf: tuple[str, ...] = ()
    """GGUF file of the model, or two: target, then mutator. llama.cpp runs them, no server is needed."""
    allow_mixed: bool = False
    """Allow several servers to have different weights under one model's name."""
    target_model: str | None = None
    """The model that answers."""
    mutator_model: str | None = None
    """The model that rewrites; by default the target model. hf:FOLDER runs one in this process."""
    mutator_max_tokens: int = 128
    """Most tokens of a rewrite."""
    target_max_tokens: int = 256
    """Most tokens of an answer."""
    temperature: float = 0.0
    """Sampling temperature of both models."""
    num_ctx: int | None = None
    """Context length, by default the server's. Sent to Ollama, set with --gguf; other servers have their own."""
    keep_alive: str = "30m"
    """How long an Ollama server keeps a model loaded after a call."""
    latency_ms: float = 0.0
    """Simulated: least time of a call to the embedded assistant."""
    latency_sigma: float = 0.0
    """Simulated: sigma of the log-normal spread of that time, the same for the same prompt."""
    running_speed: float = 0.0
    """Simulated: 16 s divided by this number in place of --latency-ms; 0 adds no time."""


@dataclass(frozen=True, kw_only=True)
class CallFlags:
    """Model calls: how many at once, retries, cache."""

    batch_size: int = 8
    """Model calls in flight at once, of all kinds together; --train-batch-size is the batch of a gradient step."""
    use_batching: Annotated[bool, arg(aliases=["--batching"])] = True
    """Make calls concurrently; --no-batching makes one at a time and ignores --batch-size."""
    adaptive: bool = False
    """Find how many concurrent calls the server can sustain, from 1 to --batch-size, by the times it reports."""
    timeout_s: Annotated[float, arg(aliases=["--timeout"])] = 120.0
    """Seconds to wait for one reply, from connecting to its last byte."""
    max_reply_mb: float = 16.0
    """Longest reply that is read, in MB; a longer one is a failed call."""
    deadline_s: Annotated[float | None, arg(aliases=["--deadline"])] = None
    """Seconds after the first attempt at a call in which a retry may start; by default only --max-retries limits."""
    max_retries: int = 4
    """Retries after transient failures; a timeout is retried once."""
    wait_for_server_s: Annotated[float, arg(aliases=["--wait-for-server"])] = DEFAULT_WAIT_S
    """Seconds to wait for a server that stopped answering, as in a restart, before calls fail; 0 for no wait."""
    cache: Literal["off", "eval", "all"] = "eval"
    """Calls whose replies are cached on disk: none, those of evaluation, or all."""
    cache_path: str | None = None
    """File of the cache; by default one in the user's cache folder."""
    early_stop: bool = False
    """Stream answers, and cancel those that begin with a refusal after their first sentence."""

    @property
    def calls_in_flight(self) -> int:
        """Return the number of model calls in flight at once."""
        return self.batch_size if self.use_batching else 1


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    RunFlags,
    TrackFlags,
    QuestionFlags,
    EpisodeFlags,
    ModelFlags,
    CallFlags,
    WorkerFlags,
    PPOConfig,
    CollectorFlags,
    BanditFlags,
    IQNFlags,
):
    """Learn which rewrite makes a question get a better answer.

    Every step has a mutator model rewrite a question and the target model answer it. With --deterministic the results
    do not depend on --batch-size or --no-batching, to the bit; without it they agree statistically only, because the
    last bits of a matrix product depend on its number of rows.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "num_env_steps", "num_processes", "num_steps", "batch_size", "backend", "ollama_url", "gguf", "target_model",
        "mutator_model", "dataset", "algo", "seed", "lr", "save_dir", "resume", "dry_run",
    )  # fmt: skip

    lr: Annotated[float, arg(aliases=["--learning-rate"])] = 2e-3
    """Adam's step size at the start of the run."""
    gamma: float = 0.9
    """Discount of a reward one step later; episodes are a few steps long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(map(absolute, self.plugin)))
        object.__setattr__(self, "gguf", tuple(os.path.abspath(os.path.expanduser(file)) for file in self.gguf))
        load_plugins(self.plugin)  # first: they may register what other flags name
        for learner in (IQNFlags, PPOConfig):  # the first checks the bounds of all fields
            learner.__post_init__(self)
        self.keep_rubric()
        check_backend(self.backend)
        check_addresses(ollama_url=self.ollama_url, openai_url=self.openai_url)
        if self.latency_ms and self.running_speed:
            raise ValueError("latency_ms and running_speed both set the time of a call; leave one of them out")
        if self.max_asks is not None and self.ask != "policy":
            raise ValueError(f"max_asks={self.max_asks} needs --ask policy")
        if self.name is not None:
            check_name(self.name)
        check_trackers(self.track)
        self._check_learner()

    def _check_learner(self) -> None:
        learner = LEARNERS.get(self.algo)
        if learner.made_by:
            raise ValueError(f"--algo {self.algo} is not trained; make it with `{learner.made_by}`")
        if self.deterministic and not learner.deterministic:
            raise ValueError(f"--algo {self.algo} has no deterministic mode; leave out --deterministic")
        if self.teacher is not None and not learner.imitates:
            raise ValueError(f"--algo {self.algo} cannot imitate a policy; leave out --teacher")
        if self.teacher == SEARCH and self.ask != "policy":
            raise ValueError("--teacher search finds a plan, which asks at its end; add --ask policy")
        if self.teacher is not None and self.max_policy_lag:
            raise ValueError("--teacher and --max-policy-lag cannot be used together; leave one of them out")
        if self.max_policy_lag and not learner.on_policy:
            raise ValueError(
                f"--max-policy-lag is for on-policy learners; --algo {self.algo} acts with the newest weights, "
                "see --sync-every"
            )
        check_workers(self, on_policy=learner.on_policy)

    @property
    def teacher_rollouts(self) -> int:
        """Return the rollouts at the start of the run in which the teacher acts."""
        return -(-self.teacher_steps // self.rollout_steps)

    @property
    def updates_between_evals(self) -> int:
        """Return the updates between two periodic evaluations; 0 for none."""
        if self.eval_interval is not None:
            return self.eval_interval
        return max(1, round(self.num_updates / EVAL_POINTS))


def parse_config(
    argv: Sequence[str], *, base: Mapping[str, Any] | None = None, base_name: str = "", prog: str = PROG
) -> TrainConfig:
    """Return the trainer's flags: the command line over --config over `base` or ./qm.toml over the defaults."""
    return parse_flags(TrainConfig, argv, prog=prog, base=base, base_name=base_name, table="train")


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
