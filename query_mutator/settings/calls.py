"""Settings of calls to the servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from query_mutator.bounds import Duration, Group, Megabytes, Parallel, Retries, Seconds, Tokens, Wait

CacheMode = Literal["auto", "off", "eval", "all"]


@dataclass(frozen=True, kw_only=True)
class Context(Group):
    """The length of a prompt and its reply."""

    num_ctx: Tokens | None = None
    """Context length, by default the server's. Sent to Ollama, set with --gguf; other servers have their own."""


@dataclass(frozen=True, kw_only=True)
class Connection(Context):
    """One call to a server."""

    timeout_s: Annotated[Seconds, Parameter(alias="--timeout")] = 120.0
    """Seconds to wait for one reply, from connecting to its last byte."""
    max_reply_mb: Megabytes = 16.0
    """Longest reply that is read, in MB; a longer one is a failed call."""
    keep_alive: Duration = "30m"
    """How long an Ollama server keeps a model loaded after a call."""


@dataclass(frozen=True, kw_only=True)
class Calls(Connection):
    """All calls of a run: how many at once, retries, cache."""

    batch_size: Parallel = 8
    """Model calls in flight at once, of all kinds together; --train-batch-size is the batch of a gradient step."""
    use_batching: Annotated[bool, Parameter(alias="--batching")] = True
    """Make calls concurrently; --no-batching makes one at a time and ignores --batch-size."""
    adaptive: bool = False
    """Find how many concurrent calls the server can sustain, from 1 to --batch-size, by the times it reports."""
    max_retries: Retries = 4
    """Retries after transient failures; a timeout is retried once."""
    wait_for_server_s: Annotated[Wait, Parameter(alias="--wait-for-server")] = 600.0
    """Seconds to wait for a server that stopped answering, as in a restart, before calls fail; 0 for no wait."""
    cache: CacheMode = "auto"
    """Calls whose replies are shared with other runs: none (off), those of evaluation, or all. auto: all, but none of
    a recording. A run always finds its own replies."""
    cache_path: str | None = None
    """File of the cache; by default one in the user's cache folder."""

    @property
    def calls_in_flight(self) -> int:
        """Return the number of model calls in flight at once."""
        return self.batch_size if self.use_batching else 1


#: The calls of a program that says nothing else: it does not wait for a server, and nothing is cached on disk.
DIRECT = Calls(wait_for_server_s=0.0, cache="off")
