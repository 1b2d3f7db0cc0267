"""Every setting, once: small groups of fields with type, bounds, default, help text and aliases.

    how calls are made       Context, Connection, Calls
    models                   Address, Models, Sampling, Simulation, Encoding, ModelSettings (what opening them takes)
    questions, and rewards   Columns, Questions, Reward
    an episode               Operators, CallRules, Episode, TaskSettings (what making a task takes)
    comparisons              FailureRate, CallBudget, PeriodicEvaluation, Comparison
    learning                 Learning, and IQNConfig, DirectConfig next to ppo's PPOConfig
    where a run is kept      Plugins, RunFolder, NamedRun, Run

A command is a dataclass that inherits the groups it needs; a program makes a group, or passes such a dataclass on as
one. `defaults` (`query_mutator.bounds`) changes a default for one command. Imports only the base and `ppo.config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from cyclopts import Parameter

from ppo.config import ComputeConfig, LearnerConfig
from ppo.fields import Ge, Gt, Le
from query_mutator.bounds import (
    Count,
    CountOrNone,
    Duration,
    Few,
    Group,
    Matches,
    Megabytes,
    Parallel,
    Positive,
    Prose,
    Retries,
    Seconds,
    Share,
    Sigma,
    Threads,
    Tokens,
    Wait,
    Weight,
    defaults,
    text_of,
)
from query_mutator.types import CALL_PRICE, AnswerRule, AskRule, Think

__all__ = [
    "Address", "CallBudget", "CallRules", "Calls", "Columns", "Comparison", "Connection", "Context", "DirectConfig",
    "Encoding", "Episode", "FailureRate", "IQNConfig", "Learning", "ModelSettings", "Models", "NamedRun",
    "Operators", "PeriodicEvaluation", "Plugins", "Questions", "Reward", "Run", "RunFolder", "Sampling", "Simulation",
    "TaskSettings",
]  # fmt: skip

# --- calls -----------------------------------------------------------------------------------------------------------

CacheMode = Literal["auto", "off", "eval", "all"]


@dataclass(frozen=True, kw_only=True)
class Context(Group):
    """The length of a prompt and its reply."""

    num_ctx: Tokens | None = None
    """Context length, by default the server's. Sent to Ollama, set with --gguf; other servers have their own."""


@dataclass(frozen=True, kw_only=True)
class Connection(Context):
    """One call to a server."""

    timeout_s: Annotated[Seconds, Parameter(alias="--timeout")] = 120.0
    """Seconds to wait for one reply, from connecting to its last byte."""
    max_reply_mb: Megabytes = 16.0
    """Maximum size of a reply in MB; a longer one is a failed call."""
    keep_alive: Duration = "30m"
    """How long an Ollama server keeps a model loaded after a call."""


@dataclass(frozen=True, kw_only=True)
class Calls(Connection):
    """All calls of a run: how many at once, retries, cache."""

    batch_size: Parallel = 8
    """Maximum model calls in flight, of all kinds together; --train-batch-size is the batch of a gradient step."""
    use_batching: Annotated[bool, Parameter(alias="--batching")] = True
    """Make calls concurrently; --no-batching makes one at a time and ignores --batch-size."""
    adaptive: bool = False
    """Find how many concurrent calls the server can sustain, from 1 to --batch-size, by the times it reports."""
    max_retries: Retries = 4
    """Retries after transient failures; a timeout is retried once."""
    wait_for_server_s: Annotated[Wait, Parameter(alias="--wait-for-server")] = 600.0
    """Seconds to wait for a server that stopped answering (a restart, for example) before calls fail; 0: no wait."""
    cache: CacheMode = "auto"
    """Replies to share with other runs: none (off), replies of evaluations (eval), or all. auto: all, except those of
    a recording. A run always finds its own replies."""
    cache_path: str | None = None
    """File of the cache; by default one in the user's cache folder."""

    @property
    def calls_in_flight(self) -> int:
        """Return the number of model calls in flight at once."""
        return self.batch_size if self.use_batching else 1


#: Defaults for programs: do not wait for a server, cache nothing on disk.
DIRECT = Calls(wait_for_server_s=0.0, cache="off")


# --- models ----------------------------------------------------------------------------------------------------------

AUTO = "auto"  # what `backend` is unless one is named
RUNNING_SPEED_S = 16.0  # of a call at --running-speed 1
ADDRESS_FLAGS = ("ollama_url", "openai_url", "gguf", "recording")  # the settings that say where a model is
#: Settings that may reach beyond this process, or run code: a run's or policy's own are used only if named again.
PLACES = (
    *ADDRESS_FLAGS, "encoder", "cache_path", "judge_model", "judge_rubric", "local_server_url", "ray_address",
    "dataset", "save_dir", "plugin", "system",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Address(Context):
    """The servers, and the model that answers."""

    backend: str = AUTO
    """Server: auto, ollama, openai, llama, recorded, a plugin's; auto: Ollama if there, else the bundled recording."""
    ollama_url: tuple[str, ...] = ()
    """Address of the Ollama server, or several that share the calls; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server (vLLM, llama-server, ...); the key is read from OPENAI_API_KEY."""
    gguf: tuple[str, ...] = ()
    """GGUF file of the model, or two: target, then mutator; or smollm2, the bundled test model; runs with llama.cpp."""
    recording: str | None = None
    """Recorded replies to use instead of a model: the name of a bundled recording, or a file."""
    target_model: tuple[str, ...] = ()
    """The model that answers, or several to choose from: each NAME, or NAME@URL; see docs/how-to/find-a-plan.md."""

    def __post_init__(self) -> None:
        for name in ("ollama_url", "gguf", "target_model"):  # a program may give one, or none
            if not isinstance(given := getattr(self, name), tuple):
                object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given or ()))
        for name in ("openai_url", "recording"):  # a choice of servers has a tuple of one
            if isinstance(given := getattr(self, name), tuple):
                object.__setattr__(self, name, next(iter(given), None))
        object.__setattr__(self, "target_model", tuple(dict.fromkeys(self.target_model)))
        names = [name for name, _ in map(split_target, self.target_model)]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"--target-model {repeated} has two addresses; give models of two names")
        for flag, url in first_address(self.target_model).items():
            if any(other for name, other in self.urls.items() if other and (name, other) != (flag, url)):
                raise ValueError(f"--target-model {self.target_model[0]} has an address, and so has another flag")
            object.__setattr__(self, flag, url)
            object.__setattr__(self, "target_model", (names[0], *self.target_model[1:]))
        super().__post_init__()

    @property
    def first_model(self) -> str | None:
        """Return the first model that answers, None where none is named."""
        return next(iter(self.targets), None)

    @property
    def targets(self) -> dict[str, str]:
        """Return the address of each model that answers, by its name; "" stands for the address of the other flags."""
        return dict(map(split_target, self.target_model))

    @property
    def urls(self) -> dict[str, str | Sequence[str] | None]:
        """Return the addresses by the name of their flag, as `resolve_backend` and `choose_backend` take them."""
        return {name: getattr(self, name) for name in ADDRESS_FLAGS}


def split_target(text: str) -> tuple[str, str]:
    """Return name and address of a target model, NAME or NAME@URL."""
    name, at, url = text.rpartition("@")
    return (name, url) if at and "://" in url else (text, "")


def flag_of(url: str) -> str:
    """Return the flag for the address of a server: an address with a path, such as /v1, is OpenAI-compatible."""
    return "openai_url" if urlsplit(url).path.strip("/") else "ollama_url"


def first_address(target_model: Sequence[str]) -> dict[str, Any]:
    """Return the address of the first target model as a setting, {} if it has none."""
    url = split_target(target_model[0])[1] if target_model else ""
    flag = flag_of(url)
    return {flag: (url,) if flag == "ollama_url" else url} if url else {}


@dataclass(frozen=True, kw_only=True)
class Models(Address):
    """The models that rewrite and answer, and the servers that run them."""

    mutator_model: str | None = None
    """The model that rewrites; by default the target model."""
    price: str = ""
    """Price of a call to each model, as small=1,large=8, or a .toml or .json file of token prices; default 1."""


@dataclass(frozen=True, kw_only=True)
class Sampling(Group):
    """Settings of sampling."""

    mutator_max_tokens: Tokens = 128
    """Maximum tokens of a rewrite."""
    target_max_tokens: Annotated[Tokens, Parameter(alias="--max-tokens")] = 256
    """Maximum tokens of an answer."""
    temperature: Annotated[float, Ge(0), Le(100)] = 0.0
    """Sampling temperature of both models."""
    system: Prose = ""
    """File with the system prompt of the target, kept in the run's settings; a row's own replaces it."""
    think: Think = "auto"
    """Whether a thinking target model thinks before it answers; auto: not on Ollama, else the server's default."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "system", text_of(self.system, "--system"))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Simulation(Group):
    """Simulated times of recorded replies."""

    latency_ms: Wait = 0.0
    """Simulated: mean time of a recorded reply; 0 adds none."""
    latency_sigma: Sigma = 0.0
    """Simulated: sigma of the log-normal spread of that time, fixed for each prompt."""
    running_speed: Wait = 0.0
    """Simulated: 16 s divided by this number replaces --latency-ms; 0 adds no time."""

    @property
    def simulated_s(self) -> float:
        """Return the mean simulated seconds of a call."""
        return RUNNING_SPEED_S / self.running_speed if self.running_speed else self.latency_ms / 1000


@dataclass(frozen=True, kw_only=True)
class Encoding(Group):
    """The sentence encoder."""

    encoder: str = "all-MiniLM-L6-v2"
    """Sentence encoder: a folder, a hub name, or hash (instant, for benchmarks)."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Models, Calls, Encoding, Simulation, ComputeConfig):
    """Models and settings of calls: what `open_models` takes."""


# --- questions and rewards -------------------------------------------------------------------------------------------

RECORDED_SET = "general"  # the bundled questions, to which a language model's replies are recorded
ValidationFold = Literal[0, 1, 2, 3, 4, "none"]  # the fold to choose by; "none": learn from all


@dataclass(frozen=True, kw_only=True)
class Columns(Group):
    """The columns of a file of questions."""

    question_column: str | None = None
    """Column of the question, if it is not called query, question, prompt or text."""
    answer_column: str | None = None
    """Column of the answer, if it is not called accept, answer, reference or response."""


@dataclass(frozen=True, kw_only=True)
class Questions(Columns):
    """The questions."""

    dataset: str = RECORDED_SET
    """Questions: general (bundled), a .jsonl, .json, .csv or .parquet file, a dataset of
    the Hugging Face hub as hf:NAME[:CONFIG][@SPLIT]; see docs/how-to/use-your-own-data.md."""


@dataclass(frozen=True, kw_only=True)
class Reward(Group):
    """The score of an answer."""

    judge_model: str | None = None
    """Model of the reward part judge; use another model than the one that answers."""
    judge_rubric: Prose = ""
    """File with the rubric of the judge, kept in the run's settings; by default whether the answer is correct."""
    reward: str = ""
    """Weights of the parts of the score, as right=0.7,similarity=0.2; see docs/reference/rewards.md."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "judge_rubric", text_of(self.judge_rubric, "--judge-rubric"))
        super().__post_init__()


# --- episodes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Operators(Group):
    """Operators and forms that the policy may choose."""

    operators: str = ""
    """Rewrite operators that the policy may choose, as a,b,c, or none; by default those of the mutator model that keep
    the meaning."""
    forms: str = "question_answer,short_answer,statement,one_sentence,restate,examples"
    """Forms of the request that the policy may choose, as a,b,c, all or none."""
    samples: Annotated[int, Ge(1), Le(64)] = 1
    """Replies in each form that the policy may ask for; the further ones are FORM#2 and so on."""
    sample_temperature: Annotated[float, Gt(0), Le(100)] = 0.7
    """Sampling temperature of further replies in a form."""
    domain: Prose = "general knowledge"
    """Subject of the questions, for the operators that mention it."""


@dataclass(frozen=True, kw_only=True)
class CallRules(Group):
    """Calls of an episode, and their price."""

    max_asks: Few | None = None
    """Maximum questions to the target in an episode with --ask form; with 1 the policy sees no answer."""
    call_price: tuple[Weight, ...] = (CALL_PRICE,)
    """Subtracted from the reward for every model call; of several prices each episode draws and observes one."""
    skip_unchanged: bool = True
    """Skip a rewrite if a local test finds that it would change nothing (no misspelt word, no slang)."""


@dataclass(frozen=True, kw_only=True)
class Episode(CallRules):
    """The rules of an episode."""

    answer: AnswerRule = "best"
    """Answer that an episode submits: the one that fits its question best, the most frequent one (vote), or the one
    most likely to be right (learned), by a model fitted to --answer-calls graded answers."""
    ask: AskRule = "every_step"
    """When to ask the target: after every rewrite, or when the policy chooses to ask or chooses a form (form)."""
    max_episode_steps: Few = 5
    """Steps after which an episode ends."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Questions, Operators, Reward, Episode, Sampling, ComputeConfig):
    """Questions and rules of an episode: what `make_task` takes."""

    embedding_dims: Parallel = 6
    """Principal components of the embeddings in an observation."""
    validation_fold: ValidationFold = 0
    """Fifth of the training questions, by target, reserved for periodic evaluations; none: learn from all."""


# --- comparisons and limits ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FailureRate(Group):
    """The limit of failed calls."""

    max_failure_rate: Share = 0.2
    """Stop with exit code 3 (training saves a checkpoint) if more than this share of recent steps, or of the questions
    of an evaluation, failed after retries."""


@dataclass(frozen=True, kw_only=True)
class CallBudget(Group):
    """The limit of calls per question in use."""

    budget: Annotated[float, Ge(1), Le(10_000)] | None = None
    """Maximum mean calls per question: saves the best plan within it, or sets the policy's price of a call to meet it;
    without it --call-price decides."""


@dataclass(frozen=True, kw_only=True)
class PeriodicEvaluation(Group):
    """Evaluations during training."""

    eval_interval: Annotated[CountOrNone | None, Parameter(alias="--validation-interval")] = None
    """Updates between two evaluations on validation questions; by default about ten per run, 0 for none."""
    eval_questions: Annotated[Count, Parameter(alias="--validation-questions")] = 120
    """Maximum validation questions of a periodic evaluation; the same ones each time."""
    evaluate: bool = True
    """Compare the policy with the baselines on all held-out questions at the end."""


@dataclass(frozen=True, kw_only=True)
class Comparison(Group):
    """The comparison with the baselines on held-out questions."""

    eval_calls: Count | None = None
    """Maximum model calls of the comparison with the baselines, without retries; it then uses a random sample of the
    questions, the same for all methods."""
    guard: bool = False
    """Also ask the bundled requests that should be refused; always done for bundled questions."""
    answer_calls: Count = 3000
    """Model calls before training, to fit P(right) to their graded answers, for --answer learned."""
    plan_calls: CountOrNone = 3000
    """Model calls to search for the best plan on training questions, a row of the comparison; 0 leaves it out."""


# --- learning --------------------------------------------------------------------------------------------------------

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
    """Maximum pending gradient steps of an off-policy learner while it collects; beyond that, it updates first."""
    engine: Literal["local", "ray"] = "local"
    """Where rollouts are collected: in this process, or by workers on a Ray cluster."""
    num_workers: Threads = 1
    """Rollout workers of --engine ray; each has its share of --num-processes and of --batch-size."""
    ray_address: str | None = None
    """Address of a Ray cluster, as 10.0.0.1:6379 or auto; by default RAY_ADDRESS, else one that ends with the run."""
    local_server_url: str | None = None
    """Address of a model server on each worker's own machine, as http://127.0.0.1:11434; without it the servers of
    --ollama-url are assigned to workers."""


@dataclass(frozen=True, kw_only=True)
class DirectConfig(LearnerConfig):
    """Fitted Q iteration on all steps so far."""

    num_models: Parallel = 4
    """Number of value models, each fitted to a bootstrap sample of the episodes; during training each environment
    acts by one of them, afterwards by their mean."""
    random_share: Share = 0.1
    """Share of random actions (among the allowed ones) while learning."""


@dataclass(frozen=True, kw_only=True)
@defaults(num_processes=8, lr=1e-3, max_grad_norm=10.0)
class IQNConfig(LearnerConfig):
    """IQN and its replay buffer."""

    train_batch_size: Tokens = 512
    """Transitions in one gradient step; --batch-size is the number of model calls in flight."""
    replay_ratio: Positive = 64.0
    """Mean number of times that a transition is learned from; the achieved ratio is logged."""
    replay_size: Tokens = 100_000
    """Transitions in the replay buffer; new ones replace the oldest."""
    learning_starts: Tokens = 256
    """Transitions to collect before the first gradient step."""
    sync_every: Count = 1
    """Gradient steps between two syncs of the collector's weights."""
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
    """Share of random actions after --epsilon-fraction of the run."""
    epsilon_fraction: Share = 1.0
    """Share of the run over which it decreases linearly."""
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


# --- the run folder --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plugins(Group):
    """Your own code."""

    plugin: tuple[str, ...] = ()
    """Modules or .py files to load first; they register operators, forms, reward parts, backends or learners."""


@dataclass(frozen=True, kw_only=True)
class RunFolder(Plugins):
    """The run folder."""

    save_dir: Annotated[str, Parameter(alias="--out")] = "runs"
    """Folder of the run folders."""


@dataclass(frozen=True, kw_only=True)
class NamedRun(RunFolder):
    """The run folder, its name, and --dry-run."""

    name: Annotated[str, Matches(r"[^/.][^/]*", "cannot be in a folder's name; try letters, digits and -")] | None = (
        None
    )
    """Last part of the run folder's name; by default the learner's name."""
    dry_run: bool = False
    """Print an estimate (questions, steps, model calls, time) and stop."""


@dataclass(frozen=True, kw_only=True)
class Run(NamedRun):
    """The run: its folder, its log, its checkpoints."""

    resume: str | None = None
    """Continue in a run folder, repeating only calls that were in flight."""
    save_interval: Count = 5
    """Updates between two checkpoints."""
    log_interval: Count = 1
    """Updates between two rows of metrics."""
    config: str | None = None
    """JSON or TOML file of flags; the command line takes precedence."""


# --- what commands share ---------------------------------------------------------------------------------------------

#: Groups whose settings may stand above the tables of qm.toml; each command that names a model takes those it has.
MODEL_GROUPS = (Connection, Calls, Address, Models, Sampling, Plugins)
#: The same for commands that take questions from settings, not from a trained policy.
QUESTION_GROUPS = (Questions, Operators, CallRules, Reward, Encoding, RunFolder)
