"""From a path and a method to its handler; errors get the body of the interface they belong to."""

from __future__ import annotations

import asyncio
import logging

from query_mutator.embedded.access import Access
from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.http import TEXT_TYPE, Connection, Request, Response
from query_mutator.embedded.routes_ollama import OllamaRoutes
from query_mutator.embedded.routes_openai import OpenAIRoutes, openai_error
from query_mutator.embedded.runners import BUSY
from query_mutator.embedded.stats import Stats
from query_mutator.embedded.wire import ApiError, Exchange, json_response

__all__ = ["Router"]

logger = logging.getLogger(__name__)

#: Routes that call a model; faults strike only these.
MODEL_ROUTES = frozenset(
    {"/api/generate", "/api/chat", "/api/embed", "/api/embeddings", "/v1/chat/completions", "/v1/embeddings"}
)


class Router:
    """The server's handler of requests."""

    def __init__(
        self, ollama: OllamaRoutes, openai: OpenAIRoutes, *, stats: Stats, faults: FaultPlan | None, access: Access
    ) -> None:
        self._access = access
        self._stats = stats
        self._faults = faults
        debug = {"/debug/stats": {"GET": self.show_stats, "DELETE": self.clear_stats}}
        self._routes = ollama.routes() | openai.routes() | debug  # a path that ends in "/*" matches all below it
        self._patterns = [path for path in self._routes if path.endswith("/*")]

    async def __call__(self, request: Request, connection: Connection) -> Response | None:
        """Return the reply to `request`, or None if its route wrote it."""
        path = self._match(request.path)
        try:
            response = await self._reply(path, request, connection)
        except ApiError as error:
            response = _error_reply(request.path, error)
        except asyncio.CancelledError:
            self._stats.cancelled += 1
            raise
        except Exception as error:  # our defect
            if connection.is_streaming:
                raise
            logger.exception("the handler of %s %s failed", request.method, request.path)
            response = _error_reply(request.path, ApiError(500, f"internal error: {type(error).__name__}"))
        self._stats.routes[path] += 1
        self._stats.statuses[str(response.status if response is not None else 200)] += 1
        return response

    async def _reply(self, path: str, request: Request, connection: Connection) -> Response | None:
        refusal = self._access.refusal(request.headers)
        if refusal is not None:
            raise ApiError(403, refusal)
        connection.reply_headers = self._access.headers(request.headers)
        if request.method == "OPTIONS":
            return Response(204, b"", TEXT_TYPE)
        methods = self._routes.get(path)
        if methods is None:
            raise ApiError(404, f"{request.method} {request.path}: 404 page not found")
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            raise ApiError(405, f"{request.method} {request.path}: 405 method not allowed; use {' or '.join(methods)}")
        fault = self._strike(request, connection) if path in MODEL_ROUTES else None
        response = None if fault == "reset" else await route(Exchange(request, connection, fault))
        if fault == "cut" and response is not None:
            return response._replace(body=response.body[: len(response.body) // 2])
        return response

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


def _error_reply(path: str, error: ApiError) -> Response:
    """Return an error in the form of the interface that `path` belongs to."""
    if path.startswith("/v1/"):
        return json_response(openai_error(error), status=error.status)
    if path.startswith("/api/"):
        return json_response({"error": str(error)}, status=error.status)
    return Response(error.status, str(error).encode("utf-8", "backslashreplace"), TEXT_TYPE)
