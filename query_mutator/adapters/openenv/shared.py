"""What the sessions of a server share, and the operator that is a client's own words; needs nothing of OpenEnv."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol

from query_mutator.env.engine import EpisodeEngine
from query_mutator.env.flow import Flow
from query_mutator.env.task import Task
from query_mutator.errors import UsageError
from query_mutator.llm.client import Client
from query_mutator.llm.retry import RetryPolicy
from query_mutator.operators import GUARDS, OperatorContext
from query_mutator.types import ErrorInfo

__all__ = ["REWRITE", "OwnWords", "RewritingEnv", "Shared"]

REWRITE = "rewrite"  # the action whose text is the client's own


class RewritingEnv(Protocol):
    """What a session needs of `rl_query_mutator_env.QueryMutationEnv`, whose `on_failure` must be "mask"."""

    engine: EpisodeEngine | None
    last_error: ErrorInfo | None

    @property
    def has_ended(self) -> bool: ...

    def reset_flow(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Flow: ...

    def step_flow(self, action: int) -> Flow: ...


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the sessions of a server have in common; `make` returns an environment on a task."""

    task: Task
    make: Callable[[Task], RewritingEnv]
    client: Client  # of single attempts; retries are waited for without a thread
    retry_policy: RetryPolicy
    threads: Executor  # as many as calls in flight
    seed: int = 0
    step_timeout_s: float = 55.0  # of a step or reset; OpenEnv's client waits 60 s
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of sessions, in the order of their first reset

    def __post_init__(self) -> None:
        if REWRITE in self.task.actions:
            raise UsageError(f"{REWRITE!r} is the action whose text is the client's own; leave that operator out")


class OwnWords:
    """The operator of the action `rewrite`: its rewrite is the text that the client sent."""

    name, summary, guards = REWRITE, "Replace the question by the client's own wording.", GUARDS

    def __init__(self) -> None:
        self.text: str | None = None  # of the current step

    def rewrite(self, question: str, *, context: OperatorContext) -> str:
        """Return the client's text."""
        return question if self.text is None else self.text

    def render(self, question: str, *, context: OperatorContext) -> str:
        """Return the question: no prompt is ever sent."""
        return question
