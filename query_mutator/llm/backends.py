"""The backends by name, and which one a run uses (`--backend`, `--gguf`, ...).

A backend is a `ModelServer` class registered here: by this package, by an entry point of the group
`query_mutator.backends`, or by a `--plugin` module (docs/how-to/extend.md). Nothing outside a backend's file
tests its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from query_mutator.bounds import group_of
from query_mutator.errors import BackendError, ModelMissingError, UsageError
from query_mutator.files.replies import Recording
from query_mutator.llm.client import ModelServer, check_addresses, shown_names
from query_mutator.llm.llama import LlamaBackend
from query_mutator.llm.ollama import OllamaBackend
from query_mutator.llm.openai import OpenAIBackend
from query_mutator.llm.recorded import RecordedBackend
from query_mutator.registry import Registry, absolute, check_known, load_plugins
from query_mutator.settings import AUTO, DIRECT, Address, Calls, Connection, Plugins

PROBE_TIMEOUT_S = 1.0  # a server on this machine answers in milliseconds

DEFAULT_BACKEND = "ollama"  # what `auto` tries
RECORDED = "recorded"  # what `auto` takes for bundled questions where no server answers

BACKENDS: Registry[type[ModelServer]] = Registry("backend", group="query_mutator.backends")
BACKENDS.add(DEFAULT_BACKEND, OllamaBackend)
BACKENDS.add("openai", OpenAIBackend)
BACKENDS.add("llama", LlamaBackend)
BACKENDS.add(RECORDED, RecordedBackend)


def backend_for(flag: str, *, backend: str = AUTO) -> str:
    """Return `backend` if its address is given by `flag`, else the first registered backend for which that is true."""
    names = [name for name in BACKENDS if BACKENDS.get(name).url_flag == flag]
    return backend if backend in names else names[0]


def choose_backend(backend: str, urls: Mapping[str, str | Sequence[str] | None]) -> tuple[str, tuple[str, ...]]:
    """Return the backend's name, never `auto`, and the addresses given for it: `urls` maps flags to addresses.

    UsageError for an unknown name, and for addresses of another backend.
    """
    check_known("backend", backend, [AUTO, *BACKENDS])
    given = {flag: (url,) if isinstance(url, str) else tuple(dict.fromkeys(url)) for flag, url in urls.items() if url}
    if len(given) > 1:
        flags = " and ".join(map(_spelled, given))
        raise UsageError(f"{flags} name servers of two kinds; leave one of them out")
    for flag in given:
        if backend != AUTO and BACKENDS.get(backend).url_flag != flag:
            raise UsageError(f"{_spelled(flag)} names another kind of server than --backend {backend}; leave one out")
        backend = backend_for(flag, backend=backend)
    return DEFAULT_BACKEND if backend == AUTO else backend, next(iter(given.values()), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend that answers a run's calls."""

    kind: str  # a name in BACKENDS
    urls: tuple[str, ...]
    reason: str  # one line for the user
    default_models: tuple[str, str] | None = None  # the target and the mutator of a run that names none
    recording: Recording | None = None  # beyond which nothing can be asked; None where any prompt is answered

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Return the addresses under the name of their flag, so that they can be given again."""
        return {flag: self.urls} if (flag := BACKENDS.get(self.kind).url_flag) else {}


def resolve_backend(
    backend: str = AUTO,
    *,
    target_model: str | None = None,
    mutator_model: str | None = None,
    has_recording: bool = False,
    **urls: str | Sequence[str] | None,
) -> BackendChoice:
    """Return which backend a run uses, after asking the servers for the models; `urls` by flag, as `ollama_url=...`.

    `auto` falls back to the bundled recording when no server answers, no model or address is named, and it has replies
    to the questions (`has_recording`). Raises ServerDownError, ModelMissingError, or UsageError (with the available
    models) when no target model is named.
    """
    kind, given = choose_backend(backend, urls)
    servers = asked = BACKENDS.get(kind).open(given)
    models = [model for model in (target_model, mutator_model) if model is not None]
    try:
        versions = [server.version(timeout_s=PROBE_TIMEOUT_S) for server in servers]
        if target_model is None and servers[0].default_models() is None:
            raise UsageError(_name_a_model(servers[0]))
        for server in servers:
            for model in models:
                server.require_model(model)
    except BackendError as error:
        if backend != AUTO or given or models or not has_recording or isinstance(error, ModelMissingError):
            raise
        reason = f"backend: recorded replies, because no {servers[0].title} server answers at {servers[0].url}"
        kind, servers = RECORDED, BACKENDS.get(RECORDED).open(())
    else:
        found = [
            f"{f'{server.title} {version}'.strip()} at {', '.join(server.addresses())}"
            for server, version in zip(servers, versions, strict=True)
        ]
        reason = f"backend: {', '.join(found)}"
    finally:
        for server in asked:
            server.close()
    return BackendChoice(
        kind=kind,
        urls=tuple(url for server in servers for url in server.addresses()),
        reason=reason,
        default_models=servers[0].default_models(),
        recording=servers[0].recording,
    )


def _name_a_model(server: ModelServer) -> str:
    models = server.text_models()
    if models is not None and not models:
        return f"the server at {server.url} has no models: {server.more_models}"
    known = f", one of: {shown_names(models)}" if models else ""
    return f"which model should answer? Give --target-model{known}"


def _spelled(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class ServerAddressFlags(Plugins, Address):
    """Servers to use; loads the plugins, and checks the names and addresses."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(map(absolute, self.plugin)))
        load_plugins(self.plugin)  # first: they may register what other flags name
        super().__post_init__()
        check_known("backend", self.backend, [AUTO, *BACKENDS])
        check_addresses(ollama_url=self.ollama_url, openai_url=self.openai_url)


@dataclass(frozen=True, kw_only=True)
class ServerFlags(ServerAddressFlags, Connection):
    """Servers to use, and settings of calls to them."""

    @property
    def names_server(self) -> bool:
        """Return whether an address or a kind of server is given."""
        return self.backend != AUTO or any(self.urls.values()) or bool(self.target_model)

    def client_settings(self, *, batch_size: int) -> Calls:
        """Return how calls reach the servers, without retries: a measurement counts failed calls."""
        return group_of(Calls, DIRECT, self, batch_size=batch_size, max_retries=0)
