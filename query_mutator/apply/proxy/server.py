"""Who may call the proxy and what one client may take, and the process that serves until a signal.

heads      8 KB a line and 128 headers, within the time limit          400
bodies     --max-body-mb, within the time limit                        408, 413
replies    a client that reads nothing for the time limit is cut
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import ipaddress
import logging
import re
import signal
import socket
from dataclasses import dataclass
from types import FrameType

from aiohttp import web

from query_mutator.errors import UsageError
from query_mutator.llm.client import is_loopback

DISCARD_S = 5.0  # for which a refused client may still send, so that it reads the reply before a reset
BACKLOG = 2048  # clients that come before the server has started wait
PREFLIGHT = "Access-Control-Request-Method"  # the header by which a browser asks before it sends
_EXPOSED = "x-qm-decision, x-qm-operators, x-qm-form, x-qm-model, x-qm-calls, x-qm-overhead-ms, x-qm-id"
#: Pages that may call, and ends of host names that are never those of a public site; both as Ollama has them.
_ORIGINS = re.compile(
    r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0)(:.*)?|(app|file|tauri|vscode-webview|vscode-file)://.*",
    re.IGNORECASE,
)
_LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
_UNREADABLE = logging.getLogger(f"{__name__}.unreadable")  # of aiohttp on bytes that are no request
_UNREADABLE.disabled = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may take."""

    body_bytes: int = 64_000_000  # of a request; uploads of models are forwarded as they come
    requests: int = 1_000  # at once, of those that have arrived
    timeout_s: float = 60.0  # for a head, for a body, between two requests, for a reply that nobody reads
    drain_s: float = 30.0


class Access:
    """Who may call: clients with the key, if there is one, and pages that a browser on this machine shows.

    A page of another site can send requests to a server on the loopback address (its `Origin` header shows that), and
    with DNS rebinding it can even read the replies (its `Host` header has the site's name).
    """

    def __init__(self, *, host: str = "127.0.0.1", api_key: str | None = None) -> None:
        self._checks_host = is_loopback(host)
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self.has_key = api_key is not None  # that clients send, and that the upstream does not get

    def check(self, request: web.Request) -> None:
        """Raise HTTPForbidden or HTTPUnauthorized for a client that may not call."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if self._checks_host and not is_local(host):
            raise web.HTTPForbidden(
                text=f"host {host!r} is not this machine; call the server by its address, as 127.0.0.1"
            )
        if origin not in (None, f"http://{host}", f"https://{host}") and not _ORIGINS.fullmatch(origin):
            raise web.HTTPForbidden(text=f"origin {origin!r} is not allowed")
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._key is not None and not is_preflight(request) and not hmac.compare_digest(given, self._key):
            raise web.HTTPUnauthorized(text="send the key of qm serve --api-key as Authorization: Bearer KEY")


def is_preflight(request: web.Request) -> bool:
    """Return whether a browser asks what a page may send; such a request carries no key."""
    return request.method == "OPTIONS" and PREFLIGHT in request.headers


def cors_headers(request: web.Request) -> dict[str, str]:
    """Return what lets the page that sent a request read the reply, and send what it asks to send."""
    if (origin := request.headers.get("Origin")) is None:
        return {}
    found = {"Access-Control-Allow-Origin": origin, "Vary": "Origin", "Access-Control-Expose-Headers": _EXPOSED}
    if PREFLIGHT in request.headers:
        found["Access-Control-Allow-Methods"] = "GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
        if wanted := request.headers.get("Access-Control-Request-Headers"):
            found["Access-Control-Allow-Headers"] = wanted
    return found


def is_local(host: str) -> bool:
    """Return whether a Host header names this machine or a local network; a client without the header may call."""
    name = host[: host.find("]") + 1].strip("[]") if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name in ("", "localhost", socket.gethostname().lower()) or name.endswith(_LOCAL_SUFFIXES)
    return address.is_loopback or address.is_private or address.is_unspecified


# --- running ---------------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; UsageError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port") from None


class ProxyServer:
    """Serves an application on a listening socket."""

    def __init__(self, application: web.Application, listening: socket.socket, limits: ClientLimits) -> None:
        self._application, self._listening, self._limits = application, listening, limits
        self._runner, self._stopped = asyncio.Runner(), asyncio.Event()
        self._loop = self._runner.get_loop()

    def run(self) -> None:
        """Serve until `stop`; then open requests may finish, `drain_s` at most."""
        with self._runner:
            self._runner.run(self._serve())

    def run_until_signal(self) -> None:
        """Serve until SIGTERM or Ctrl-C, and raise the signal again afterwards; a second one acts at once.

        All that is loaded is left out of garbage collections: one that visits a policy and an encoder stops every
        request for 55 ms.
        """
        caught: list[int] = []

        def stop(number: int, _frame: FrameType | None) -> None:
            caught.append(number)
            for each, handler in before.items():
                signal.signal(each, handler)
            self.stop()

        numbers = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
        before = {each: signal.signal(each, stop) for each in numbers}
        gc.collect()
        gc.freeze()
        self.run()
        for number in caught:
            signal.raise_signal(number)

    def stop(self) -> None:
        """Stop from another thread or a signal handler."""
        self._loop.call_soon_threadsafe(self._stopped.set)

    async def _serve(self) -> None:
        runner = web.AppRunner(
            self._application,
            access_log=None,
            logger=_UNREADABLE,
            handler_cancellation=True,
            keepalive_timeout=self._limits.timeout_s,
            lingering_time=DISCARD_S,
            auto_decompress=False,
            shutdown_timeout=self._limits.drain_s / 2,  # which passes twice, before and after requests are cancelled
        )
        await runner.setup()
        await web.SockSite(runner, self._listening, backlog=BACKLOG).start()
        await self._stopped.wait()
        await runner.cleanup()
