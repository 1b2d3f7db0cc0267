"""Open the models that a run needs: server, client and encoder.

Used by the command lines, by `Rewriter` and by `gymnasium.make("rl_query_mutator_env:QueryMutation-v0")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from threadpoolctl import threadpool_limits

from query_mutator.bounds import group_of
from query_mutator.cli.console import closing_on_interrupt, show_status
from query_mutator.encoder import CachedEncoder, resolve_encoder
from query_mutator.encoder.remote import Embed
from query_mutator.errors import UsageError
from query_mutator.llm.backends import (
    ADDRESS_FLAGS,
    BACKENDS,
    DEFAULT_BACKEND,
    EMBEDDED,
    BackendChoice,
    resolve_backend,
)
from query_mutator.llm.client import ModelServer
from query_mutator.llm.retry import RetryPolicy
from query_mutator.llm.stack import ClientStack, build_client
from query_mutator.operators import Operator
from query_mutator.rewards import is_refusal
from query_mutator.settings.calls import CacheMode, Calls
from query_mutator.settings.models import ModelSettings

if TYPE_CHECKING:
    from query_mutator.embedded.corpus import Corpus

__all__ = [
    "EMBEDDED_MUTATOR",
    "EMBEDDED_TARGETS",
    "OpenModels",
    "ResolvedModels",
    "check_files",
    "check_open_files",
    "default_mutator",
    "encoder_of",
    "missing_operators",
    "open_models",
]

EMBEDDED_TARGETS = ("pydoc-assistant", "reference-assistant")  # searches, which rewrite nothing; the first by default
EMBEDDED_MUTATOR = "rule-rewriter"
OTHER_FILES = 28  # of a trainer, besides its connections; 20 were seen


@dataclass(frozen=True, kw_only=True)
class ResolvedModels(ModelSettings):
    """The settings of models that were open, with every choice made, so that the same ones can be opened again."""

    file_digests: tuple[str, ...] = ()
    """SHA-256 that the files of `gguf` or `recording` must have; without any they are not compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenModels:
    """The models of a run behind one client, and the encoder; a context manager that stops what was started.

    In a command line the first Ctrl-C closes the calls too, so that nothing waits for a reply.
    """

    settings: ModelSettings
    choice: BackendChoice
    url: str
    calls: ClientStack
    encoder: CachedEncoder
    target_model: str
    mutator_model: str
    vocabulary: frozenset[str]  # of the embedded assistant's subject
    resources: ExitStack = field(repr=False)

    @property
    def embedded(self) -> bool:
        """Return whether the embedded assistant answers, in this process or at an address."""
        return self.choice.is_embedded

    @property
    def retry_policy(self) -> RetryPolicy:
        """Return which failed calls are repeated, for a scheduler that waits before retries itself."""
        return self.calls.retry.policy

    @property
    def resolved(self) -> ResolvedModels:
        """Return the settings with the choices filled in."""
        return group_of(
            ResolvedModels,
            self.settings,
            **{**dict.fromkeys(ADDRESS_FLAGS), **self.choice.addresses},
            backend=self.choice.kind,
            batch_size=self.settings.calls_in_flight,
            cache=_cache_mode(self.settings, self.choice),
            file_digests=self.calls.file_digests(),
            target_model=self.target_model,
            mutator_model=self.mutator_model,
        )

    @cached_property
    def by_rules(self) -> bool:
        """Return whether the mutator rewrites by rules, as the embedded one does."""
        return self.calls.operators(self.mutator_model) is not None

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

    def require_operators(self, names: Sequence[str]) -> None:
        """Raise a UsageError unless the mutator model can carry out all operators."""
        for server in self.calls.servers:
            if (reason := missing_operators(server, self.mutator_model, names)) is not None:
                raise UsageError(reason)

    def with_local_tests(self, operators: Sequence[Operator], vocabulary: frozenset[str]) -> tuple[Operator, ...]:
        """Return the operators with the local tests that hold for this mutator."""
        from query_mutator.session.local_tests import with_local_tests

        return with_local_tests(operators, vocabulary=vocabulary, by_rules=self.by_rules)

    def close(self) -> None:
        """Close connections, server and encoder; idempotent."""
        self.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_models(settings: ModelSettings, *, light: bool = False) -> OpenModels:
    """Start and connect what `settings` name; UsageError or BackendError for a model that no server has.

    `light` encodes without torch where that gives the same rows. The files of ResolvedModels must have their digests.
    """
    with ExitStack() as stack:
        # Calls search and encode from many threads at once: BLAS threads beside each would outnumber the cores.
        stack.enter_context(threadpool_limits(1, user_api="blas"))
        choice = _choice(settings)
        starts_server = choice.kind == EMBEDDED
        check_open_files(settings, servers=len(choice.urls), embedded=starts_server)
        corpus = _corpus() if choice.is_embedded else None
        if starts_server:
            encoder = encoder_of(settings, None, light=light)
            stack.callback(encoder.close)
            url = _start_embedded(settings, encoder, corpus, stack)
        else:
            url = choice.urls[0]
        calls = _client(settings, choice, url)
        stack.callback(calls.close)
        target, mutator = _names(settings, choice)
        if isinstance(settings, ResolvedModels):
            check_files(calls.servers, settings.file_digests)
        calls.require_models([target, mutator])
        if not starts_server:
            encoder = encoder_of(settings, calls.embed, light=light)
            encoder.gathers = not settings.deterministic and any(server.runs_files for server in calls.servers)
            stack.callback(encoder.close)
        stack.enter_context(closing_on_interrupt(calls.close))
        stack.callback(calls.close)  # first of all, so that nothing waits for a reply
        return OpenModels(
            settings=settings,
            choice=choice,
            url=url,
            calls=calls,
            encoder=encoder,
            target_model=target,
            mutator_model=mutator,
            vocabulary=frozenset(corpus.vocabulary() if corpus else ()),
            resources=stack.pop_all(),
        )


def _choice(settings: ModelSettings) -> BackendChoice:
    """Return the backend and its addresses."""
    return resolve_backend(
        settings.backend,
        target_model=settings.target_model,
        mutator_model=settings.mutator_model,
        embedded_targets=EMBEDDED_TARGETS,
        **{flag: getattr(settings, flag) for flag in ADDRESS_FLAGS},
    )


def _client(settings: ModelSettings, choice: BackendChoice, url: str) -> ClientStack:
    """Return the client of the servers."""
    return build_client(
        choice.urls or url,
        group_of(Calls, settings, cache=_cache_mode(settings, choice)),
        backend=DEFAULT_BACKEND if choice.kind == EMBEDDED else choice.kind,  # the embedded server has its routes
        is_refusal=is_refusal if settings.early_stop else None,
        show=show_status,
    )


def _cache_mode(settings: ModelSettings, choice: BackendChoice) -> CacheMode:
    """Return which replies are cached on disk, with `auto` resolved."""
    if settings.cache != "auto":
        return settings.cache
    if choice.is_embedded:
        return "eval"
    return "off" if BACKENDS.get(choice.kind).is_instant else "all"


def _names(settings: ModelSettings, choice: BackendChoice) -> tuple[str, str]:
    """Return the target and the mutator: those of the settings, else the server's default ones."""
    target, mutator = choice.default_models or (EMBEDDED_TARGETS[0], None)
    target = settings.target_model or target
    return target, settings.mutator_model or mutator or default_mutator(target, embedded=choice.is_embedded)


def _corpus() -> Corpus:
    from query_mutator.embedded.corpus import load_corpus

    return load_corpus()


def _start_embedded(settings: ModelSettings, encoder: CachedEncoder, corpus: Corpus | None, stack: ExitStack) -> str:
    """Start the embedded server in this process and return its address; it shares the encoder and its cache."""
    from query_mutator.embedded.default_models import default_models
    from query_mutator.embedded.server import start_server

    server = start_server(
        default_models(encoder, corpus=corpus),
        encoder=encoder,
        num_parallel=settings.calls_in_flight,
        latency_ms=settings.latency_ms,
        latency_sigma=settings.latency_sigma,
        running_speed=settings.running_speed,
    )
    stack.callback(server.close)
    return server.url


def check_open_files(settings: ModelSettings, *, servers: int, embedded: bool) -> None:
    """Raise the limit on open files if the run needs more; UsageError when this is not allowed.

    A connection to each server is kept for every call in flight; the embedded server holds its other ends here.
    """
    try:
        import resource  # not on Windows
    except ImportError:
        return
    each = 2 if embedded else max(1, servers)
    needed = OTHER_FILES + each * settings.calls_in_flight
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


def encoder_of(settings: ModelSettings, embed: Embed | None, *, light: bool = False) -> CachedEncoder:
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
                f"name this one with --{server.url_flag} in a new run or another command"
            )
