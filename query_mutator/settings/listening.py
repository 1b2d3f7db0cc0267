"""Where a server of ours listens."""

from __future__ import annotations

from dataclasses import dataclass

from query_mutator.bounds import Group, Port

__all__ = ["Listening"]


@dataclass(frozen=True, kw_only=True)
class Listening(Group):
    """The address of a server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
