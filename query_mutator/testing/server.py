"""The test server: an aiohttp application on an event loop in its own thread, on a port of the loopback address."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Self

from aiohttp import web

from query_mutator.errors import UsageError
from query_mutator.testing.calls import Calls, FaultPlan, ServerSettings
from query_mutator.testing.models import Answer, Echo, Served, TextModel, embedding_model, text_model
from query_mutator.testing.routes import Routes

_HOST = "127.0.0.1"
_BACKLOG = 2048  # clients that connect within one turn of the event loop; more than that have to try again


class StubServer:
    """A running server; `url` and `port` say where, `close()` stops it and leaves no thread and no socket."""

    def __init__(self, models: Iterable[Served], settings: ServerSettings, faults: FaultPlan | None = None) -> None:
        self._models = tuple(models)
        self._calls = Calls(settings)
        self._faults = faults
        self._loop = asyncio.SelectorEventLoop()  # whatever loop the process prefers: a Ray worker's is uvloop's
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-server", daemon=True)
        self._thread.start()
        try:
            self._runner = asyncio.run_coroutine_threadsafe(self._start(settings.port), self._loop).result()
        except (OSError, OverflowError) as error:
            self._end()
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"cannot listen on {_HOST}:{settings.port} ({why}); choose another --port") from None
        self.port: int = self._runner.addresses[0][1]
        self.url = f"http://{_HOST}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Return the counters of `GET /debug/stats`."""
        return self._calls.stats.snapshot()

    def close(self) -> None:
        """Cancel all calls, close all sockets and join all threads; idempotent."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
            self._end()

    async def _start(self, port: int) -> web.AppRunner:
        routes = Routes(self._models, self._calls, faults=self._faults)
        runner = web.AppRunner(routes.application(), access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, _HOST, port, backlog=_BACKLOG).start()
        return runner

    async def _stop(self) -> None:
        for connection in self._runner.server.connections if self._runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()  # which cancels its call
        await self._runner.cleanup()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for model in self._models:
            if model.threads is not None:
                model.threads.shutdown()


def start_server(
    models: Mapping[str, TextModel | Answer] | Iterable[TextModel],
    *,
    encoder: Any = None,
    faults: FaultPlan | None = None,
    **settings: Any,
) -> StubServer:
    """Start a server with these models and `echo`; `encoder` serves `all-minilm`, `settings` are ServerSettings.

    UsageError for a setting out of range or a port that is not available.
    """
    try:
        checked = ServerSettings(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from None
    named = dict(models) if isinstance(models, Mapping) else {model.name: model for model in models}
    named.setdefault(Echo.name, Echo())
    served = [text_model(name, model) for name, model in named.items()]
    return StubServer([*served, *([embedding_model(encoder)] if encoder else [])], checked, faults)
