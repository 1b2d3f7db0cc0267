"""The flags that name model servers, the same for every command that measures one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from query_mutator.llm.address import check_addresses
from query_mutator.llm.backends import ADDRESS_FLAGS, AUTO, check_backend
from query_mutator.llm.client import MAX_REPLY_MB
from query_mutator.llm.stack import ClientSettings
from query_mutator.plugins import load_plugins

__all__ = ["ServerAddressFlags", "ServerFlags"]


@dataclass(frozen=True, kw_only=True)
class ServerAddressFlags:
    """Which servers to use."""

    plugin: tuple[str, ...] = ()
    """Modules or .py files to load first, which register backends of yours."""
    backend: str = AUTO
    """Kind of server: ollama, openai, llama, a plugin's; by default the one whose address is given, else ollama."""
    ollama_url: tuple[str, ...] = ()
    """Address of the Ollama server, or of several that share the calls; else OLLAMA_HOST, else http://127.0.0.1:11434."""
    openai_url: str | None = None
    """Address of an OpenAI-compatible server (vLLM, llama-server, ...); the key is read from OPENAI_API_KEY."""
    gguf: tuple[str, ...] = ()
    """GGUF file of the model, or two: target, then mutator. llama.cpp runs them, no server is needed."""
    target_model: str | None = None
    """The model that answers."""
    num_ctx: int | None = None
    """Context length, by default the server's. Sent to Ollama, set with --gguf; other servers have their own."""

    def __post_init__(self) -> None:
        load_plugins(self.plugin)  # first: they may register the backend
        check_backend(self.backend)
        check_addresses(ollama_url=self.ollama_url, openai_url=self.openai_url)

    @property
    def urls(self) -> dict[str, str | Sequence[str] | None]:
        """Return the addresses by the name of their flag, as `resolve_backend` and `choose_backend` take them."""
        return {name: getattr(self, name) for name in ADDRESS_FLAGS}


@dataclass(frozen=True, kw_only=True)
class ServerFlags(ServerAddressFlags):
    """Which servers to use, and how calls reach them."""

    allow_mixed: bool = False
    """Allow several servers to have different weights under one model's name."""
    keep_alive: str = "30m"
    """How long an Ollama server keeps a model loaded after a call."""
    timeout_s: Annotated[float, arg(aliases=["--timeout"])] = 120.0
    """Seconds to wait for one reply, from connecting to its last byte."""
    max_reply_mb: float = MAX_REPLY_MB
    """Longest reply that is read, in MB; a longer one is a failed call."""

    @property
    def names_server(self) -> bool:
        """Return whether an address or a kind of server is given, so that the embedded server is not meant."""
        return self.backend != AUTO or any(self.urls.values()) or self.target_model is not None

    def client_settings(self, *, batch_size: int) -> ClientSettings:
        """Return how calls reach the servers, without retries: a measurement counts failed calls."""
        return ClientSettings(
            batch_size=batch_size,
            max_retries=0,
            timeout_s=self.timeout_s,
            max_reply_mb=self.max_reply_mb,
            num_ctx=self.num_ctx,
            keep_alive=self.keep_alive,
            allow_mixed=self.allow_mixed,
        )
