"""The seams between the product and its models: everything that answers a ChatRequest is a Client.

Client             Cache, Retry, Limit, Pool: wrappers around a client, or around servers
└── ModelServer    one server of `--backend NAME`: Ollama, OpenAI, and what users register (backends.py)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

from query_mutator.errors import ModelMissingError, UsageError
from query_mutator.files.replies import Recording
from query_mutator.registry import nearest
from query_mutator.settings import Calls
from query_mutator.types import ChatRequest, Completion

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
