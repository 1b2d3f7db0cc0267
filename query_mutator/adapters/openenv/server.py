"""Run the application under uvicorn, with bounds on what a client takes: a connection has one request or one session.

uvicorn waits for a request without end, and for a client that does not read. Here a request must arrive within
REQUEST_S, and a client that answers no ping is cut off.
"""

from __future__ import annotations

import asyncio

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from query_mutator.adapters.openenv.app import MAX_MESSAGE_BYTES, make_app
from query_mutator.adapters.openenv.shared import Shared
from query_mutator.embedded.access import Access
from query_mutator.embedded.http import most_open_files

__all__ = ["make_app", "make_server"]

REQUEST_S = 30.0  # in which a request must have arrived
PING_S = 120.0  # in which a client must answer a ping; a trainer may be busy with an update
MORE_CONNECTIONS = 256  # than sessions: HTTP requests, and clients that are told that there is no session left
SHUTDOWN_S = 1  # for steps in progress to finish after SIGTERM or Ctrl-C


class _Http(H11Protocol):
    """A connection for one request. It is closed at once if there are too many, later if no whole request arrives."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) >= (self.limit_concurrency or 0):
            transport.abort()
        else:
            self.loop.call_later(REQUEST_S, self._abort_unless_complete)

    def on_response_complete(self) -> None:
        self.transport.close()
        self.loop.call_later(REQUEST_S, self.transport.abort)  # for a client that does not read

    def _abort_unless_complete(self) -> None:
        has_request = self.cycle is not None and not self.cycle.more_body
        if self.transport.get_protocol() is self and not has_request:  # else it is a WebSocket
            self.transport.abort()


class _WebSocket(WebSocketsSansIOProtocol):
    """A session's connection, which does not wait until a client that answers no ping reads."""

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()


def make_server(shared: Shared, *, host: str, max_sessions: int, session_timeout_s: float) -> uvicorn.Server:
    """Return the server of sessions, for a socket that listens on `host`."""
    connections = max_sessions + MORE_CONNECTIONS
    app = make_app(shared, max_sessions=max_sessions, session_timeout_s=session_timeout_s, access=Access(bound=[host]))
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_Http,
            ws=_WebSocket,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_ping_timeout=PING_S,
            ws_per_message_deflate=False,
            limit_concurrency=min(connections, most_open_files() // 2 or connections),
            timeout_graceful_shutdown=SHUTDOWN_S,
            proxy_headers=False,
            server_header=False,
            log_config=None,
            access_log=False,
        )
    )
