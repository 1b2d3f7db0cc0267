"""Flows: what a step of an environment asks for, one need at a time.

A *flow* is a generator that yields what it needs (a model call, or embeddings) and is sent the result. A scheduler
advances it; the same flow runs in one thread or among hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from query_mutator.types import ChatRequest

__all__ = ["Call", "Encode", "Flow", "Need", "Prepare", "map_needs"]


@dataclass(frozen=True, slots=True)
class Call:
    """Request one model call; the flow is sent a Completion."""

    request: ChatRequest


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
