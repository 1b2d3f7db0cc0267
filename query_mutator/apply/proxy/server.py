"""The proxy as a server: the HTTP layer of the embedded server with the proxy's limits, until a signal."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from query_mutator.apply.proxy.app import ProxyApp
from query_mutator.embedded.http import BACKLOG, MAX_BODY_BYTES, Clients, listen, most_open_files

__all__ = ["ProxyServer", "run_frozen", "running"]


class ProxyServer:
    """Serves the proxy on a listening socket."""

    def __init__(self, app: ProxyApp, listening: socket.socket) -> None:
        self._app, self._listening = app, listening
        self._loop = _new_loop()
        self._stopped = asyncio.Event()

    def run(self) -> None:
        """Serve until `stop`; then open requests may finish, `drain_s` at most."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    def stop(self) -> None:
        """Stop from another thread or a signal handler."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _serve(self) -> None:
        limits = self._app.limits
        clients = Clients(
            handler=self._app,
            request_timeout_s=limits.request_timeout_s,
            idle_timeout_s=limits.idle_timeout_s,
            max_bodies_bytes=limits.body_bytes + MAX_BODY_BYTES,
            max_connections=most_open_files() // 2,  # a call to the upstream takes another file
            is_incremental=True,
        )
        listener = await self._loop.create_server(clients.connect, sock=self._listening, backlog=BACKLOG)
        clients.keep_sweeping()
        await self._stopped.wait()
        listener.close()
        await clients.drain(limits.drain_s)
        await self._app.close()


def run_frozen(app: ProxyApp, listening: socket.socket) -> None:
    """Serve until a signal, with all that is loaded left out of garbage collections.

    One that visits a policy and an encoder stops every request for 55 ms.
    """
    server = ProxyServer(app, listening)
    gc.collect()
    gc.freeze()
    try:
        with _stopped_by_signals(server):
            server.run()
    finally:
        gc.unfreeze()


@contextmanager
def running(app: ProxyApp, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in a thread and yield the address."""
    listening = listen(host, port)
    server = ProxyServer(app, listening)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.stop()
        thread.join()
        listening.close()


@contextmanager
def _stopped_by_signals(server: ProxyServer) -> Iterator[None]:
    """Stop the server at SIGTERM or Ctrl-C, and raise the signal again afterwards; a second one acts at once."""
    numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}
    caught: list[int] = []  # numbers of signals

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    def stop(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        restore()
        server.stop()

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        restore()
    for again in caught:
        signal.raise_signal(again)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where it is installed."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.SelectorEventLoop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
