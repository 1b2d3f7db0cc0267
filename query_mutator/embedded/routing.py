"""From a path and a method to its handler; unknown paths, wrong methods and failures get Ollama's replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.http import TEXT_TYPE, Connection, Request, Response
from query_mutator.embedded.runners import BUSY
from query_mutator.embedded.stats import Stats
from query_mutator.embedded.wire import ApiError


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request, the connection it came on, and the kind of fault its reply is to suffer."""

    request: Request
    connection: Connection
    fault: str | None = None


Route = Callable[[Exchange], Awaitable[Response | None]]
ErrorReply = Callable[[ApiError], Response]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """One family of routes: `(method, path) -> handler`, how its errors look, and which of them faults may strike.

    A path that ends in "/*" stands for everything below it.
    """

    handlers: Mapping[tuple[str, str], Route]
    error_reply: ErrorReply
    struck: frozenset[str] = frozenset()


class Router:
    """The server's handler of requests."""

    def __init__(self, *families: Routes, stats: Stats, faults: FaultPlan | None) -> None:
        self._stats = stats
        self._faults = faults
        self._table: dict[str, dict[str, tuple[Route, Routes]]] = {}
        for family in families:
            for (method, path), route in family.handlers.items():
                self._table.setdefault(path, {})[method] = (route, family)
        self._patterns = [path for path in self._table if path.endswith("/*")]

    async def __call__(self, request: Request, connection: Connection) -> Response | None:
        """Return the reply to `request`, or None when its route wrote it."""
        path, methods = self._methods(request.path)
        if not methods:
            return self._counted(path, Response(404, b"404 page not found", TEXT_TYPE))
        found = methods.get(request.method) or (methods.get("GET") if request.method == "HEAD" else None)
        if found is None:
            return self._counted(path, Response(405, b"405 method not allowed", TEXT_TYPE))
        route, family = found
        try:
            fault = self._strike(request, connection) if path in family.struck else None
            response = None if fault == "reset" else await route(Exchange(request, connection, fault))
        except ApiError as error:
            response = family.error_reply(error)
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            raise
        return self._counted(path, response)

    def _methods(self, path: str) -> tuple[str, dict[str, tuple[Route, Routes]]]:
        if path in self._table:
            return path, self._table[path]
        for pattern in self._patterns:
            if path.startswith(pattern[:-1]):
                return pattern, self._table[pattern]
        return "other", {}

    def _strike(self, request: Request, connection: Connection) -> str | None:
        """Return the fault that the rest of the call is to suffer; those that end it here are carried out."""
        if self._faults is None:
            return None
        told = request.headers.get("x-stainless-retry-count", "")
        fault = self._faults.pick(request.body, attempt=int(told) if told.isdecimal() else None)
        if fault is None:
            return None
        self._stats.faults[fault] += 1
        if fault == "500":
            raise ApiError(500, "an error was encountered while running the model: scripted fault")
        if fault == "503":
            raise ApiError(503, BUSY)
        if fault == "reset":
            connection.reset()
        return fault

    def _counted(self, path: str, response: Response | None) -> Response | None:
        self._stats.routes[path] += 1
        self._stats.statuses[str(response.status if response is not None else 200)] += 1
        return response
