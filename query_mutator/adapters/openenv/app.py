"""OpenEnv's FastAPI application of the environment, and the checks it lacks: who may call, and how long a request is.

Its WebSocket sessions are bounded by `max_sessions`, and an idle one ends. Its HTTP requests have no bound: here as
many are served at once as there may be sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.types import ConcurrencyConfig
from starlette.websockets import WebSocketDisconnect

from query_mutator.adapters.openenv.environment import QueryRewritingEnvironment
from query_mutator.adapters.openenv.models import QueryRewritingAction, QueryRewritingObservation
from query_mutator.adapters.openenv.shared import Shared
from query_mutator.embedded.access import Access

__all__ = ["MAX_MESSAGE_BYTES", "Bounded", "make_app"]

MAX_MESSAGE_BYTES = 200_000  # of a request's body or a WebSocket message

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def make_app(shared: Shared, *, max_sessions: int, session_timeout_s: float, access: Access) -> Bounded:
    """Return the ASGI application whose sessions share what `shared` has."""

    def new_session() -> QueryRewritingEnvironment:
        return QueryRewritingEnvironment(shared)

    app = create_fastapi_app(
        new_session,
        QueryRewritingAction,
        QueryRewritingObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=max_sessions, session_timeout=session_timeout_s),
    )
    return Bounded(app, access=access, max_requests=max_sessions)


class Bounded:
    """ASGI middleware: refuses pages of other sites, long bodies, and more than `max_requests` requests at once."""

    def __init__(self, app: Callable[..., Awaitable[None]], *, access: Access, max_requests: int) -> None:
        self._app, self._access = app, access
        self._places = asyncio.Semaphore(max_requests)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it with a status and a line that says why."""
        # No errors: OpenEnv closes a WebSocket that its client has closed; uvicorn cancels at its end what is open.
        with contextlib.suppress(WebSocketDisconnect, asyncio.CancelledError):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if (refusal := self._access.refusal(headers)) is not None:
            return await _refuse(scope, send, 403, refusal)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        body = await _read(receive)
        if body is None:
            return await _refuse(scope, send, 413, f"a request may have {MAX_MESSAGE_BYTES} bytes")
        if self._places.locked():
            return await _refuse(scope, send, 503, "too many requests at once")
        async with self._places:
            return await self._app(scope, _once(body, receive), send)


async def _read(receive: Receive) -> bytes | None:
    """Return a request's body, None for one that is too long."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_MESSAGE_BYTES:
            return None
    return bytes(body)


def _once(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, then what `receive` gives."""
    waiting = [{"type": "http.request", "body": body}]

    async def received() -> Message:
        return waiting.pop() if waiting else await receive()

    return received


async def _refuse(scope: Message, send: Send, status: int, why: str) -> None:
    """Send a status and why as JSON; before the handshake of a WebSocket too."""
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": f"{kind}.start", "status": status, "headers": headers})
    await send({"type": f"{kind}.body", "body": json.dumps({"error": why}).encode()})
