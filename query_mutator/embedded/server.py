"""The embedded server: an event loop in its own thread behind a loopback port, with Ollama's and OpenAI's interface.

    connection -> Router -> OllamaRoutes | OpenAIRoutes -> Engine -> Runners -> BatchWorker of the model

Everything except a model's work runs on the one event loop, so no state here needs a lock.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, get_args

from annotated_types import Ge, Le

from query_mutator.bounds import Million, Seconds, Seed, Wait
from query_mutator.embedded.access import DEFAULT_ORIGINS, Access
from query_mutator.embedded.catalogue import Catalogue, Entry
from query_mutator.embedded.context import OllamaVersion
from query_mutator.embedded.engine import Engine
from query_mutator.embedded.faults import FaultPlan
from query_mutator.embedded.http import Clients, detect_vanished_clients, why_not_listening
from query_mutator.embedded.latency import Latency
from query_mutator.embedded.models import Echo, EmbeddedModel
from query_mutator.embedded.routes_ollama import OllamaRoutes
from query_mutator.embedded.routes_openai import OpenAIRoutes
from query_mutator.embedded.routing import Router
from query_mutator.embedded.runners import Runners
from query_mutator.embedded.stats import Stats
from query_mutator.errors import UsageError
from query_mutator.registry import check_known
from query_mutator.settings.listening import Listening
from query_mutator.settings.models import Simulation

if TYPE_CHECKING:
    from query_mutator.encoder import Encoder

__all__ = ["EmbeddedServer", "ServerSettings", "start_server"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BACKLOG = 2048  # clients that connect within one turn of the event loop; more than that have to try again


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Listening, Simulation):
    """How a server answers; a setting out of range is a ValueError."""

    num_parallel: Annotated[int, Ge(1), Le(4096)] = 1
    """Slots of each model."""
    max_queue: Million = 512
    """Requests that may wait while a model loads."""
    load_ms: Wait = 0.0
    """Time that a model takes to load, and to load again with other options."""
    seed: Seed = 0
    """Seed of latencies and faults."""
    origins: tuple[str, ...] = ()
    """Web origins whose pages may call, besides those of this machine; * stands for any text."""
    request_timeout_s: Seconds = 60.0
    """Seconds in which a request must arrive; a connection without one is closed after ten times as long."""
    behave_as: OllamaVersion = "0.24"
    """The Ollama version to mimic where a prompt or reply does not fit the context; 0.9 cuts prompts silently."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("Ollama version", self.behave_as, get_args(OllamaVersion))

    def latency(self) -> Latency:
        """Return the time a call takes in its slot."""
        return Latency.from_settings(
            latency_ms=self.latency_ms, sigma=self.latency_sigma, running_speed=self.running_speed, seed=self.seed
        )


class EmbeddedServer:
    """A running server; `url` and `port` say where, `close()` stops it and leaves no thread and no socket."""

    def __init__(self, catalogue: Catalogue, settings: ServerSettings, faults: FaultPlan | None = None) -> None:
        self._catalogue = catalogue
        self._stats = stats = Stats()
        self._closing = threading.Lock()
        self._clients: Clients
        self._quiet_until_s = 0.0
        runners = Runners(
            num_parallel=settings.num_parallel,
            max_queue=settings.max_queue,
            load_s=settings.load_ms / 1000,
            stats=stats,
        )
        engine = Engine(runners, latency=settings.latency(), stats=stats, behave_as=settings.behave_as)
        ollama, openai = OllamaRoutes(catalogue, runners, engine), OpenAIRoutes(catalogue, engine)
        self._loop = asyncio.SelectorEventLoop()  # whatever loop the process prefers: a Ray worker's is uvloop's
        self._loop.set_exception_handler(self._on_loop_error)
        try:
            self._listener = self._run(
                self._loop.create_server(
                    lambda: self._clients.connect(), settings.host, settings.port, backlog=_BACKLOG, start_serving=False
                )
            )
            bound = [listening.getsockname() for listening in self._listener.sockets]
            origins = (*settings.origins, *DEFAULT_ORIGINS)
            access = Access(bound=[address[0] for address in bound], origins=origins)
            router = Router(ollama, openai, stats=stats, faults=faults, access=access)
            self._clients = Clients(handler=router, request_timeout_s=settings.request_timeout_s)
            self._run(self._listener.start_serving())
        except (OSError, OverflowError) as error:
            self._loop.close()
            raise UsageError(why_not_listening(settings.host, settings.port, error)) from error
        for listening in self._listener.sockets:
            detect_vanished_clients(listening)
        self._loop.call_soon(self._clients.keep_sweeping)
        self.port: int = bound[0][1]
        self.url = f"http://{_in_url(settings.host)}:{self.port}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="embedded-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Return the counters of `GET /debug/stats`."""
        return self._stats.snapshot()

    @property
    def open_connections(self) -> int:
        """Return the number of connected clients."""
        return len(self._clients.connections)

    def close(self) -> None:
        """Cancel all calls, close all sockets and join all threads; idempotent."""
        with self._closing:
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._run(self._shut_down())
            self._catalogue.close()
            self._loop.close()

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        """Return the result of a step, in a thread of its own where the caller's runs a loop, as a notebook's does."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(step)
        with ThreadPoolExecutor(1, thread_name_prefix="embedded-server") as thread:
            return thread.submit(self._loop.run_until_complete, step).result()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report that no connection can be accepted on one line a second; asyncio tries thousands of times in it."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif loop.time() > self._quiet_until_s:
            self._quiet_until_s = loop.time() + 1.0
            logger.warning("too many open files for another connection (%s); raise `ulimit -n`", error.strerror)

    async def _shut_down(self) -> None:
        # Without files for connections asyncio still has attempts to accept them scheduled, on a closed socket.
        self._loop.set_exception_handler(lambda _, context: logger.debug("while closing: %s", context["message"]))
        self._listener.close()
        for connection in tuple(self._clients.connections):
            connection.transport.abort()
        await self._listener.wait_closed()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._loop.shutdown_default_executor()  # it resolved the host's address


def start_server(
    models: Mapping[str, EmbeddedModel] | Iterable[EmbeddedModel],
    *,
    encoder: Encoder | None = None,
    faults: FaultPlan | None = None,
    **settings: Any,
) -> EmbeddedServer:
    """Start a server with these models and `echo`; `encoder` serves `all-minilm`, `settings` are ServerSettings.

    Raises UsageError for a setting out of range or a port that is not available.
    """
    try:
        checked = ServerSettings(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from None
    named = dict(models) if isinstance(models, Mapping) else {model.name: model for model in models}
    named.setdefault(Echo.name, Echo())
    entries = [Entry.of_text_model(name, model) for name, model in named.items()]
    if encoder is not None:
        entries.append(Entry.of_encoder(encoder))
    return EmbeddedServer(Catalogue(entries), checked, faults)


def _in_url(host: str) -> str:
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
