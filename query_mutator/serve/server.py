"""The proxy's HTTP server: uvicorn with the proxy's limits."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from query_mutator.errors import UsageError
from query_mutator.serve.app import ProxyApp

__all__ = ["bind", "make_server", "run_frozen", "running"]


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; UsageError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(2048)  # clients that come before the server has started wait
    except OSError as error:
        found.close()
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port") from None
    return found


def make_server(app: ProxyApp) -> uvicorn.Server:
    """Return the server; SIGTERM and Ctrl-C let the requests that it has finish, `drain_s` at most."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(app.limits.drain_s)),
    )
    return uvicorn.Server(config)


def run_frozen(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serve until a signal, with all that is loaded left out of garbage collections.

    One that visits a policy and an encoder stops every request for 55 ms.
    """
    gc.collect()
    gc.freeze()
    try:
        server.run(sockets=[listening])
    finally:
        gc.unfreeze()


@contextmanager
def running(app: ProxyApp, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve in a thread and yield the address."""
    listening = bind(host, port)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    try:
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()
