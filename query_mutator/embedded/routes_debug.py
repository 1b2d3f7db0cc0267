"""Routes that no model server has: what this one counted."""

from __future__ import annotations

from query_mutator.embedded.http import Response
from query_mutator.embedded.routes_ollama import error_reply
from query_mutator.embedded.routing import Exchange, Routes
from query_mutator.embedded.stats import Stats
from query_mutator.embedded.wire import json_response


class DebugRoutes:
    """Handlers of `/debug/...`."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def routes(self) -> Routes:
        """Return the table of routes."""
        handlers = {("GET", "/debug/stats"): self.show, ("DELETE", "/debug/stats"): self.clear}
        return Routes(handlers=handlers, error_reply=error_reply)

    async def show(self, exchange: Exchange) -> Response:
        """Return all counters."""
        return json_response(self._stats.snapshot())

    async def clear(self, exchange: Exchange) -> Response:
        """Return all counters and start them anew."""
        counted = self._stats.snapshot()
        self._stats.clear()
        return json_response(counted)
