"""From a path and a method to its handler; errors get the body of the interface they belong to."""

from __future__ import annotations

import asyncio

from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.http import TEXT_TYPE, Connection, Request, Response
from query_mutator.embedded.routes_ollama import OllamaRoutes
from query_mutator.embedded.routes_openai import OpenAIRoutes, openai_error
from query_mutator.embedded.runners import BUSY
from query_mutator.embedded.stats import Stats
from query_mutator.embedded.wire import ApiError, Exchange, json_response

__all__ = ["Router"]

#: Routes that call a model; faults strike only these.
MODEL_ROUTES = frozenset(
    {"/api/generate", "/api/chat", "/api/embed", "/api/embeddings", "/v1/chat/completions", "/v1/embeddings"}
)


class Router:
    """The server's handler of requests."""

    def __init__(self, ollama: OllamaRoutes, openai: OpenAIRoutes, *, stats: Stats, faults: FaultPlan | None) -> None:
        self._stats = stats
        self._faults = faults
        debug = {"/debug/stats": {"GET": self.show_stats, "DELETE": self.clear_stats}}
        self._routes = ollama.routes() | openai.routes() | debug  # a path that ends in "/*" matches all below it
        self._patterns = [path for path in self._routes if path.endswith("/*")]

    async def __call__(self, request: Request, connection: Connection) -> Response | None:
        """Return the reply to `request`, or None if its route wrote it."""
        path = self._match(request.path)
        methods = self._routes.get(path)
        if methods is None:
            return self._counted(path, Response(404, b"404 page not found", TEXT_TYPE))
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            return self._counted(path, Response(405, b"405 method not allowed", TEXT_TYPE))
        try:
            fault = self._strike(request, connection) if path in MODEL_ROUTES else None
            response = None if fault == "reset" else await route(Exchange(request, connection, fault))
            if fault == "cut" and response is not None:
                response = response._replace(body=response.body[: len(response.body) // 2])
        except ApiError as error:
            body = openai_error(error) if path.startswith("/v1/") else {"error": str(error)}
            response = json_response(body, status=error.status)
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            raise
        return self._counted(path, response)

    async def show_stats(self, exchange: Exchange) -> Response:
        """Return all counters."""
        return json_response(self._stats.snapshot())

    async def clear_stats(self, exchange: Exchange) -> Response:
        """Return all counters and reset them."""
        counted = self._stats.snapshot()
        self._stats.clear()
        return json_response(counted)

    def _match(self, path: str) -> str:
        if path in self._routes:
            return path
        return next((pattern for pattern in self._patterns if path.startswith(pattern[:-1])), "other")

    def _strike(self, request: Request, connection: Connection) -> str | None:
        """Return the fault for the rest of the call, or inject it here if it ends the call."""
        if self._faults is None:
            return None
        attempt = request.headers.get("x-stainless-retry-count", "")
        fault = self._faults.pick(request.body, attempt=int(attempt) if attempt.isdecimal() else None)
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
