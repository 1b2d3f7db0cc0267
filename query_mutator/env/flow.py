"""Flows: what a step of an environment asks for, one need at a time.

A *flow* is a generator that yields what it needs (a model call, or embeddings) and is sent the result. A scheduler
advances it; the same flow runs in one thread or among hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

from query_mutator.types import ChatRequest, Completion

__all__ = ["Call", "CallJournal", "CallOutcome", "CallSite", "Encode", "Flow", "Need", "Prepare", "map_needs"]


@dataclass(frozen=True, slots=True)
class CallSite:
    """Which call of a run this is: `step` counts the environment's steps, `phase` names the call within the step."""

    env: int
    step: int
    phase: str
    action: int | None = None  # of the step; None for the first answer of an episode


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of one attempt and the seconds since the first attempt started, which decide about a retry."""

    completion: Completion
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """Request one model call; the flow is sent a Completion. Calls without a site are not journaled."""

    request: ChatRequest
    site: CallSite | None = None


@dataclass(frozen=True, slots=True)
class Encode:
    """Request embeddings of texts [n]; the flow is sent an array [n, D], or the ErrorInfo of a failed server."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Announce texts that will be encoded after the next call; the flow is sent None at once."""

    texts: tuple[str, ...]


Need = Call | Encode | Prepare
Flow = Generator[Need, Any, Any]


def map_needs(flow: Flow, map_need: Callable[[Need], Flow]) -> Flow:
    """Yield what `map_need(need)` yields for each need of `flow` and send it the result; return the flow's result."""
    result: Any = None
    while True:
        try:
            need = flow.send(result)
        except StopIteration as stop:
            return stop.value
        result = yield from map_need(need)


class CallJournal(Protocol):
    """Completed calls of a run, so that a resumed run does not repeat them (see `query_mutator.session.journal`)."""

    def find(self, site: CallSite, attempt: int, request: ChatRequest) -> CallOutcome | None:
        """Return the recorded outcome of an attempt, None when there is none."""

    def holds(self, site: CallSite, attempt: int) -> bool:
        """Return whether an attempt is recorded."""

    def write(self, site: CallSite, attempt: int, request: ChatRequest, outcome: CallOutcome) -> None:
        """Record an attempt; it is durable when this returns."""
