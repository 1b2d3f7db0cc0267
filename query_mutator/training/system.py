"""Start what a run needs: server, client, encoder; then its questions and task.

Used by the command lines and by `gymnasium.make("rl_query_mutator_env:QueryMutation-v0")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from query_mutator import operators as operator_registry
from query_mutator.cli.console import show_status
from query_mutator.data.split import ValidationFold
from query_mutator.encoder import CachedEncoder, english_words, resolve_encoder
from query_mutator.encoder.remote import Embed
from query_mutator.env.observation import Projection
from query_mutator.env.task import PYTHON_DOMAIN, CallSettings, Task, build_task
from query_mutator.errors import UsageError
from query_mutator.llm.away import DEFAULT_WAIT_S
from query_mutator.llm.backends import ADDRESS_FLAGS, AUTO, DEFAULT_BACKEND, EMBEDDED, resolve_backend
from query_mutator.llm.checkup import JudgeForm
from query_mutator.llm.client import ModelServer
from query_mutator.llm.hf import is_local, local_models
from query_mutator.llm.retry import RetryPolicy
from query_mutator.llm.stack import ClientSettings, ClientStack, build_client
from query_mutator.operators import ROUND_TRIP, Operator, local_rewrite
from query_mutator.rewards import WeightedReward, is_refusal
from query_mutator.training.judging import make_judge, make_reward
from query_mutator.types import CALL_PRICE, AnswerRule, AskRule, Question

if TYPE_CHECKING:
    from query_mutator.embedded.corpus import Corpus


EMBEDDED_TARGETS = ("pydoc-assistant", "reference-assistant")  # searches, which rewrite nothing; the first by default
EMBEDDED_MUTATOR = "rule-rewriter"
OTHER_FILES = 28  # of a trainer, besides its connections; 20 were seen


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSettings(ClientSettings):
    """Which models answer and how calls reach them."""

    backend: str = AUTO
    ollama_url: str | tuple[str, ...] | None = None
    openai_url: str | tuple[str, ...] | None = None
    gguf: str | tuple[str, ...] | None = None
    file_digests: tuple[str, ...] = field(default=(), metadata={"recorded": True})  # that the files of `gguf` must have
    target_model: str | None = None
    mutator_model: str | None = None
    early_stop: bool = False
    wait_for_server_s: float = DEFAULT_WAIT_S
    encoder: str = "all-MiniLM-L6-v2"
    encoder_max_tokens: int | None = None
    device: str = "cpu"
    deterministic: bool = False
    running_speed: float = 0.0
    latency_ms: float = 0.0
    latency_sigma: float = 0.0


def check_open_files(settings: SystemSettings, *, servers: int, embedded: bool) -> None:
    """Raise the limit on open files if the run needs more; UsageError when this is not allowed.

    A connection to each server is kept for every call in flight; the embedded server holds its other ends here.
    """
    try:
        import resource  # not on Windows
    except ImportError:
        return
    each = 2 if embedded else max(1, servers)
    needed = OTHER_FILES + each * settings.batch_size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"--batch-size {settings.batch_size} needs about {needed} open files, and {hard} are allowed; allow more "
            f"with `ulimit -n {needed}`, or give --batch-size {max(1, (hard - OTHER_FILES) // each)}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def default_mutator(target_model: str, *, embedded: bool) -> str:
    """Return the model that rewrites unless one is named: the target itself, unless that is a search over documents.

    `embedded` says whether our own server answers; other models may run on it.
    """
    is_search = embedded and target_model.removesuffix(":latest") in EMBEDDED_TARGETS
    return EMBEDDED_MUTATOR if is_search else target_model


def missing_operators(server: ModelServer, mutator_model: str, names: Sequence[str]) -> str | None:
    """Return why the mutator model cannot carry out all operators, or None."""
    known = server.operators(mutator_model)
    missing = [name for name in names if known is not None and name not in known]
    if not missing:
        return None
    return (
        f"{mutator_model} rewrites by rules and has none for {', '.join(missing)}; "
        "use a language model as --mutator-model, or leave them out of --operators"
    )


def encoder_of(settings: SystemSettings, embed: Embed | None, *, light: bool = False) -> CachedEncoder:
    """Return the encoder that the settings name; `embed` makes the calls of one on a server."""
    return resolve_encoder(
        settings.encoder,
        device=settings.device,
        deterministic=settings.deterministic,
        max_tokens=settings.encoder_max_tokens,
        embed=embed,
        light=light,
    )


def check_files(servers: Sequence[ModelServer], digests: Sequence[str]) -> None:
    """Raise a UsageError unless the files of models are those with these digests; without digests any are fine."""
    for server in servers if digests else ():
        if tuple(digests) != server.file_digests():
            raise UsageError(
                f"{', '.join(server.addresses())} changed since this policy was trained; give the earlier file, or "
                "name this one with --gguf in a new run or another command"
            )


class System:
    """The models of a run behind one client, and the encoder; a context manager that stops what it started."""

    def __init__(self, settings: SystemSettings, *, rewriter: str | None = None, light: bool = False) -> None:
        """Start everything; `rewriter` is a model in this process that is used in addition to the mutator.

        `light`: encode without torch where that gives the same rows.
        """
        self.settings = settings
        self._rewriter, self._light = rewriter, light
        self._stack = ExitStack()
        try:
            self.choice = resolve_backend(
                settings.backend,
                target_model=settings.target_model,
                mutator_model=None if is_local(settings.mutator_model) else settings.mutator_model,
                embedded_targets=EMBEDDED_TARGETS,
                **{flag: getattr(settings, flag) for flag in ADDRESS_FLAGS},
            )
            check_open_files(settings, servers=len(self.choice.urls), embedded=self.choice.kind == EMBEDDED)
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def embedded(self) -> bool:
        """Return whether the embedded assistant answers, in this process or at an address."""
        return self.choice.is_embedded

    def describe(self) -> dict[str, Any]:
        """Return who answers and which encoder is used, for config.json."""
        return {
            "backend": {
                "kind": self.choice.kind,
                "embedded": self.embedded,
                "reason": self.choice.reason,
                "url": self.url,
                "target_model": self.target_model,
                "mutator_model": self.mutator_model,
            },
            "encoder": {"name": self.encoder.name, "source": self.encoder.source},
        }

    def _start(self) -> None:
        settings = self.settings
        self.vocabulary: frozenset[str] = frozenset()  # of the subject
        if self.embedded:
            from query_mutator.embedded.corpus import load_corpus

            corpus = load_corpus()
            self.vocabulary = frozenset(corpus.vocabulary())
        if self.choice.kind == EMBEDDED:
            self.encoder = self._resolve_encoder(None)
            self.url = self._start_embedded(corpus)
        else:
            self.url = self.choice.urls[0]
        self.calls = calls = self._build_client()
        self._stack.callback(calls.close)
        self.retry_policy = RetryPolicy(max_retries=settings.max_retries, deadline_s=settings.deadline_s)
        target, mutator = self.choice.default_models or (EMBEDDED_TARGETS[0], None)
        self.target_model = settings.target_model or target
        self.mutator_model = (
            settings.mutator_model or mutator or default_mutator(self.target_model, embedded=self.embedded)
        )
        check_files(calls.servers, settings.file_digests)
        calls.require_models([name for name in (self.target_model, self.mutator_model) if not is_local(name)])
        if self.choice.kind != EMBEDDED:
            self.encoder = self._resolve_encoder(calls.embed)

    def _build_client(self) -> ClientStack:
        settings, kind = self.settings, self.choice.kind
        return build_client(
            self.choice.urls or self.url,
            settings,
            backend=DEFAULT_BACKEND if kind == EMBEDDED else kind,  # the embedded server has its routes
            is_refusal=is_refusal if settings.early_stop else None,
            local=local_models(settings.mutator_model, self._rewriter, deterministic=settings.deterministic),
            show=show_status,
        )

    def _resolve_encoder(self, embed: Embed | None) -> CachedEncoder:
        encoder = encoder_of(self.settings, embed, light=self._light)
        self._stack.callback(encoder.close)
        return encoder

    def _start_embedded(self, corpus: Corpus) -> str:
        """Start the embedded server in this process; it shares the encoder and its cache."""
        from query_mutator.embedded.default_models import default_models
        from query_mutator.embedded.server import start_server

        settings = self.settings
        server = start_server(
            default_models(self.encoder, corpus=corpus),
            encoder=self.encoder,
            num_parallel=settings.batch_size,
            latency_ms=settings.latency_ms,
            latency_sigma=settings.latency_sigma,
            running_speed=settings.running_speed,
        )
        self._stack.callback(server.close)
        return server.url

    def require_operators(self, names: Sequence[str]) -> None:
        """Raise a UsageError unless the mutator model can carry out all operators."""
        if is_local(self.mutator_model):
            return
        for server in self.calls.servers:
            if (reason := missing_operators(server, self.mutator_model, names)) is not None:
                raise UsageError(reason)

    def with_local_tests(self, operators: Sequence[Operator], vocabulary: frozenset[str]) -> tuple[Operator, ...]:
        """Return the operators with the local tests that hold for this mutator."""
        from query_mutator.training.local_tests import with_local_tests

        model = self.mutator_model
        by_rules = not is_local(model) and self.calls.servers[0].operators(model) is not None
        return with_local_tests(operators, vocabulary=vocabulary, by_rules=by_rules)

    def close(self) -> None:
        """Close connections, server and encoder; idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Which questions are asked and the rules of an episode."""

    dataset: str = "python_docs"
    question_column: str | None = None
    answer_column: str | None = None
    operators: str = ""
    domain: str = PYTHON_DOMAIN
    reward: str = ""
    judge_model: str | None = None
    judge_rubric: str = ""  # the text
    judge_form: JudgeForm | Literal["auto"] = "auto"
    max_episode_steps: int = 5
    answer: AnswerRule = "best"
    ask: AskRule = "every_step"
    max_asks: int | None = None
    call_price: tuple[float, ...] = (CALL_PRICE,)
    skip_unchanged: bool = True
    embedding_dims: int = 6
    target_max_tokens: int = 256
    mutator_max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = 0
    validation_fold: ValidationFold = "none"


def make_task(
    system: System,
    settings: TaskSettings,
    questions: Sequence[Question],
    *,
    projection: Projection | None = None,
    vocabulary: frozenset[str] | None = None,
    reward: WeightedReward | None = None,
) -> Task:
    """Return the task on training `questions` against a running system, whose mutator knows all operators.

    `vocabulary` is the subject's, by default that of the models that answer; `reward` replaces that of the settings.
    """
    vocabulary = system.vocabulary if vocabulary is None else vocabulary
    operators = operator_registry.select(settings.operators)
    asked = [operator.name for operator in operators if local_rewrite(operator) is None]
    system.require_operators([*asked, *([ROUND_TRIP.name] if settings.answer == "round_trip" else [])])
    if settings.skip_unchanged:
        operators = system.with_local_tests(operators, vocabulary)
    return build_task(
        questions,
        calls=CallSettings(
            target_model=system.target_model,
            mutator_model=system.mutator_model,
            target_max_tokens=settings.target_max_tokens,
            mutator_max_tokens=settings.mutator_max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        ),
        encoder=system.encoder,
        operators=operators,
        known_words=english_words() | vocabulary,
        embedding_dims=settings.embedding_dims,
        projection=projection,
        reward=reward or make_reward(settings, judge=make_judge(system.calls, settings)),
        domain=settings.domain,
        max_episode_steps=settings.max_episode_steps,
        answer=settings.answer,
        ask=settings.ask,
        max_asks=settings.max_asks,
        call_price=tuple(settings.call_price),
        skip_unchanged=settings.skip_unchanged,
    )
