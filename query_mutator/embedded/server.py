"""The embedded server: an event loop in a thread of its own behind a loopback port, speaking Ollama and OpenAI.

    connection -> Router -> OllamaRoutes | OpenAIRoutes | DebugRoutes -> Engine -> Runners -> BatchWorker of the model

Everything but a model's work runs on the one event loop, so no state here needs a lock.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from query_mutator.embedded.catalogue import Catalogue
from query_mutator.embedded.engine import Engine
from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.http import Connection
from query_mutator.embedded.latency import Latency
from query_mutator.embedded.models import Echo
from query_mutator.embedded.routes_debug import DebugRoutes
from query_mutator.embedded.routes_ollama import OllamaRoutes
from query_mutator.embedded.routes_openai import OpenAIRoutes
from query_mutator.embedded.routing import Router
from query_mutator.embedded.runners import Runners
from query_mutator.embedded.stats import Stats
from query_mutator.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from query_mutator.embedded.models import EmbeddedModel
    from query_mutator.encoder import Encoder

_BACKLOG = 2048  # more clients than this connecting within one turn of the loop have to try again


class EmbeddedServer:
    """A running server; `url` and `port` say where, `close()` stops it and leaves no thread and no socket."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        host: str,
        port: int,
        num_parallel: int,
        max_queue: int,
        load_s: float,
        latency: Latency,
        faults: FaultPlan | None,
    ) -> None:
        self._catalogue = catalogue
        self._stats = Stats()
        self._connections: set[Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Lock()
        runners = Runners(num_parallel=num_parallel, max_queue=max_queue, load_s=load_s, stats=self._stats)
        engine = Engine(runners, latency=latency, stats=self._stats)
        router = Router(
            OllamaRoutes(catalogue, runners, engine).routes(),
            OpenAIRoutes(catalogue, engine).routes(),
            DebugRoutes(self._stats).routes(),
            stats=self._stats,
            faults=faults,
        )
        try:
            self._listener = self._loop.run_until_complete(self._listen(router, host, port))
        except (OSError, OverflowError) as error:
            self._loop.close()
            raise UsageError(_why_not_listening(host, port, error)) from error
        self.port: int = self._listener.sockets[0].getsockname()[1]
        self.url = f"http://{_in_url(host)}:{self.port}"
        self._thread = threading.Thread(target=self._run, name="embedded-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Return what `GET /debug/stats` shows."""
        return self._stats.snapshot()

    @property
    def open_connections(self) -> int:
        """Return how many clients are connected."""
        return len(self._connections)

    def close(self) -> None:
        """Cancel all calls, close all sockets and join all threads; a second call does nothing."""
        with self._closing:
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.run_until_complete(self._shut_down())
            self._catalogue.close()
            self._loop.close()

    async def _listen(self, router: Router, host: str, port: int) -> asyncio.Server:
        def connect() -> Connection:
            return Connection(router, self._connections)

        return await self._loop.create_server(connect, host, port, backlog=_BACKLOG)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _shut_down(self) -> None:
        self._listener.close()
        for connection in tuple(self._connections):
            connection.transport.abort()
        await self._listener.wait_closed()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._loop.shutdown_default_executor()  # it looked up the host's address


def start_server(
    models: Mapping[str, EmbeddedModel] | Iterable[EmbeddedModel],
    *,
    encoder: Encoder | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    num_parallel: int = 1,
    max_queue: int = 512,
    load_ms: float = 0.0,
    latency_ms: float = 0.0,
    latency_sigma: float = 0.0,
    running_speed: float = 0.0,
    seed: int = 0,
    faults: FaultPlan | None = None,
) -> EmbeddedServer:
    """Start a server with these models and `echo`; `encoder` serves `all-minilm`; port 0 takes a free one.

    Raises UsageError for a setting out of range or a port that cannot be had.
    """
    if num_parallel < 1:
        raise UsageError(f"num_parallel must be at least 1, not {num_parallel}")
    if max_queue < 1:
        raise UsageError(f"max_queue must be at least 1, not {max_queue}")
    named = dict(models) if isinstance(models, Mapping) else {model.name: model for model in models}
    latency = Latency.from_settings(latency_ms=latency_ms, sigma=latency_sigma, running_speed=running_speed, seed=seed)
    return EmbeddedServer(
        Catalogue.of(named | {"echo": named.get("echo") or Echo()}, encoder),
        host=host,
        port=port,
        num_parallel=num_parallel,
        max_queue=max_queue,
        load_s=load_ms / 1000,
        latency=latency,
        faults=faults,
    )


def _in_url(host: str) -> str:
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _why_not_listening(host: str, port: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what listens there or choose another with --port"
    return f"cannot listen on {host}:{port}: {error}"
