"""The model servers behind the proxy: requests go there, and replies come back, byte for byte and as they arrive.

A request goes to the first address whose server lists its model; what belongs to no model goes to the first address.
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson
from aiohttp import ClientResponse, web
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict, MultiMapping
from yarl import URL

from query_mutator.files import count_values
from query_mutator.llm.connection import authorities, named_with
from query_mutator.llm.ollama import with_tag
from query_mutator.llm.transport import MAX_REPLY_BYTES
from query_mutator.types import Json

Headers = MultiMapping[str]
Content = AsyncIterator[bytes] | bytes | None

MAX_REPLY_VALUES = 1_000_000  # parsed in a tenth of a second, in which no other client is served
MODELS_PATH = "/v1/models"  # which Ollama has too
KEEP_ALIVE_S = 4.0  # llama.cpp says Keep-Alive: timeout=5, and closes then
_MAX_HEADER_BYTES = 64 * 1024
_PIECE_BYTES = 64 * 1024  # of a body; a larger one is sent in pieces, so that other requests are served in between
_ERRORS = (aiohttp.ClientError, HttpProcessingError, OSError)
#: Headers of one connection (RFC 9110, 7.6.1), which a proxy does not forward.
_HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip


class UpstreamGone(Exception):
    """The upstream could not be reached, or its reply is not a complete one of a chat."""


class UpstreamError(Exception):
    """The upstream answered a call of the proxy with an error, which the client gets as it is."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status, self.headers, self.body = status, headers, body


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a model server is; `headers`, as its key, are sent where the client has none of these names.

    If the server is this process's own (`is_own`), they replace those of the client.
    """

    url: str
    root: str = ""  # how clients' paths begin for which `url` stands: it may end in another path than /v1
    proxy: str = ""  # in front of the server
    headers: Mapping[str, str] = field(default_factory=dict)
    is_own: bool = False

    def __str__(self) -> str:
        """Return how messages name the server."""
        return named_with(self.proxy, self.url)

    def place(self, target: str) -> URL:
        """Return where what a client asks for is."""
        if self.root and target.startswith(f"{self.root}/"):
            return URL(self.url + target.removeprefix(self.root), encoded=True)
        return URL(self.url.removesuffix("/v1") + target, encoded=True)

    def sent(self, headers: Headers) -> CIMultiDict[str]:
        """Return a client's headers with those of this server."""
        kept = CIMultiDict(headers)
        for name, value in self.headers.items():
            if self.is_own or name not in kept:
                kept[name] = value
        return kept


class Upstream:
    """One or several model servers with different models; `arms` have those that a policy chooses from, by name.

    `max_reply_bytes` bounds replies that the proxy reads.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        timeout_s: float,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        arms: Mapping[str, Address] = MappingProxyType({}),
    ) -> None:
        self._addresses, self._arms = tuple(addresses), arms
        self.takes_any_name = not arms and self._addresses[0].is_own  # llama.cpp answers for models that it lacks
        self._timeout_s, self._max_reply_bytes = timeout_s, max_reply_bytes
        self._session: aiohttp.ClientSession
        self._homes: dict[str, Address] = {}  # of models, by their names with a tag

    def __str__(self) -> str:
        """Return the addresses that a question may be sent to."""
        return ", ".join(dict.fromkeys(map(str, (*self._addresses, *self._arms.values()))))

    # --- requests ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def post(self, path: str, body: Mapping[str, Any], headers: Headers) -> AsyncIterator[ClientResponse]:
        """Send a JSON body with a client's headers and yield the reply; UpstreamError for an error.

        An arm of another scheme, host or port than the first address gets none of these headers, which may have a key.
        """
        model = body.get("model")
        arm = self._arms.get(model) if isinstance(model, str) else None
        if arm is not None and URL(arm.url).origin() != URL(self._addresses[0].url).origin():
            headers = CIMultiDict()
        sent = end_to_end(headers, "content-type", "accept-encoding")
        sent.update({"Content-Type": "application/json", "Accept-Encoding": "identity"})
        async with self.send("POST", path, sent, orjson.dumps(body), model=model, address=arm) as reply:
            if 300 <= reply.status < 400:
                raise UpstreamGone(f"{reply.url}: answered with a redirect, which is not followed")
            if reply.status != 200:
                raise UpstreamError(reply.status, end_to_end(reply.headers), await self.read(reply))
            yield reply

    @asynccontextmanager
    async def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        content: Content,
        *,
        model: str | None = None,
        address: Address | None = None,
    ) -> AsyncIterator[ClientResponse]:
        """Send a request as it is and yield the reply before its body; leaving cuts what has not arrived.

        Without an address the model has one. UpstreamGone if there is no reply, or if it ends before it is complete.
        """
        address = address or await self._home(model)
        sent = address.sent(headers)
        if isinstance(content, bytes):
            sent["Content-Length"] = str(len(content))
        try:
            reply = await self._session.request(
                method,
                address.place(target),
                proxy=address.proxy or None,
                headers=sent,
                data=io.BytesIO(content) if isinstance(content, bytes) else content,
                allow_redirects=False,
            )
            try:
                if reply.status < 200:  # no server may send it, and no client would take it
                    raise UpstreamGone(f"{address}: answered with the status {reply.status}")
                yield reply
            finally:
                reply.close()
        except _ERRORS as error:
            raise UpstreamGone(f"{address}: {str(error) or type(error).__name__}") from error

    async def connected(self, _: web.Application) -> AsyncIterator[None]:
        """Keep connections open while an application runs."""
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=authorities()),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),  # cookies are the clients'
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            auto_decompress=False,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        ) as self._session:
            yield

    def arms_without(self, path: str) -> list[str]:
        """Return the models whose servers have another API than that of a path."""
        return [name for name, arm in self._arms.items() if arm.root and not path.startswith(f"{arm.root}/")]

    # --- bodies of replies -------------------------------------------------------------------------------------------

    async def pieces(self, reply: ClientResponse, *, bounded: bool = True) -> AsyncIterator[bytes]:
        """Yield a body as it arrives; UpstreamGone if one that is bounded is longer than --max-reply-mb allows."""
        left_bytes = self._max_reply_bytes if bounded else sys.maxsize
        async for piece in reply.content.iter_any():
            left_bytes -= len(piece)
            if left_bytes < 0:
                most = f"{self._max_reply_bytes / 1e6:g} MB; --max-reply-mb allows larger ones"
                raise UpstreamGone(f"{reply.url}: sent a reply of more than {most}")
            yield piece

    async def read(self, reply: ClientResponse) -> bytes:
        """Return a whole body; UpstreamGone as above."""
        return b"".join([piece async for piece in self.pieces(reply)])

    async def read_object(self, reply: ClientResponse) -> Json:
        """Return the JSON object of a whole reply; UpstreamGone for anything else."""
        found = parsed(await self.read(reply))
        if found is None:
            raise UpstreamGone(f"{reply.url}: the reply is not a JSON object of at most {MAX_REPLY_VALUES:,} values")
        return found

    # --- which server has which model --------------------------------------------------------------------------------

    async def lists(self, target: str, headers: Headers) -> list[tuple[ClientResponse, bytes]]:
        """Return the replies of all servers that can be reached to a request for a list; UpstreamGone if none can.

        A list of models is remembered; a server that is down keeps the models it had.
        """
        found = await asyncio.gather(*(self._list(address, target, headers) for address in self._addresses))
        for address, reply in reversed(tuple(zip(self._addresses, found, strict=True))):
            if target == MODELS_PATH and not isinstance(reply, UpstreamGone):
                self._homes |= dict.fromkeys(_names(reply[1]), address)
        replies = [reply for reply in found if not isinstance(reply, UpstreamGone)]
        if not replies:
            raise UpstreamGone("; ".join(map(str, found)))
        return replies

    async def _list(
        self, address: Address, target: str, headers: Headers
    ) -> tuple[ClientResponse, bytes] | UpstreamGone:
        try:
            async with self.send("GET", target, headers, None, address=address) as reply:
                return reply, await self.read(reply)
        except UpstreamGone as gone:
            return gone

    async def _home(self, model: object) -> Address:
        """Return the first address whose server lists a model; the first of all, which then says so, if none does."""
        if len(self._addresses) == 1 or not isinstance(model, str):
            return self._addresses[0]
        if with_tag(model) not in self._homes:
            await self.lists(MODELS_PATH, CIMultiDict())
        return self._homes.get(with_tag(model), self._addresses[0])


def end_to_end(headers: Headers, *without: str) -> CIMultiDict[str]:
    """Return the headers that a proxy forwards, in their order and spelling; never lengths, which it sets."""
    named = {part.strip().lower() for value in headers.getall("connection", ()) for part in value.split(",")}
    dropped = _HOP_BY_HOP | named | set(without)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


async def slices(content: bytes) -> AsyncIterator[bytes]:
    """Yield a body in small pieces, without a copy of the whole."""
    view = memoryview(content)
    for start in range(0, len(content), _PIECE_BYTES):
        yield bytes(view[start : start + _PIECE_BYTES])


def parsed(line: bytes) -> Json | None:
    """Return the JSON object in a reply or a line of a stream; None for anything else, and for too many values."""
    line = line.strip().removeprefix(b"data:")
    if len(line) > MAX_REPLY_VALUES and count_values(line) > MAX_REPLY_VALUES:
        return None
    try:
        found = orjson.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _names(content: bytes) -> frozenset[str]:
    rows = (parsed(content) or {}).get("data")
    named = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return frozenset(with_tag(str(row.get("id"))) for row in named)
