"""What the routes and what answers requests to virtual models agree on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from query_mutator.apply.proxy.requests import ChatCall
from query_mutator.apply.proxy.upstream import Header

__all__ = ["Answerer", "ClientLimits", "Reply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may take."""

    body_bytes: int = 64_000_000  # of a request; uploads of models are forwarded as they come
    requests: int = 1_000  # at once, of those that have arrived
    request_timeout_s: float = 60.0  # in which a head must arrive, and a body unless it arrives at a fair rate
    idle_timeout_s: float = 75.0  # of a connection between two requests, or whose client reads nothing
    drain_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The beginning of a reply, and the body as it arrives."""

    status: int
    headers: list[Header]
    body: AsyncIterator[bytes]


class Answerer(Protocol):
    """Answers requests to virtual models."""

    async def answer(self, call: ChatCall, headers: list[Header], path: str) -> Reply:
        """Return the reply; UpstreamError and UpstreamGone are the app's to report."""

    async def rewrite(self, call: ChatCall, headers: list[Header]) -> dict[str, Any]:
        """Return what would be asked in the place of the call's question, without asking it."""

    async def close(self) -> None:
        """Stop what runs in the background."""
