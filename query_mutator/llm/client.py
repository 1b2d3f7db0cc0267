"""The seams between the product and its models: everything that answers a ChatRequest is a Client.

Client             Cache, Retry, Limit, Pool: wrappers around a client, or around servers
└── ModelServer    one server of `--backend NAME`: Ollama, OpenAI, and what users register (backends.py)

With what every call has: the address of its server; retries, of which `RetryPolicy` is the rule, a pure function from
one failure to the wait before the next attempt, and `Attempts` the state of one call under it (a scheduler drives it
with timers, `Retry` in a thread); and its end, at a deadline or when another thread cuts it: the server then stops
working on it.

    await complete_in_thread(client, request)     cancelling the task cancels the call

A call that waits for its turn makes no request once it is cancelled. A model in this process finishes its reply.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self
from urllib.parse import urlsplit

from query_mutator.errors import ModelMissingError, UsageError
from query_mutator.files.replies import Recording
from query_mutator.registry import nearest
from query_mutator.settings import Calls
from query_mutator.types import ChatRequest, Completion, ErrorInfo

MAX_EXAMINED = 50  # models whose capabilities are asked for a message
_SHOWN_NAMES = 20
INFO_TIMEOUT_S = 10.0  # versions and lists of models come from the server's memory


def shown_names(names: Sequence[str]) -> str:
    """Return the names of models for a message: a hosted server has thousands."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more:,} more" if more > 0 else "") or "none"


class Client(Protocol):
    """Answers requests, from many threads at once; wrappers (`Retry`, `Limit`) are clients around a client."""

    def complete(self, request: ChatRequest) -> Completion:
        """Return the reply; a failed call comes back with `Completion.error` set and is never raised."""

    def close(self) -> None:
        """Cancel the calls in flight (error kind "cancelled") and free the connections; idempotent."""


class ClientWrapper:
    """A client around another; what a subclass does not define is the inner client's."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.is_instant: bool = getattr(client, "is_instant", False)  # whether no worker need wait for replies

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._client!r})"

    def close(self) -> None:
        """Close the inner client; idempotent."""
        self._client.close()


class ModelServer(Client, Protocol):
    """One model server, as `--backend NAME` sees it. Subclass it: only `complete` is required.

    The class attributes are what must be known before a server is contacted.
    """

    title: ClassVar[str] = "a model server"  # in messages
    url_flag: ClassVar[str] = ""  # the setting that holds its address: one of `backends.ADDRESS_FLAGS`
    url_variable: ClassVar[str] = ""  # the environment variable that does
    default_url: ClassVar[str] = "in-process"  # "": an address is required
    api_root: ClassVar[str] = ""  # how clients' paths begin for which `http_url` stands, as "/v1"
    runs_files: ClassVar[bool] = False  # whether an address is a file, which names its model and gets pool_size slots
    is_instant: ClassVar[bool] = False  # whether replies come at once, so that caching them gains nothing
    has_runner_options: ClassVar[bool] = False  # whether a call can set num_ctx and similar options
    reports_queue: ClassVar[bool] = False  # whether replies carry the time a call queued, by the server's clock
    more_models: ClassVar[str] = "load one into it"  # advice for a server without models
    fetch_model: ClassVar[str] = ""  # the command that gets a model the server does not have, with "{name}"
    more_slots: ClassVar[str] = "start it with {slots} slots"  # advice for a server that works on fewer calls at once
    more_loaded: ClassVar[str] = "let it keep both loaded"  # advice for a server that loads two models in turns
    more_context: ClassVar[str] = "use a model with a larger context"  # advice for prompts that do not fit
    more_speed: ClassVar[str] = "give more time with --probe-s"  # advice for calls that take too long

    url: str = ""
    keep_alive: str
    runner_options: Mapping[str, Any]

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = Calls.timeout_s,
        pool_size: int = Calls.batch_size,
        keep_alive: str = Calls.keep_alive,
        runner_options: Mapping[str, Any] | None = None,
        max_reply_mb: float = Calls.max_reply_mb,
    ) -> None:
        """Take what the command line knows; a backend ignores what does not apply to it.

        `timeout_s` bounds one call from connecting to its last byte; `pool_size` is the number of calls in flight at
        once; `keep_alive` says how long the server keeps a model loaded; `max_reply_mb` bounds one reply. UsageError
        for unsupported `runner_options`.
        """
        if runner_options and not self.has_runner_options:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in runner_options)
            raise UsageError(f"{self.title} takes no {names} from a call; leave it out and start the server with it")
        self.url = url
        self.keep_alive = keep_alive
        self.runner_options = dict(runner_options or {})

    def __repr__(self) -> str:
        return f"{type(self).__name__.removesuffix('Backend')}({self.url!r})"

    @classmethod
    def address(cls, given: str | None = None) -> str:
        """Return the address given, else that of `url_variable`, else `default_url`; UsageError without any."""
        found = given or os.environ.get(cls.url_variable, "").strip() or cls.default_url
        if not found:
            flag = f"--{cls.url_flag.replace('_', '-')} http://127.0.0.1:8000" if cls.url_flag else ""
            ways = " or ".join(filter(None, (flag, cls.url_variable)))
            raise UsageError(f"{cls.title} needs an address; set {ways}")
        return found

    @classmethod
    def open(cls, urls: Sequence[str], **settings: Any) -> tuple[Self, ...]:
        """Return the servers at these addresses, or at the one that `address` finds; `settings` as in `__init__`."""
        return tuple(cls(cls.address(url), **settings) for url in urls or (None,))

    def addresses(self) -> tuple[str, ...]:
        """Return what `open` takes to open this server again."""
        return (self.url,)

    def http_url(self, model: str) -> str:
        """Return the address of the HTTP server that answers for a model, to which `qm serve` forwards requests."""
        return self.url

    def http_headers(self, model: str) -> Mapping[str, str]:
        """Return the headers, as a key, that requests to `http_url` need."""
        return {}

    def default_models(self) -> tuple[str, str] | None:
        """Return the target and the mutator of a run that names none; None when the target must be named."""
        return None

    def file_digests(self) -> tuple[str, ...]:
        """Return the sha256 of the files of models that the user gave; a run is not resumed with others."""
        return ()

    def version(self, *, timeout_s: float = INFO_TIMEOUT_S) -> str:
        """Return the server's version, "" when it has none; ServerDownError when nothing answers."""
        return ""

    def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> tuple[str, ...] | None:
        """Return the names of the models; None when there is no list, and any name is accepted."""
        return None

    def require_model(self, name: str) -> str:
        """Return the model's full name; ModelMissingError with the names that exist."""
        offered = self.models()
        if offered is None:
            return name
        for known in (name, f"{name}:latest"):
            if known in offered:
                return known
        offered = self.text_models() or ()
        close = nearest(known, offered)
        advice = [self.fetch_model.format(name=name), f"did you mean {close}?" if close else ""]
        said = ", or ".join(filter(None, advice)) or "name another"
        raise ModelMissingError(f"{self.url} has no model {name!r}: {said} (installed: {shown_names(offered)})")

    def writes_text(self, model: str) -> bool | None:
        """Return whether a model answers in words, unlike one that only makes embeddings; None when it is not known."""
        return None

    def text_models(self) -> tuple[str, ...] | None:
        """Return the names of the models without those that only make embeddings; None when there is no list.

        Of a long list only the first names are examined, since each may take a request; the others are kept.
        """
        names = self.models()
        if names is None:
            return None
        examined = (name for name in names[:MAX_EXAMINED] if self.writes_text(name) is not False)
        return (*examined, *names[MAX_EXAMINED:])

    def digest(self, model: str) -> str:
        """Return the digest of a model's weights, "" when the server does not report one; ModelMissingError."""
        self.require_model(model)
        return ""

    def describe_model(self, model: str) -> str:
        """Return one line about an existing model, for `qm doctor`."""
        return "available"

    def model_info(self, model: str) -> Mapping[str, Any]:
        """Return the figures the server gives for a model, as "llama.block_count"; {} without any."""
        return {}

    def slots(self, model: str) -> int | None:
        """Return how many calls the server says it works on at once; None when it does not say."""
        return None

    def context(self, model: str) -> int | None:
        """Return how many tokens of prompt and reply fit into one call; None when the server does not say."""
        return None

    @property
    def recording(self) -> Recording | None:
        """Return the recorded replies, beyond which nothing can be asked; None where any prompt is answered."""
        return None

    def close(self) -> None:
        """Release nothing."""


# --- the address of a server -----------------------------------------------------------------------------------------

DEFAULT_PORT = 11434
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"

_SCHEME_PORTS = {"http": 80, "https": 443}
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses to listen on, not to connect to


def server_url(text: str) -> str:
    """Return `http(s)://host:port[/path]` for any form Ollama accepts in OLLAMA_HOST; UsageError for others.

    `host`, `host:port`, `:port` and `[ipv6]:port` mean http, and port 11434 by default; a full URL has the port of its
    scheme. Quotes around it are dropped. An address that means every interface becomes loopback. Source: `OLLAMA_HOST`
    in Ollama's envconfig.
    """
    stripped = text.strip("\"' \t\r\n")
    if any(mark in stripped for mark in "@?#"):
        raise UsageError(
            "a server's address has no name, password or parameters, which would be written to logs and run folders; "
            "leave them out and put the key into the environment (OPENAI_API_KEY)"
        )
    url = stripped if "://" in stripped else f"http://{_bracketed(stripped)}"
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # raises where looking the name up would
    except ValueError as error:
        raise UsageError(f"{text!r} is not an address of a server ({error}); try http://127.0.0.1:11434") from None
    if parts.scheme not in _SCHEME_PORTS or not url.isascii() or any(character.isspace() for character in url):
        raise UsageError(f"{text!r} is not an address of a server; try http://127.0.0.1:11434")
    host = parts.hostname or "127.0.0.1"
    host = _EVERY_INTERFACE.get(host, host)
    if port is None:
        port = _SCHEME_PORTS[parts.scheme] if "://" in text else DEFAULT_PORT
    return f"{parts.scheme}://{_bracketed(host)}:{port}{parts.path.rstrip('/')}"


def check_addresses(**urls: str | Sequence[str] | None) -> None:
    """Raise a UsageError that names the flag unless the addresses of flags, by field name, could be those of servers.

    A word alone, or without a scheme anything but Ollama's `host:port`, is more likely a slip than a host.
    """
    for name, given in urls.items():
        flag = f"--{name.replace('_', '-')}"
        for url in (given,) if isinstance(given, str) else given or ():
            try:
                server_url(url)
            except UsageError as error:
                raise UsageError(f"{flag}: {error}") from None
            is_short_form = name == "ollama_url" and (":" in url or "." in url or url == "localhost")
            if "://" not in url and not is_short_form:
                raise UsageError(f"{flag} {url} has no scheme; try http://{url}")


def _bracketed(host: str) -> str:
    """Return a bare IPv6 address in brackets, anything else unchanged."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def is_loopback(host: str) -> bool:
    """Return whether a host name is that of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


# --- retries ---------------------------------------------------------------------------------------------------------

MAX_RETRY_AFTER_S = 120.0  # a server may ask for more; then the next attempt just fails again
MAX_TIMEOUTS = 1  # a retried timeout joins the end of the server's queue
#: Kinds of error after which the same call may succeed later; a wrong request or a missing model fails every time.
TRANSIENT = frozenset({"connect", "timeout", "busy", "server", "malformed", "empty", "incomplete"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Policy for retries: which failures, how often, and after which delay."""

    max_retries: int = Calls.max_retries
    first_delay_s: float = 0.25  # doubles with every attempt
    max_delay_s: float = 30.0

    def delay_s(self, error: ErrorInfo, attempt: int, *, key: str, timeouts: int | None = None) -> float | None:
        """Return the seconds to wait before the next attempt, or None when the failure is final.

        `attempt` counts the calls made so far, from 1; `timeouts` of them timed out (None: all, if the last did). Half
        of each wait is jitter drawn from `key` and `attempt`, so equal inputs give equal waits. A server's Retry-After
        is honored. A second timeout, a wrong request, a missing model, a server out of memory and a cancelled call are
        final.
        """
        if error.kind not in TRANSIENT or attempt > self.max_retries:
            return None
        if error.kind == "timeout" and (attempt if timeouts is None else timeouts) > MAX_TIMEOUTS:
            return None
        longest_s = min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1))
        digest = hashlib.blake2b(f"{attempt}:{key}".encode(), digest_size=8).digest()
        delay_s = longest_s * (0.5 + 0.5 * int.from_bytes(digest, "big") / 2**64)
        return max(delay_s, min(error.retry_after_s or 0.0, MAX_RETRY_AFTER_S))


DEFAULT_POLICY = RetryPolicy()


class Attempts:
    """The attempts at one call: how many started, how many timed out, and the wait before the next."""

    __slots__ = ("_number", "_policy", "_request", "_timeouts")

    def __init__(self, request: ChatRequest, policy: RetryPolicy) -> None:
        self._request, self._policy = request, policy
        self._number = self._timeouts = 0

    def next(self) -> ChatRequest:
        """Start another attempt; return its request, which has its number."""
        self._number += 1
        return self._request if self._number == 1 else replace(self._request, attempt=self._number)

    def delay_s(self, error: ErrorInfo | None) -> float | None:
        """Return the wait before the next attempt, None when this one succeeded or failed for good."""
        if error is None:
            return None
        self._timeouts += error.kind == "timeout"
        key = self._request.messages[-1].content if self._request.messages else self._request.model
        delay_s = self._policy.delay_s(error, self._number, key=key, timeouts=self._timeouts)
        deadline = self._request.deadline
        is_late = delay_s is not None and deadline is not None and time.monotonic() + delay_s >= deadline
        return None if is_late else delay_s

    def result(self, completion: Completion) -> Completion:
        """Return the completion with the number of attempts."""
        return completion if self._number == 1 else replace(completion, attempts=self._number)


class Retry(ClientWrapper):
    """A client that retries failed calls; the wait is spent in the calling thread and ends at `close`."""

    def __init__(self, client: Client, policy: RetryPolicy = DEFAULT_POLICY) -> None:
        super().__init__(client)
        self.policy = policy
        self._closed = threading.Event()

    def complete(self, request: ChatRequest) -> Completion:
        """Return the first reply that is an answer, or the last failure; `attempts` says how many calls it took."""
        attempts = Attempts(request, self.policy)
        while True:
            reply = self._client.complete(attempts.next())
            seconds = attempts.delay_s(reply.error)
            if seconds is None or self._closed.wait(seconds):
                return attempts.result(reply)

    def close(self) -> None:
        """Give up waiting and close the inner client; idempotent."""
        self._closed.set()
        super().close()


# --- cancellation ----------------------------------------------------------------------------------------------------


class Call:
    """One call of this thread, from connecting to the last byte of the reply; any thread may cut it."""

    def __init__(self, timeout_s: float, *cancellations: Cancellation) -> None:
        self._ends_at = time.monotonic() + timeout_s
        self._cancellations = cancellations
        self._socket: socket.socket | None = None  # the one in use
        self._is_copy = False  # of its handle
        self._lock = threading.Lock()  # guards the two above and `is_cut`
        self.is_cut = False
        self.is_first = False  # on its connection
        self.is_answered = False  # a byte of the reply has arrived

    def __enter__(self) -> Self:
        self._token = CALL.set(self)
        for each in self._cancellations:
            each.calls.add(self)
            if each.is_set:
                self.cut()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._cancellations:
            each.calls.discard(self)
        CALL.reset(self._token)
        self.release()

    def left_s(self) -> float:
        """Return the seconds left; TimeoutError when there are none."""
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def hold(self, sock: socket.socket, *, copy: bool = False) -> None:
        """Let `cut` shut down this socket from now on; ConnectionAbortedError if the call was cut.

        A TLS handshake moves the handle to another object, so `copy` is needed before.
        """
        self.release()
        with self._lock:
            if self.is_cut:
                raise ConnectionAbortedError("the call was cut")
            self._socket, self._is_copy = (sock.dup() if copy else sock), copy

    def release(self) -> None:
        """Leave the socket alone from now on: another call may use it."""
        with self._lock:
            if self._socket is not None and self._is_copy:
                self._socket.close()
            self._socket = None

    def cut(self) -> None:
        """End from another thread whatever the call waits for; idempotent."""
        with self._lock, suppress(OSError):
            self.is_cut = True
            if self._socket is not None:
                # The plain socket's method: that of a TLS socket would pull its state away under the reading thread.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class Cancellation:
    """Calls that `cancel` ends from any thread: those of a task, or those to a server."""

    def __init__(self) -> None:
        self.is_set = False
        self.calls: set[Call] = set()  # without a lock, which a fork might leave locked: each step is atomic

    def cancel(self) -> None:
        """Cut the calls in flight, and those that start later; idempotent."""
        self.is_set = True
        for call in list(self.calls):
            call.cut()


#: The call that a thread makes, and what cancels its calls.
CALL: ContextVar[Call] = ContextVar("call")
CANCELLATION: ContextVar[Cancellation] = ContextVar("cancellation", default=Cancellation())  # noqa: B039, never set


async def complete_in_thread(client: Client, request: ChatRequest, executor: Executor | None = None) -> Completion:
    """Return a client's completion, awaited; cancelling the task cancels the call."""
    cancellation, context = Cancellation(), copy_context()
    context.run(CANCELLATION.set, cancellation)
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, context.run, client.complete, request)
    except asyncio.CancelledError:
        cancellation.cancel()
        raise
