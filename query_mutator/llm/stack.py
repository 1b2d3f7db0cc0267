"""The client of a run, composed by wrapping; its repr prints the nesting:

Cache(Limit(Pool([Ollama('http://…'), Ollama('http://…')])))

`Limit` is one bound on the calls in flight, shared by all; fixed, or found from the times the server reports:

    wait ratio = time the server queued calls / time it worked on them      (n calls on s slots: n / s - 1)

An adaptive limit increases additively and decreases multiplicatively, as TCP does. Its window is as many calls as the
limit allows at once; calls that started under another limit are ignored.

`Pool` sends a call to the server with the fewest calls in flight, and away from one that fails. A server that refuses a
connection, or fails three times in a row, rests for a while, longer every time; then one call is let through. A call
that could not connect, got 503 or 429, or found no memory goes to the next server at once. If nothing answers any more
(a restart, an update, out of memory), calls wait until a server does, and are made again; this costs no attempt. A
server that answers with an error, or that never answered, is not waited for.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from query_mutator.errors import BackendError, ServerDownError, UsageError
from query_mutator.llm.backends import BACKENDS, DEFAULT_BACKEND, backend_for
from query_mutator.llm.cache import Cache
from query_mutator.llm.client import CANCELLATION, Client, ClientWrapper, ModelServer, Retry, RetryPolicy
from query_mutator.llm.openai import OpenAIBackend, key_of
from query_mutator.llm.store import Store, default_cache_path
from query_mutator.settings import DIRECT, Calls, flag_of
from query_mutator.types import ChatRequest, Completion, ErrorInfo

logger = logging.getLogger(__name__)

MAX_FILES = 65_536
OTHER_FILES = 28  # of a trainer, in addition to its connections; 20 were seen

_SHOWN_CHARS = 12  # of a digest, as in `ollama list`


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStack:
    """The layers around one server or several; all calls share the one bound of `limit`.

    The servers are of one backend and have the same models, so what one says of a model holds for all.
    """

    servers: tuple[ModelServer, ...]
    pool: Pool
    limit: Limit  # one attempt per call; its `limit` moves where it is adaptive
    retry: Retry  # retries in the calling thread
    client: Cache  # without retries, for a scheduler that waits before them itself; counts what its calls cost
    eval_client: Cache  # the same for evaluation: in spare slots, and maybe with the store of all runs to itself
    identity: Callable[[str], str]  # of the models, for the store
    elsewhere: Mapping[str, ModelServer]  # models that another server has

    def server_of(self, model: str) -> ModelServer:
        """Return a server that has a model."""
        return self.elsewhere.get(model, self.servers[0])

    @property
    def backend_class(self) -> type[ModelServer]:
        """Return the class of the servers, which holds what they report and what advice to give about them."""
        return type(self.servers[0])

    @property
    def shared_calls(self) -> int:
        """Return how many replies were those of an equal request in flight."""
        return self.client.shared_calls + self.eval_client.shared_calls

    @property
    def cache_hits(self) -> int:
        """Return how many replies were stored before."""
        return self.client.hits + self.eval_client.hits

    def keep(self, run: Store) -> None:
        """Look into the store of a run first from now on, and write every reply there."""
        self.client.run = self.eval_client.run = run

    def require_models(self, models: Sequence[str]) -> None:
        """Raise ModelMissingError unless every server has all models, UsageError when their weights differ."""
        for model in models:
            self.identity(model)  # now, so that stored replies are found while no server answers
        self.pool.has_answered = True

    def close(self) -> None:
        """Cancel calls in flight and close connections and cache; idempotent."""
        self.retry.close()
        self.eval_client.close()


def build_client(
    urls: str | Sequence[str],
    settings: Calls = DIRECT,
    *,
    backend: str = DEFAULT_BACKEND,
    show: Callable[[str], None] = lambda line: None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    **changes: Any,
) -> ClientStack:
    """Return the composed client for one server or several; `changes` are fields of `settings`.

    Calls to a model that is `elsewhere` go to the address there alone.
    `cache="auto"` is `all` here. `show` is called with a line while no server answers (`wait_for_server_s`). A default
    `cache_path` that cannot be used costs a warning and the cache, a named one is a UsageError.
    """
    settings = replace(settings, **changes) if changes else settings
    options = {} if settings.num_ctx is None else {"num_ctx": settings.num_ctx}
    how: dict[str, Any] = {
        "timeout_s": settings.timeout_s,
        "pool_size": settings.calls_in_flight,
        "keep_alive": settings.keep_alive,
        "runner_options": options,
        "max_reply_mb": settings.max_reply_mb,
    }
    servers = BACKENDS.get(backend).open([urls] if isinstance(urls, str) else urls, **how)
    others = {model: open_elsewhere(url, **how) for model, url in elsewhere.items()}
    _allow_open_files(settings, servers=len(servers) + len(others))
    wait: dict[str, Any] = {"wait_s": settings.wait_for_server_s, "show": show}
    pool = Pool(servers, **wait)
    routes = ByModel(pool, {model: Pool([server], **wait) for model, server in others.items()})
    limit = Limit(routes if others else pool, limit=settings.calls_in_flight, is_adaptive=settings.adaptive)
    cache = None if settings.cache == "off" else _open_cache(settings.cache_path)

    @functools.cache
    def identity(model: str) -> str:
        return identity_of(model, [others[model]] if model in others else servers, num_ctx=settings.num_ctx)

    return ClientStack(
        servers=servers,
        pool=pool,
        limit=limit,
        retry=Retry(limit, RetryPolicy(max_retries=settings.max_retries)),
        client=Cache(limit, identity=identity, shared=None if settings.cache == "eval" else cache),
        eval_client=Cache(SpareCalls(limit), identity=identity, shared=cache),
        identity=identity,
        elsewhere=others,
    )


def _allow_open_files(settings: Calls, *, servers: int) -> None:
    """Raise the limit of open files as far as it may; UsageError if a connection for each call in flight exceeds it.

    A request to `qm serve` takes another one.
    """
    with suppress(ImportError):
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        each = max(1, servers)
        needed = OTHER_FILES + each * settings.calls_in_flight
        if needed > files:
            raise UsageError(
                f"--batch-size {settings.batch_size} needs about {needed} open files, and {files} are allowed; allow "
                f"more with `ulimit -n {needed}`, or give --batch-size {max(1, (files - OTHER_FILES) // each)}"
            )


class ByModel(ClientWrapper):
    """A client whose calls to some models go to clients of their own."""

    def __init__(self, client: Client, others: Mapping[str, Client]) -> None:
        super().__init__(client)
        self._others = others
        self.is_instant = self.is_instant and not others

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of the client that has the request's model."""
        return self._others.get(request.model, self._client).complete(request)

    def close(self) -> None:
        """Close all clients; idempotent."""
        for client in (self._client, *self._others.values()):
            client.close()


def open_elsewhere(url: str, **how: Any) -> ModelServer:
    """Return the server at an address that comes with a model's name; a key goes only where it belongs."""
    flag = flag_of(url)
    backend = BACKENDS.get(backend_for(flag))
    if flag == "openai_url":
        how = how | {"environ": {OpenAIBackend.key_variable: key_of(url, os.environ)}}
    return backend.open([url], **how)[0]


def identity_of(model: str, servers: Sequence[ModelServer], *, num_ctx: int | None) -> str:
    """Return what names the weights behind a model's name and how they run, after asking the servers.

    That is the model's digest, or its name and server where there is none, and the context. BackendError when a server
    does not answer, or does not have the model; UsageError when digests differ: a reply would depend on which server
    was free.
    """
    digests = {server.url: server.digest(model) for server in servers}
    if len(set(filter(None, digests.values()))) > 1:
        found = ", ".join(f"{url} has {digest[:_SHOWN_CHARS]}" for url, digest in digests.items())
        raise UsageError(f"{model} is not the same on all servers ({found}): install the same weights on each")
    names = sorted({digest or f"{model} at {url}" for url, digest in digests.items()})
    return f"{' '.join(names)} {num_ctx}"


def _open_cache(path: Path | str | None) -> Store | None:
    try:
        return Store(path or default_cache_path(), is_cache=True)
    except UsageError as error:
        if path is not None:
            raise
        logger.warning("%s; continuing without a cache", error)
        return None


# --- the pool of servers ---------------------------------------------------------------------------------------------

MAX_FAILURES = 3  # in a row, after which a server rests
MAX_REST_S = 30.0  # from 1 s, doubled each time

_ELSEWHERE = frozenset({"connect", "busy", "memory", "prompt_too_long"})  # the call goes to another server at once
_UNHEALTHY = frozenset({"connect", "busy", "memory", "timeout", "server", "malformed"})

POLL_S = 1.0  # between two questions whether a server is back
ANSWER_S = 5.0  # a version comes from the server's memory
MAX_ABSENCES = 3  # of one call: a request that ends the server must not be repeated forever


@dataclass(slots=True)
class Server:
    """One server of a pool, its calls in flight and its failures."""

    backend: ModelServer
    in_flight: int = 0
    last_used: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0  # time.monotonic(); 0 while it is healthy

    def is_available(self, now: float) -> bool:
        """Return whether a call may go here: the server is healthy, or has rested and has no call in flight."""
        return self.rests_until == 0 or (now >= self.rests_until and self.in_flight == 0)

    def note(self, error: ErrorInfo | None, *, now: float) -> None:
        """Record a reply, or a failure; one that is about the request shows a healthy server too."""
        if error is None or error.kind not in _UNHEALTHY:
            if error is None or error.kind != "cancelled":
                self.failures, self.rests_until = 0, 0.0
        elif now >= self.rests_until:  # else the call began before the rest
            self.failures = max(self.failures + 1, MAX_FAILURES if error.kind == "connect" else 0)
            if self.failures >= MAX_FAILURES:
                self.rests_until = now + min(MAX_REST_S, 2.0 ** (self.failures - MAX_FAILURES))


class Pool:
    """A client that spreads calls over servers, and holds them while none answers, for at most `wait_s` at a time.

    `show` is called with one line when a wait starts, and with "" when it ends. `clock` is that of the rests.
    """

    def __init__(
        self,
        backends: Sequence[ModelServer],
        *,
        wait_s: float = 0.0,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.servers = tuple(Server(backend) for backend in backends)
        self.is_instant = all(backend.is_instant for backend in backends)
        self._wait_s, self._show, self._clock = wait_s, show, clock
        self._turns = 0
        self._lock = threading.Lock()  # guards the servers' counters and the turns
        self.has_answered = False  # since the last wait that was in vain: then a server that is away is waited for
        self._is_there, self._closed = threading.Event(), threading.Event()
        self._is_there.set()
        self._watching = threading.Lock()  # one call asks for all that wait
        self._absences = 0

    def __repr__(self) -> str:
        return f"Pool({[server.backend for server in self.servers]!r})"

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply of one server, or the last one's failure when none took the call."""
        absences = 0
        while True:
            self._is_there.wait()
            seen = self._absences
            reply = self._try(request)
            error = reply.error
            if error is None or error.status is not None:
                self.has_answered = True
            if error is None or not is_lost(error) or absences == MAX_ABSENCES or not self._waited(seen):
                return reply
            absences += 1

    def close(self) -> None:
        """Close all servers and end the wait: the calls held fail as those of a closed server do; idempotent."""
        for server in self.servers:
            server.backend.close()
        self._closed.set()

    def _try(self, request: ChatRequest) -> Completion:
        """Return the reply of the first server that takes the call, else the last one's failure."""
        untried = list(self.servers)
        while True:
            server, reply = self._choose(untried), None
            try:
                reply = server.backend.complete(request)
            finally:
                with self._lock:
                    server.in_flight -= 1
                    if reply is not None:
                        server.note(reply.error, now=self._clock())
            untried.remove(server)
            if reply.error is None or reply.error.kind not in _ELSEWHERE or not untried:
                return reply

    def _choose(self, among: Sequence[Server]) -> Server:
        """Choose a server and count a call there: fewest in flight, used longest ago; if all rest, whose rest ends."""
        with self._lock:
            now = self._clock()
            available = [server for server in among if server.is_available(now)]
            if available:
                server = min(available, key=lambda server: (server.in_flight, server.last_used))
            else:
                server = min(among, key=lambda server: server.rests_until)
            self._turns += 1
            server.last_used = self._turns
            server.in_flight += 1
            return server

    def _waited(self, seen: int) -> bool:
        """Wait while nothing answers; return whether there was an absence since the call began, after `seen` ones."""
        with self._watching:
            if self._absences == seen and self._wait_s and self.has_answered:
                self._absences += self._watch()
            return self._absences != seen

    def _watch(self) -> bool:
        """Poll the servers until one answers; False when one does at once, or when the time is up."""
        if self._is_answered(loading=True):
            return False
        began, since = time.monotonic(), time.strftime("%H:%M")
        self._is_there.clear()
        self._show(f"server away since {since}, waiting")
        try:
            while not self._closed.wait(POLL_S):
                if self._is_answered(loading=False):
                    logger.warning("%r: nothing answered from %s to %s", self, since, time.strftime("%H:%M"))
                    return True
                self.has_answered = time.monotonic() - began < self._wait_s
                if not self.has_answered or CANCELLATION.get().is_set:  # another call that waits asks from now on
                    return False
            return True  # the servers are closed and say so
        finally:
            self._show("")
            self._is_there.set()

    def _is_answered(self, *, loading: bool) -> bool:
        """Return whether a server answers, if with an error; `loading` for one that asks to come back later."""
        for server in self.servers:
            try:
                server.backend.version(timeout_s=ANSWER_S)
            except ServerDownError:
                continue
            except BackendError as error:
                if error.kind == "cancelled" or (not loading and error.kind == "busy"):  # llama-server while it loads
                    continue
            return True
        return False


def is_lost(error: ErrorInfo) -> bool:
    """Return whether there was no connection, or it ended before the whole reply."""
    return error.kind in ("connect", "malformed") and error.status is None


# --- the limit -------------------------------------------------------------------------------------------------------

HIGH_WAIT_RATIO = 0.3  # below it waiting calls just keep the slots filled
NEGLIGIBLE_WAIT_S = 0.005  # a call; shorter waits are the server's own bookkeeping
DECREASE = 0.5  # the smallest factor a limit is multiplied by at once
_OVERLOAD = frozenset({"busy", "timeout"})


class Limit(ClientWrapper):
    """A client that lets at most `limit` calls through at once; an adaptive one moves between 1 and where it starts.

    A `spare` call waits until no other does.
    """

    def __init__(self, client: Client, *, limit: int, is_adaptive: bool = False) -> None:
        super().__init__(client)
        self.limit = self._highest = limit
        self._is_adaptive = is_adaptive
        self._in_flight = self._waiting = 0
        self._closed = self._was_full = False
        lock = threading.Lock()  # guards all of this
        self._changed, self._has_spare = threading.Condition(lock), threading.Condition(lock)
        self._start_window()

    def complete(self, request: ChatRequest, *, spare: bool = False) -> Completion:
        """Return the inner client's reply as soon as there is room for the call, if there is before its deadline."""
        if not self._take(request.deadline, spare=spare):
            return Completion.failed("timeout", "the deadline passed before there was room for the call")
        try:
            window = self._window
            reply = self._client.complete(request)
            if self._is_adaptive:
                self._learn(reply, window)
            return reply
        finally:
            with self._changed:
                self._in_flight -= 1
                self._wake()

    def _take(self, deadline: float | None, *, spare: bool) -> bool:
        """Take a place as soon as there is one; return whether there was before a time of `time.monotonic()`."""
        turn = self._has_spare if spare else self._changed
        with self._changed:
            # A closed client answers at once, so nobody needs to wait any more.
            while (self._in_flight >= self.limit or (spare and self._waiting)) and not self._closed:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._wake()  # this one may have been notified of a place
                    return False
                self._waiting += not spare
                turn.wait(left_s)
                self._waiting -= not spare
            self._in_flight += 1
            self._was_full = self._was_full or self._in_flight >= self.limit
            self._wake()  # there may be more room
            return True

    def _wake(self) -> None:
        """Let one of those who wait look for a place, if there is one."""
        if self._in_flight < self.limit:
            (self._changed if self._waiting else self._has_spare).notify()

    def close(self) -> None:
        """Let waiting calls through to the inner client, which is closed and fails them; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._has_spare.notify_all()
        super().close()

    def _learn(self, completion: Completion, window: object) -> None:
        """Count a call that started in a window; at its end, move the limit."""
        with self._changed:
            if window is not self._window:
                return
            is_overload = completion.error is not None and completion.error.kind in _OVERLOAD
            self._calls += completion.ok
            self._waited_s += completion.queue_wait_s
            self._worked_s += completion.prompt_eval_s + completion.eval_s
            if not is_overload and self._calls < self.limit:
                return
            is_waiting = self._waited_s > NEGLIGIBLE_WAIT_S * self._calls and self._worked_s > 0
            ratio = self._waited_s / self._worked_s if is_waiting else 0.0
            if is_overload or ratio > HIGH_WAIT_RATIO:
                self.limit = max(1, int(self.limit * (DECREASE if is_overload else max(DECREASE, 1 / (1 + ratio)))))
            elif self._was_full:  # else nothing shows that more would do
                self.limit = min(self._highest, self.limit + 1)
            self._wake()
            self._start_window()

    def _start_window(self) -> None:
        self._window = object()  # identifies the calls of this window
        self._calls = 0
        self._waited_s = self._worked_s = 0.0
        self._was_full = False


class SpareCalls(ClientWrapper):
    """A client whose calls go through a limit when no other call waits for it."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self._limit = limit

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply as soon as there is a place that nobody else waits for."""
        return self._limit.complete(request, spare=True)
