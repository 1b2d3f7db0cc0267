"""The flags that name model servers, the same for every command that measures one."""

from __future__ import annotations

from dataclasses import dataclass

from query_mutator.bounds import group_of
from query_mutator.llm.address import check_addresses
from query_mutator.llm.backends import AUTO, check_backend
from query_mutator.plugins import absolute, load_plugins
from query_mutator.settings.calls import DIRECT, Calls, Connection
from query_mutator.settings.models import Address
from query_mutator.settings.output import Plugins

__all__ = ["ServerAddressFlags", "ServerFlags"]


@dataclass(frozen=True, kw_only=True)
class ServerAddressFlags(Plugins, Address):
    """Which servers to use; loads the plugins, and checks the names and addresses."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plugin", tuple(map(absolute, self.plugin)))
        load_plugins(self.plugin)  # first: they may register what other flags name
        super().__post_init__()
        check_backend(self.backend)
        check_addresses(ollama_url=self.ollama_url, openai_url=self.openai_url)


@dataclass(frozen=True, kw_only=True)
class ServerFlags(ServerAddressFlags, Connection):
    """Which servers to use, and how calls reach them."""

    @property
    def names_server(self) -> bool:
        """Return whether an address or a kind of server is given."""
        return self.backend != AUTO or any(self.urls.values()) or self.target_model is not None

    def client_settings(self, *, batch_size: int) -> Calls:
        """Return how calls reach the servers, without retries: a measurement counts failed calls."""
        return group_of(Calls, DIRECT, self, batch_size=batch_size, max_retries=0)
