"""Several model servers behind one proxy: a call goes to a server that has its model, a list is the union of theirs.

Of the servers with a model the one with the fewest calls of the proxy is asked. One that cannot be reached is avoided
for a while; its calls go to another server with the model, and if there is none, the error names it. What belongs to no
model (versions, downloads, uploads) goes to the first server that can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import orjson

from query_mutator.apply.proxy.upstream import (
    Header,
    Response,
    Upstream,
    UpstreamGone,
    json_headers,
    read_object,
    success,
)
from query_mutator.llm.ollama import with_tag
from query_mutator.types import MAX_NAME_CHARS

__all__ = ["Upstreams"]

MODELS_PATH = b"/v1/models"  # which Ollama has too
FRESH_S = 5.0  # for which a list of models is believed
AVOIDED_S = 5.0  # after a connection that failed
LIST_S = 1.0  # for which counts by model wait for a list


class _Server:
    """One server: what it has, and how it is."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.models: frozenset[str] = frozenset()
        self.listed_at = -FRESH_S
        self.failed_at = -AVOIDED_S
        self.in_flight = 0

    @property
    def is_old(self) -> bool:
        """Return whether the list of models is to be asked for again."""
        return time.monotonic() - self.listed_at >= FRESH_S

    @property
    def is_avoided(self) -> bool:
        """Return whether a connection failed a moment ago."""
        return time.monotonic() - self.failed_at < AVOIDED_S

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a call."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Upstreams:
    """One or several model servers, as one Upstream is used."""

    def __init__(self, servers: Sequence[Upstream]) -> None:
        self._servers = [_Server(upstream) for upstream in servers]
        self._listing = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def urls(self) -> list[str]:
        """Return the addresses, in the order given."""
        return [server.upstream.url for server in self._servers]

    async def listed(self) -> frozenset[str]:
        """Return the names, with their tags, that the servers list; one that does not answer keeps what it listed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIST_S):
                await self._refresh()
        return frozenset().union(*(server.models for server in self._servers))

    async def close(self) -> None:
        """Close all connections."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        for server in self._servers:
            await server.upstream.close()

    @asynccontextmanager
    async def send(
        self,
        method: str,
        target: bytes,
        headers: Iterable[Header],
        content: AsyncIterator[bytes] | bytes | None,
        *,
        model: str | None = None,
    ) -> AsyncIterator[Response]:
        """Send a request as it is to a server that has the model; yield the reply before its body. UpstreamGone."""
        headers = list(headers)
        async with AsyncExitStack() as stack:
            yield await self._opened(stack, method, target, headers, content, model)

    @asynccontextmanager
    async def post(self, path: str, body: Mapping[str, Any], headers: Iterable[Header]) -> AsyncIterator[Response]:
        """Send a JSON body with a client's headers and yield the reply; UpstreamError for an error."""
        model = body.get("model")
        sent, content = json_headers(headers), orjson.dumps(body)
        async with self.send("POST", path.encode(), sent, content, model=str(model) if model else None) as response:
            yield await success(response)

    async def post_json(self, path: str, body: Mapping[str, Any], headers: Iterable[Header]) -> dict[str, Any]:
        """Return the whole JSON reply; UpstreamGone if it is not a JSON object."""
        async with self.post(path, body, headers) as response:
            return await read_object(response)

    async def lists(self, target: bytes, headers: Sequence[Header]) -> list[tuple[Response, bytes]]:
        """Return the replies of all servers that can be reached to a request for a list; UpstreamGone if none can."""
        found = await asyncio.gather(*(self._list(server, target, headers) for server in self._servers))
        replies = [reply for reply in found if not isinstance(reply, UpstreamGone)]
        if not replies:
            raise UpstreamGone("; ".join(map(str, found)))
        return replies

    async def _opened(
        self,
        stack: AsyncExitStack,
        method: str,
        target: bytes,
        headers: list[Header],
        content: AsyncIterator[bytes] | bytes | None,
        model: str | None,
    ) -> Response:
        """Return the reply of the first server that can be reached, of those in question."""
        servers = await self._candidates(model)
        for place, server in enumerate(servers):
            stack.enter_context(server.busy())
            try:
                sending = server.upstream.send(method, target, headers, content)
                return await stack.enter_async_context(sending)
            except UpstreamGone as gone:
                if gone.is_unreached:
                    server.failed_at = time.monotonic()
                if not gone.is_unreached or place + 1 == len(servers):  # else no byte of the body was sent
                    raise
                await stack.pop_all().aclose()
        raise AssertionError("there is at least one server")

    async def _candidates(self, model: str | None) -> list[_Server]:
        """Return the servers to try in order: those that have a model, which all may lack."""
        if len(self._servers) == 1:
            return self._servers
        if model is None:
            return sorted(self._servers, key=lambda server: server.is_avoided)
        having = self._having(model)
        if not having:
            await self._refresh()
            having = self._having(model)
        elif any(server.is_old for server in self._servers) and self._refreshing is None:
            self._refreshing = asyncio.create_task(self._refresh())  # for later calls: a server may hang
            self._refreshing.add_done_callback(self._refreshed)
        down = [server.upstream.url for server in self._servers if server.is_avoided]
        if not having and down:
            raise UpstreamGone(
                f"{', '.join(down)} cannot be reached, and no other server has {model[:MAX_NAME_CHARS]!r}"
            )
        return having or self._servers[:1]  # which says that it does not have it

    def _having(self, model: str) -> list[_Server]:
        name = with_tag(model)
        found = [server for server in self._servers if name in server.models]
        return sorted(found, key=lambda server: (server.is_avoided, server.in_flight))

    def _refreshed(self, _: asyncio.Task[None]) -> None:
        self._refreshing = None

    async def _refresh(self) -> None:
        """Ask the servers for their models; one that cannot be reached keeps what it was known to have."""
        async with self._listing:  # calls that wait here find the lists new
            old = [server for server in self._servers if server.is_old and not server.is_avoided]
            found = await asyncio.gather(*(self._list(server, MODELS_PATH, []) for server in old))
        for server, reply in zip(old, found, strict=True):
            server.listed_at = time.monotonic()
            if not isinstance(reply, UpstreamGone):
                server.models = _names(reply[1])

    async def _list(
        self, server: _Server, target: bytes, headers: Sequence[Header]
    ) -> tuple[Response, bytes] | UpstreamGone:
        try:
            async with server.upstream.send("GET", target, headers, None) as response:
                return response, await response.aread()
        except UpstreamGone as gone:
            server.failed_at = time.monotonic()
            return gone


def _names(content: bytes) -> frozenset[str]:
    try:
        rows = orjson.loads(content)["data"]
        return frozenset(with_tag(str(row["id"])) for row in rows or ())
    except (ValueError, KeyError, TypeError):
        return frozenset()
