"""`qm env serve`: the environment as an OpenEnv server, where each client has a session of its own."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from query_mutator.adapters.openenv.shared import Shared
from query_mutator.bounds import Parallel, Seconds, defaults, group_of
from query_mutator.cli.console import note
from query_mutator.cli.flags import parse_flags
from query_mutator.embedded.access import Access
from query_mutator.embedded.http import listen
from query_mutator.env.task import Task
from query_mutator.errors import UsageError
from query_mutator.evaluation.heldout import embed_questions
from query_mutator.llm.flags import ServerAddressFlags
from query_mutator.session.dataset import split_dataset
from query_mutator.session.models import open_models
from query_mutator.session.task import make_task
from query_mutator.settings.episode import Episode, Operators, TaskSettings
from query_mutator.settings.listening import Listening
from query_mutator.settings.models import ModelSettings, Sampling
from query_mutator.settings.questions import Questions, Reward
from rl_query_mutator_env import QueryMutationEnv

__all__ = ["EnvServeFlags", "application", "env_serve", "sharing"]


@dataclass(frozen=True, kw_only=True)
@defaults(port=8000)
class EnvServeFlags(Listening, ServerAddressFlags, ModelSettings, Questions, Operators, Episode, Reward, Sampling):
    """Serve the environment to OpenEnv's clients: training questions, typed actions, a session for each client.

    A client chooses operators, forms, ask, undo or submit by name, or rewrites in words of its own.
    """

    FIRST: ClassVar[tuple[str, ...]] = (
        "host", "port", "max_sessions", "backend", "ollama_url", "gguf", "target_model", "mutator_model", "encoder",
        "dataset", "operators", "forms", "ask", "max_episode_steps", "batch_size", "timeout_s", "seed",
    )  # fmt: skip

    max_sessions: Parallel = 256
    """Most sessions at once; a client more is told so."""
    session_timeout_s: Seconds = 1800.0
    """Seconds after which a session that takes no step ends."""
    step_timeout_s: Seconds = 55.0
    """Most seconds of a step or reset, which fails then; OpenEnv's client waits 60."""


def env_serve(flags: EnvServeFlags) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    server = _openenv()
    with listen(flags.host, flags.port) as listening, sharing(flags) as shared:
        host, port = listening.getsockname()[:2]
        print(f"listening on http://{host}:{port}", flush=True)
        server.make_server(
            shared, host=host, max_sessions=flags.max_sessions, session_timeout_s=flags.session_timeout_s
        ).run(sockets=[listening])


def application() -> Any:
    """Return the ASGI application for `uvicorn module:app`, with the settings of ./qm.toml, until the process ends."""
    flags, stack = parse_flags(EnvServeFlags, [], prog="qm env serve", table="env serve"), ExitStack()
    atexit.register(stack.close)
    return _openenv().make_app(
        stack.enter_context(sharing(flags)),
        max_sessions=flags.max_sessions,
        session_timeout_s=flags.session_timeout_s,
        access=Access(bound=["0.0.0.0"]),  # uvicorn knows where it listens
    )


def _openenv() -> ModuleType:
    """Return the module that serves; UsageError where OpenEnv is not installed."""
    try:
        from query_mutator.adapters.openenv import server
    except ImportError as error:
        name = (error.name or str(error)).partition(".")[0]
        raise UsageError(f"qm env serve needs {name}: pip install 'query-mutator[openenv]'") from None
    return server


@contextmanager
def sharing(flags: EnvServeFlags) -> Iterator[Shared]:
    """Yield what all sessions share, with the models running."""
    with open_models(flags, light=True) as models, ThreadPoolExecutor(flags.calls_in_flight) as threads:
        note(models.choice.reason)
        settings = group_of(TaskSettings, flags, validation_fold="none")
        train = split_dataset(settings).train
        if not train:
            raise UsageError(f"{flags.dataset}: no training question, all are held out; add more questions")
        embed_questions(models.encoder, train)

        def make(task: Task) -> QueryMutationEnv:
            return QueryMutationEnv(task, client=models.calls.client, retry_policy=models.retry_policy)

        try:
            yield Shared(
                task=make_task(models, settings, train),
                make=make,
                client=models.calls.client,
                retry_policy=models.retry_policy,
                threads=threads,
                seed=flags.seed,
                step_timeout_s=flags.step_timeout_s,
            )
        finally:
            models.calls.close()  # first, so that no thread waits for a reply
